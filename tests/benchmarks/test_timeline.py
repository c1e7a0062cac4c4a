"""A decode step by kind of kernel, from traces made up here."""

from __future__ import annotations

import gzip
import json

import pytest

import harness
import timeline
from timeline import EMBEDDING, HEAD, QK, Share, account, kind_of, kinds_of, measured, shares

FIRST = "triton_red_fused__to_copy_embedding_rms_norm_vllm_linear_0"
OURS = "linear_small_bf16_w12_s"
MARLIN = "void marlin::Marlin<1l, 8, true>(int4 const*)"
CUBLAS = "nvjet_sm90_tst_384x8_64x4_2x1_v_bz_TNT"
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int>(int)"
WRITE = "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(__nv_bfloat16 const*)"
ATTENTION = (
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int> > >"
)
COMBINE = "void cutlass::device_kernel<flash::FlashAttnFwdCombine<int> >(int)"
NORM = "triton_red_fused_fused_add_rms_norm_vllm_linear_0"
SILU = "triton_poi_fused_mul_silu_slice_vllm_linear_1"
SAMPLE = "_gumbel_sample_kernel"
# name, microseconds before it in which nothing runs (below 0: it overlaps), microseconds
STEP = (
    (FIRST, 1, 4),
    (OURS, 1, 10),
    ("triton_red_fused_1", 0, 1),
    ("triton_poi_fused_2", 0, 2),
    (WRITE, 0, 2),
    (ATTENTION, 0, 8),
    (COMBINE, -1, 3),
    (OURS, 0, 9),
    (NORM, 0, 3),
    (OURS, 0, 40),
    (SILU, -2, 3),
    (OURS, 0, 20),
    (NORM, 0, 3),
    (CUBLAS, 1, 300),
    (SAMPLE, 0, 30),
)
LENGTH = 438 + 3 - 3  # durations, idle, overlaps


def kernels(*parts, begin=0.0):
    made, now = [], begin
    for name, before, took in parts:
        made.append(timeline.Kernel(name, now + before, now + before + took))
        now += before + took
    return made


def write(path, made, opened=open):
    events = [
        {"cat": "kernel", "name": k.name, "ts": k.start, "dur": k.end - k.start} for k in made
    ]
    events += [{"cat": "cpu_op", "name": FIRST, "ts": 0, "dur": 5}, {"ph": "M", "name": "process"}]
    with opened(path, "wt") as file:
        json.dump({"traceEvents": events[::-1]}, file)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (OURS, "product"),
        ("linear_large_bf16_n8_r2_direct", "product"),
        (MARLIN, "product"),
        (CUBLAS, "product"),
        (SPLIT, "product"),
        ("quantize_bf16", "activations rounded or arranged"),
        (ATTENTION, "attention"),
        (COMBINE, "attention, combining its parts"),
        (WRITE, "cache write"),
        (FIRST, "embedding and first norm"),
        (NORM, "residual and norm"),
        (SILU, "SiLU and product"),
        (SAMPLE, "sampling"),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, ArgMaxOps<float> > >", "sampling"),
        ("_post_update_kernel", "requests and their tables"),
        ("Memcpy DtoH (Device -> Pinned)", "copies and fills"),
        ("Memset (Unknown)", "copies and fills"),
        (
            "void at::native::vectorized_elementwise_kernel<4, FillFunctor<int> >",
            "copies and fills",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, Add<int> >(int)", None),
        ("triton_poi_fused_clone_3", None),
        ("_a_kernel_of_tomorrow", None),
    ],
)
def test_a_name_says_what_a_kernel_is_for_or_stands_for_itself(name, kind):
    own = name.removeprefix("void ").partition("<")[0]
    assert kind_of(name) == (kind or own)


def test_places_tell_layers_head_and_what_belongs_to_queries_and_keys():
    kinds = kinds_of(kernels(*STEP))
    assert kinds[1:4] == ["qkv", QK, QK]
    assert [kinds[i] for i in (7, 9, 11, 13)] == ["o", "gate_up", "down", HEAD]


def test_a_compilers_kernel_without_a_name_elsewhere_stands_for_itself():
    step = kernels(*STEP[:-1], ("triton_poi_fused_9", 0, 1), STEP[-1])
    assert kinds_of(step)[-2] == "triton_poi_fused_9"


def test_the_end_of_a_split_product_belongs_to_it():
    step = [(FIRST, 0, 1)]
    for _ in range(5):
        step += [(CUBLAS, 0, 9), (SPLIT, 0, 1)]
    kinds = kinds_of(kernels(*step))
    assert kinds[1:] == [x for kind in (*timeline.LAYERS, HEAD) for x in (kind, kind)]


def test_a_model_with_other_layers_is_refused():
    with pytest.raises(ValueError, match=r"a step has 4 products, need 4 a block and the output"):
        kinds_of(kernels(*(part for part in STEP if part[0] != CUBLAS)))


def test_time_in_which_two_kernels_run_counts_once():
    found, waiting = shares(kernels(*STEP))
    assert waiting == 0
    assert found["attention, combining its parts"] == Share(2.0, 3.0, 0.0, 1)
    assert found["SiLU and product"] == Share(1.0, 3.0, 0.0, 1)
    assert found["residual and norm"] == Share(6.0, 6.0, 0.0, 2)
    assert found[HEAD] == Share(300.0, 300.0, 1.0, 1)
    assert sum(share.us for share in found.values()) == 438 - 3


def test_a_kernel_within_another_takes_no_time():
    inner = timeline.Kernel("Memcpy DtoH (Device -> Pinned)", 150.0, 152.0)
    step = sorted([*kernels(*STEP), inner], key=lambda kernel: kernel.start)
    found, waiting = shares(step)
    assert waiting == 0  # the other still runs
    assert found["copies and fills"] == Share(0.0, 2.0, 0.0, 1)
    assert sum(share.us for share in found.values()) == 438 - 3


def test_a_step_is_what_its_parts_take_and_leave_idle():
    made = kernels(*(STEP * 3), (FIRST, 1, 4))
    parts, whole = account(made)
    assert whole["steps"] == 3
    assert whole["step_us"] == LENGTH
    assert whole["busy_us"] + whole["idle_us"] + whole["waiting_us"] == LENGTH
    assert whole["launches"] == len(STEP)
    assert parts[EMBEDDING].idle_us == 1  # behind the step before
    assert parts["o"] == Share(9.0, 9.0, 0.0, 1)


def test_waiting_for_the_host_is_not_idle_time_of_a_kernel():
    late = ((SAMPLE, 500, 30),)
    parts, whole = account(kernels(*((*STEP[:-1], *late) * 2), (FIRST, 100, 4)))
    assert whole["waiting_us"] == 550  # 500 in one step, 600 in the other
    assert parts["sampling"].idle_us == 0
    assert parts[EMBEDDING].idle_us == 0.5
    assert whole["step_us"] == whole["busy_us"] + whole["idle_us"] + whole["waiting_us"]


def test_a_trace_without_whole_steps_is_refused():
    with pytest.raises(ValueError, match=r"1 steps begin with .*need 2 or more"):
        account(kernels(*STEP))


@pytest.mark.parametrize(("name", "opened"), [("a.json", open), ("a.json.gz", gzip.open)])
def test_what_ran_on_the_gpu_is_read_in_order(tmp_path, name, opened):
    made = kernels(*STEP, begin=5157186276015.0)
    write(tmp_path / name, made, opened)
    assert timeline.read_kernels(tmp_path / name) == made


def line(impl="nvfp4r", **facts):
    same = {"model": "qwen3-32b", "impl": impl, "batch": 1, "prompt": 512}
    return {**same, "command": "e2e.py --profile FOLDER", "tpot_ms": 7.0, **facts}


def test_the_facts_are_those_of_the_newest_run_s_first_case():
    lines = [
        line(tpot_ms=9.0, command="e2e.py"),
        line("stock"),
        line(),
        line(batch=8, tpot_ms=8.0),
        line(prompt=2048),
    ]
    assert measured("qwen3-32b-nvfp4r", lines) is lines[2]
    again = line(tpot_ms=6.0)
    assert measured("qwen3-32b-nvfp4r", [*lines, again]) is again


def test_a_trace_of_a_run_that_was_not_kept_is_refused():
    with pytest.raises(ValueError, match=r"qwen3-8b-bf16 has no line .*keep the lines of that run"):
        measured("qwen3-8b-bf16", [line()])
    with pytest.raises(ValueError, match=r"newest run of qwen3-32b-nvfp4r .*wrote no timelines"):
        measured("qwen3-32b-nvfp4r", [line(), line(command="e2e.py")])


def test_the_program_records_what_the_run_s_lines_say(tmp_path, monkeypatch, capsys):
    facts = {key: f"the {key}" for key in timeline.MACHINE}
    (tmp_path / "e2e.jsonl").write_text(json.dumps(line(**facts)) + "\n")
    write(tmp_path / "qwen3-32b-nvfp4r.json", kernels(*(STEP * 3), (FIRST, 1, 4)))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["timeline.py", str(tmp_path)])
    timeline.main()
    found = [json.loads(x) for x in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [x["part"] for x in found[:3]] == ["step", EMBEDDING, "qkv"]
    assert found[0]["step_us"] == LENGTH
    assert found[0]["tpot_ms"] == 7.0
    assert all(x[key] == value for x in found for key, value in facts.items())
    assert str(tmp_path) not in found[0]["command"]
    assert "part=gate_up" in capsys.readouterr().out
