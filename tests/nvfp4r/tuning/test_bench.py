"""`nvfp4r bench` without a GPU: flags, refusals, output, and tuning on made-up times."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from nvfp4r.cli import app
from nvfp4r.convert import quantise_checkpoint
from nvfp4r.launches import plan_for
from nvfp4r.ops import linear
from nvfp4r.packed import pack
from nvfp4r.plan import choose_plan
from nvfp4r.reference import dequantize, quantize_activations
from nvfp4r.tuning import bench as benching
from nvfp4r.tuning.candidates import candidate_plans
from nvfp4r.tuning.matrix import Matrix, Product, random_weight, truth_of
from nvfp4r.tuning.shapes import Shape
from nvfp4r.tuning.timing import copies_of, rotated_bytes
from tests.nvfp4r.sources import llama_tensors, write_source
from tests.nvfp4r.tuning.bench_on_cpu import B200, DENSE_US, H200, FakeGpu, replacing_gpu

RUNNER = CliRunner()
SHAPE = "256x512"
PRODUCT = Product(torch.bfloat16)


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path) -> Iterator[FakeGpu]:
    with replacing_gpu(monkeypatch, tmp_path / "cache") as gpu:
        yield gpu


@pytest.fixture
def fake_b200(monkeypatch, tmp_path) -> Iterator[FakeGpu]:
    """A GPU that linear_large is not built for."""
    with replacing_gpu(monkeypatch, tmp_path / "cache", "NVIDIA B200", B200) as gpu:
        yield gpu


def run(*arguments: object, code: int = 0):
    result = RUNNER.invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object) -> list[dict]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def by_the_rule(M: int, N: int = 256, K: int = 512) -> str:
    return choose_plan(M, N, K, "bf16", H200).kernel


# ---- flags, refusals ----------------------------------------------------------------------------


def test_help_names_every_flag():
    text = run("--help").stdout
    for flag in ("model", "shape", "tokens", "dtype", "activations", "tune", "json", "debug"):
        assert f"--{flag}" in text


@pytest.mark.parametrize("flags", [(), ("--tune",), ("--json",)])
def test_without_a_gpu_it_says_what_is_needed(monkeypatch, flags):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*flags, code=2)
    assert result.stdout == ""
    assert "finds no CUDA GPU" in result.stderr
    assert "compute capability 8.0 or later" in result.stderr
    assert "nvfp4r doctor" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_gpu_without_kernels_is_named(monkeypatch):
    benching.required_facts.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Quadro RTX 4000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    error = " ".join(run(code=2).stderr.split())
    assert "Error: Quadro RTX 4000: this GPU has compute capability 7.5; the kernels" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--shape", "256"), "--shape: got '256', need outputs x inputs"),
        (("--tokens", "0"), "--tokens: got '0', need numbers >= 1"),
        (
            ("--tune", "--tokens", "65,100"),
            "--tokens: got 65,100; --tune needs some of 1 .. 64, as plans for more tokens are the",
        ),
        (("--model", "no/such/folder"), "no/such/folder: no such folder"),
        (("--model", "x", "--shape", "8x16"), "--model and --shape: got both"),
    ],
)
def test_bad_flags_are_named_before_a_gpu_is_looked_for(flags, words):
    assert words in " ".join(run(*flags, code=2).stderr.split())


@pytest.mark.parametrize("flags", [("--dtype", "float32"), ("--activations", "fp8")])
def test_unknown_choices_are_refused(flags):
    assert flags[0] in run(*flags, code=2).stderr


# ---- measurements -------------------------------------------------------------------------------


def test_json_is_one_object_a_line(fake_gpu):
    lines = run_json("--shape", SHAPE, "--shape", "512x256", "--tokens", "1,16,200")
    assert [(line["N"], line["M"]) for line in lines] == [
        (N, M) for N in (256, 512) for M in (1, 16, 200)
    ]
    first = lines[0]
    assert first["bench"] == "linear"
    assert (first["gpu"], first["driver"]) == ("NVIDIA H200", "580.95.05")
    assert (first["dtype"], first["activations"]) == ("bfloat16", "none")
    assert first["median_us"] == 4.0
    assert (first["dense_us"], first["over_dense"]) == (DENSE_US, DENSE_US / 4)
    assert first["tb_per_s"] == pytest.approx(256 * 512 * 9 / 16 / 4e6, rel=1e-3)
    assert first["of_read"] == pytest.approx(first["tb_per_s"] / 4, rel=1e-3)
    assert first["plan"]["kernel"] == by_the_rule(1)
    assert "warps share K" in first["plan"]["reason"]
    assert (lines[2]["plan"]["path"], lines[2]["plan"]["kernel"]) == ("large", by_the_rule(200))
    assert lines[2]["plan"]["split"]["row_units"] >= 1


def test_json_names_a_dense_product(fake_b200):
    (line,) = run_json("--shape", SHAPE, "--tokens", "200")
    assert (line["plan"]["path"], line["plan"]["split"]) == ("unpack", None)


def test_the_copies_are_more_than_the_cache_holds(fake_gpu):
    run_json("--shape", SHAPE, "--tokens", "1")
    stored = 256 * 512 * 9 // 16
    assert fake_gpu.copies == [copies_of(2 * 256 * 512, 500_000), copies_of(stored, 500_000)]
    assert all(
        count * size >= 500_000
        for count, size in zip(fake_gpu.copies, (262_144, stored), strict=True)
    )


@pytest.mark.parametrize(
    ("l2_bytes", "least"), [(50 << 20, 256_000_000), (126 << 20, 2 * (126 << 20))]
)
def test_rotated_bytes_exceed_twice_the_cache(monkeypatch, l2_bytes, least):
    properties = type("Properties", (), {"L2_cache_size": l2_bytes})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert least <= rotated_bytes(0) <= least + 1
    assert rotated_bytes(0) > 2 * l2_bytes


def test_the_table_tells_plan_and_reason(fake_gpu, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    text = run("--shape", SHAPE, "--tokens", "1,8,16,65,9000", "--dtype", "float16").stdout
    assert "NVIDIA H200, driver 580.95.05" in text
    assert "reads 4.00 TB/s; float16, activations none" in text
    assert "linear_small_f16_w12_s, grid 16, cluster 1" in text
    assert "linear_small_f16_w8, grid 16, cluster 1" in text
    assert "linear_medium_f16_n2_r1, grid" in text
    large = choose_plan(65, 256, 512, "f16", H200)
    rings = f"depth {large.depth} and {large.x_depth}"
    assert large.kernel.startswith("linear_large_f16_n16_r")
    assert f"{large.kernel}, grid {large.grid}, cluster {large.cluster}, {rings}" in text
    assert large.reason in text
    assert "2 times linear_large_f16_n" in text  # 9000
    assert "unpack" not in text
    assert "1.25x" in text


def test_the_table_of_a_gpu_without_linear_large(fake_b200, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    text = run("--shape", SHAPE, "--tokens", "33,65,200", "--dtype", "float16").stdout
    assert "NVIDIA B200, driver" in text
    assert "linear_medium_f16_n6_r1, grid" in text
    assert "2 times linear_medium_f16_n6_r1" in text
    assert "unpack, then cuBLAS" in text
    assert "M = 200 is above 192" in text


def test_the_default_is_qwen3_8b_and_three_numbers_of_tokens(fake_gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "nvfp4r.cli_bench.measure", lambda shapes, tokens, *_: asked.append((shapes, tokens)) or []
    )
    run()
    ((shapes, tokens),) = asked
    assert [str(shape) for shape in shapes] == [
        "6144x4096",
        "4096x4096",
        "24576x4096",
        "4096x12288",
    ]
    assert tokens == (1, 8, 16)


def test_shapes_of_a_checkpoint(fake_gpu, tmp_path):
    source = write_source(tmp_path / "source", llama_tensors())
    quantise_checkpoint(source, tmp_path / "out")
    lines = run_json("--model", tmp_path / "out", "--tokens", "2", "--activations", "nvfp4")
    assert "self_attn.{q_proj,k_proj,v_proj}" in {line["name"] for line in lines}
    assert {line["activations"] for line in lines} == {"nvfp4"}
    assert {line["plan"]["kernel"][-2:] for line in lines} == {"_s"}


def test_a_wrong_result_stops_before_anything_is_timed(fake_gpu):
    fake_gpu.factor = lambda plan: 1.02
    result = run("--shape", SHAPE, code=1)
    assert fake_gpu.copies == []
    assert result.stdout == ""
    error = " ".join(result.stderr.split())
    assert f"shape {SHAPE}, M = 1, {by_the_rule(1)}: the result is off by" in error


def test_a_time_that_the_memory_does_not_allow_is_refused(fake_gpu):
    fake_gpu.us = lambda plan: 0.01
    error = " ".join(run("--shape", SHAPE, code=1).stderr.split())
    assert "TB/s is more than the memory gives (4.00 TB/s)" in error


def test_a_shape_that_stays_in_the_cache_is_refused(fake_gpu):
    error = " ".join(run("--shape", "8x16", code=2).stderr.split())
    assert "shape 8x16: 4096 copies of 72 bytes are less than the 500000" in error


def test_full_memory_names_the_shape(fake_gpu, monkeypatch):
    def full(*arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(benching, "Matrix", full)
    assert f"shape {SHAPE}: the GPU's memory" in " ".join(
        run("--shape", SHAPE, code=2).stderr.split()
    )


# ---- the check ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantised", [False, True])
def test_the_truth_is_that_of_the_reference(dtype, quantised):
    weight, x = random_weight(40, 48, "cpu"), torch.randn(3, 48).to(dtype)
    scale = torch.tensor(0.003) if quantised else None
    truth = truth_of(x, weight, scale)
    values = x.double()
    if scale is not None:
        values = quantize_activations(x, scale)[0] * float(scale)
    expected = values @ dequantize(weight).T
    torch.testing.assert_close(truth.y, expected, rtol=1e-12, atol=1e-12)
    packed = pack(weight, "bf16" if dtype == torch.bfloat16 else "f16")
    y = linear(x, packed.tiles, packed.alpha, None, scale, 40, 48, packed.order)
    assert truth.excess(y) <= 1
    one_unit = torch.finfo(dtype).eps * y.abs()
    assert truth.excess(y + 2 * one_unit) > 1
    y[1, 7] = float("nan")
    assert not truth.excess(y) <= 1


# ---- tuning -------------------------------------------------------------------------------------


def faster(kernel: str, share: float):
    """Every plan of a kernel takes `share` less time than all others."""
    return lambda plan: 4.0 * (1 - share * (plan.kernel == kernel))


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
@pytest.mark.parametrize("kernel", ["linear_small_bf16_w4", "linear_small_bf16_w4_s"])
def test_tuning_finds_keeps_and_uses_the_fastest(fake_gpu, activations, kernel):
    fake_gpu.us = faster(kernel, 0.1)
    flags = ("--shape", SHAPE, "--tokens", "3,8", "--activations", activations)
    tuning, *measured = run_json("--tune", *flags)
    assert (tuning["bench"], tuning["range"], tuning["tokens"]) == ("tune", [3, 8], [3, 8])
    assert (tuning["default_us"], tuning["best_us"], tuning["gain"]) == (8.0, 7.2, 0.1)
    assert tuning["is_kept"] is True
    assert tuning["best"]["kernel"] == kernel
    assert [line["plan"]["kernel"] for line in measured] == [kernel] * 2
    assert "tuned on this GPU: takes 10% less" in measured[0]["plan"]["reason"]
    quantised = activations == "nvfp4"
    assert plan_for(5, 256, 512, "bf16", H200, 0, quantised).kernel == kernel
    assert plan_for(5, 256, 512, "bf16", H200, 0, not quantised).kernel != kernel
    again = run_json(*flags)
    assert [line["plan"]["kernel"] for line in again] == [kernel] * 2
    assert [line["plan"]["apart"] for line in again] == [quantised] * 2


def test_one_and_two_tokens_are_tuned_together(fake_gpu):
    fake_gpu.us = faster("linear_small_bf16_w4_s", 0.1)
    lines = run_json("--tune", "--shape", SHAPE, "--tokens", "1,2,8")
    tunings = [line for line in lines if line["bench"] == "tune"]
    assert [(tuning["range"], tuning["tokens"]) for tuning in tunings] == [
        ([1, 2], [1, 2]),
        ([3, 8], [8]),
    ]


def test_a_gain_of_2_percent_changes_nothing(fake_gpu):
    fake_gpu.us = faster("linear_small_bf16_w4", 0.02)
    tuning, measured = run_json("--tune", "--shape", SHAPE, "--tokens", "8")
    assert (tuning["is_kept"], tuning["gain"]) == (False, 0.02)
    assert measured["plan"]["kernel"] == by_the_rule(8) != "linear_small_bf16_w4"


def test_a_plan_that_loses_later_is_removed(fake_gpu):
    flags = ("--tune", "--shape", SHAPE, "--tokens", "8,16")
    fake_gpu.us = faster("linear_small_bf16_w4", 0.1)
    run_json(*flags)
    fake_gpu.us = faster("linear_medium_bf16_n2_r2", 0.1)
    tunings = [line for line in run_json(*flags) if line["bench"] == "tune"]
    assert [tuning["is_kept"] for tuning in tunings] == [False, True]
    assert plan_for(8, 256, 512, "bf16", H200, 0).kernel == by_the_rule(8)
    assert plan_for(16, 256, 512, "bf16", H200, 0).kernel == "linear_medium_bf16_n2_r2"


@pytest.mark.parametrize(("share", "is_kept"), [(0.1, True), (0.02, False)])
def test_linear_medium_is_tried_beside_linear_large(fake_gpu, share, is_kept):
    """The rule's own plan for 33 to 64 tokens here; what is kept serves its range, and no other."""
    medium, shape = "linear_medium_bf16_n6_r2", (4240, 64)
    fake_gpu.us = faster(medium, share)
    tuning, measured = run_json("--tune", "--shape", "4240x64", "--tokens", "48")
    assert tuning["tried"] == len(candidate_plans(48, *shape, "bf16", H200)) > 0
    assert (tuning["is_kept"], tuning["best"]["kernel"]) == (is_kept, medium)
    kernel = medium if is_kept else by_the_rule(48, *shape)
    assert by_the_rule(48, *shape).startswith("linear_large_bf16_n8_r")
    assert (measured["plan"]["kernel"], measured["plan"]["passes"]) == (kernel, 1)
    assert plan_for(33, *shape, "bf16", H200, 0).kernel == kernel
    for M in (32, 49, 96):  # 96 would be two passes of 48 elsewhere
        assert plan_for(M, *shape, "bf16", H200, 0).kernel == by_the_rule(M, *shape)


def test_where_linear_large_is_not_built_a_tuned_plan_serves_passes_too(fake_b200):
    fake_b200.us = faster("linear_medium_bf16_n6_r2", 0.1)
    run_json("--tune", "--shape", SHAPE, "--tokens", "48")
    plan = plan_for(96, 256, 512, "bf16", B200, 0)
    assert (plan.kernel, plan.passes) == ("linear_medium_bf16_n6_r2", 2)


def test_other_shapes_stay(fake_gpu):
    fake_gpu.us = faster("linear_small_bf16_w4", 0.1)
    run_json("--tune", "--shape", SHAPE, "--tokens", "8")
    run_json("--tune", "--shape", "512x256", "--tokens", "8")
    for N, K in ((256, 512), (512, 256)):
        assert plan_for(8, N, K, "bf16", H200, 0).kernel == "linear_small_bf16_w4"


def test_a_fast_but_wrong_plan_is_not_taken(fake_gpu):
    fake_gpu.us = faster("linear_small_bf16_w4", 0.5)
    fake_gpu.factor = lambda plan: 1.02 if plan.kernel.endswith("w4") else 1.0
    tuning, _ = run_json("--tune", "--shape", SHAPE, "--tokens", "8")
    assert [plan["kernel"] for plan in tuning["wrong"]] == ["linear_small_bf16_w4"]
    assert tuning["is_kept"] is False


def test_clusters_that_the_gpu_cannot_hold_are_left_out(fake_gpu):
    flags = ("--tune", "--shape", SHAPE, "--tokens", "16")
    tried, _ = run_json(*flags)
    fake_gpu.held_clusters = 0
    fewer, _ = run_json(*flags)
    assert 0 < fewer["tried"] < tried["tried"]


def test_the_table_of_a_tuning(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "250")
    fake_gpu.us = faster("linear_small_bf16_w4", 0.1)
    text = run("--tune", "--shape", SHAPE).stdout
    for bounds in ("1..2", "3..8", "9..16", "17..32", "33..48", "49..64"):
        assert bounds in text
    assert "10.0%" in text
    assert "linear_small_bf16_w4, grid 16" in text
    assert f"Kept in {tmp_path}/cache/plans-nvidia-h200.json: what saves at least 3%" in text


def test_a_folder_that_cannot_be_written_stops_before_tuning(fake_gpu, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVFP4R_CACHE_DIR", str(tmp_path / "file"))
    result = run("--tune", "--shape", SHAPE, code=2)
    assert "tuned plans cannot be kept" in result.stderr
    assert fake_gpu.copies == []


def test_a_matrix_is_checked_where_nothing_is_written(fake_gpu, monkeypatch):
    """A plan's output starts as NaN."""
    matrix = Matrix(Shape("", 256, 512), PRODUCT, 500_000)
    plan = choose_plan(8, 256, 512, "bf16", H200)
    assert matrix.plan_excess(plan, 8) <= 1
    monkeypatch.setattr("nvfp4r.tuning.matrix.run_plan", lambda plan, x, layer, out: out)
    assert not matrix.plan_excess(plan, 8) <= 1
