"""Tuned plans on disk: read where they were made, never trusted, never needed; the ops use them."""

import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from nvfp4r import launches, ops
from nvfp4r.launches import plan_for
from nvfp4r.packed import pack
from nvfp4r.plan import DeviceFacts, choose_plan, tuned
from nvfp4r.plan.medium import MediumSplit
from nvfp4r.plan.small import SmallSplit
from nvfp4r.plan.tuned import Problem, Tuned, load_tuned, sources_key, tuned_file
from nvfp4r.quantize import quantize

H200 = DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True, has_wgmma=True)
GPU = "NVIDIA H200"
TWO = Problem((1, 2), 256, 512, "bf16", True)
FEW = Problem((3, 8), 256, 512, "bf16", False)
MORE = Problem((17, 32), 256, 512, "bf16", True)
PLANS = {
    TWO: Tuned(SmallSplit(12, 8, 3, shared_x=True), 3.0, 4.0),
    FEW: Tuned(SmallSplit(12, 16), 8.0, 10.0),
    MORE: Tuned(MediumSplit(1, 2, 8, 2, 3), 9.25, 10.5),
}

# As a user who owns nothing here: root could write anywhere.
STRANGER = """
import logging, os
from tests.nvfp4r.plan.test_tuned import GPU, H200, PLANS
from nvfp4r.plan.tuned import load_tuned, tuned_file
logging.basicConfig()
file = tuned_file(GPU, H200)
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(load_tuned(GPU, H200) == PLANS)
try:
    file.write(PLANS, None)
except OSError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NVFP4R_CACHE_DIR", str(tmp_path / "made" / "when needed"))
    monkeypatch.delenv("NVFP4R_TUNED_PLANS", raising=False)
    return tmp_path / "made" / "when needed"


@pytest.fixture
def kept(folder):
    """A file with PLANS."""
    file = tuned_file(GPU, H200)
    file.write(PLANS, "580.95.05")
    assert file.path == folder / "plans-nvidia-h200.json"
    return file.path


def messages(caplog) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_what_is_kept_comes_back(kept, caplog):
    assert load_tuned(GPU, H200) == PLANS
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert messages(caplog) == []


def test_the_file_tells_where_it_was_made(kept):
    document = json.loads(kept.read_text())
    assert document["gpu"] == GPU
    assert document["driver"] == "580.95.05"
    assert document["sm_count"] == 132
    assert document["sources"] == sources_key()
    assert document["plans"][1] == {
        "tokens": [3, 8],
        "N": 256,
        "K": 512,
        "order": "bf16",
        "quantised": False,
        "split": {"warps": 12, "grid": 16, "depth": 2, "shared_x": False},
        "us": 8.0,
        "default_us": 10.0,
    }
    assert document["plans"][0]["split"] == {"warps": 12, "grid": 8, "depth": 3, "shared_x": True}


def test_no_file_is_no_plans(folder, caplog):
    assert load_tuned(GPU, H200) == {}
    assert not folder.exists()
    assert messages(caplog) == []


def test_no_home_folder_is_no_plans(monkeypatch):
    monkeypatch.setattr(tuned, "cache_folder", lambda: None)
    assert tuned_file(GPU, H200) is None
    assert load_tuned(GPU, H200) == {}


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"sources": "0" * 64}, "was made for other kernels than these"),
        ({"gpu": "B200"}, "was made for B200 with 132 SMs, and this is NVIDIA H200 with 132"),
        (
            {"sm_count": 60},
            "made for NVIDIA H200 with 60 SMs, and this is NVIDIA H200 with 132 SMs",
        ),
    ],
)
def test_what_was_made_elsewhere_is_ignored(kept, caplog, values, fault):
    change(kept, **values)
    assert load_tuned(GPU, H200) == {}
    (message,) = messages(caplog)
    assert message.startswith(f"{kept} was made for ")
    assert fault in message
    assert "nvfp4r bench --tune" in message


def test_the_hash_follows_the_kernel_sources(monkeypatch):
    before = sources_key()
    monkeypatch.setattr(tuned, "kernel_sources", lambda: {"nvfp4r.cu": "another"})
    assert sources_key() != before


def entry(**values):
    """The document with the entry of FEW alone, changed."""

    def apply(document):
        document["plans"] = [document["plans"][1] | values]
        return json.dumps(document)

    return apply


DAMAGES = {
    "empty": lambda document: "",
    "cut": lambda document: json.dumps(document)[:-20],
    "a list": lambda document: "[]",
    "another format": lambda document: json.dumps(document | {"format": 2}),
    "no GPU": lambda document: json.dumps({k: v for k, v in document.items() if k != "gpu"}),
    "no list": lambda document: json.dumps(document | {"plans": 3}),
    "no entries": lambda document: json.dumps(document | {"plans": [3]}),
    "an unknown field": entry(colour="red"),
    "no such range": entry(tokens=[3, 9]),
    "a range of other kernels": entry(tokens=[1, 8]),
    "three tokens": entry(tokens=[3, 8, 9]),
    "the split of another kernel": entry(split={"held": 1, "cluster": 1}),
    "a split of linear_large": entry(
        tokens=[33, 48], split=asdict(choose_plan(65, 256, 512, "bf16", H200).split)
    ),
    "no split": entry(split=None),
    "too many warps": entry(split={"warps": 16, "grid": 16}),
    "more CTAs than tiles": entry(split={"warps": 12, "grid": 17}),
    "half a CTA": entry(split={"warps": 12, "grid": 8.5}),
    "a word": entry(split={"warps": 12, "grid": "16"}),
    "no stages": entry(split={"warps": 12, "grid": 16, "depth": 0}),
    "stages that do not fit": entry(split={"warps": 12, "grid": 16, "depth": 9}),
    "true stages": entry(split={"warps": 12, "grid": 16, "depth": True}),
    "x in shared memory: 1": entry(split={"warps": 12, "grid": 16, "shared_x": 1}),
    "x in shared memory: a word": entry(split={"warps": 12, "grid": 16, "shared_x": "yes"}),
    "x in shared memory: nothing": entry(split={"warps": 12, "grid": 16, "shared_x": None}),
    "x in shared memory of 8 warps": entry(split={"warps": 8, "grid": 16, "shared_x": True}),
    "x that does not fit": entry(K=16_384, split={"warps": 4, "grid": 16, "shared_x": True}),
    "x in shared memory of linear_medium": entry(
        tokens=[9, 16], split=asdict(MediumSplit(1, 2, 8, 2, 3)) | {"shared_x": False}
    ),
    "no order": entry(order="f32"),
    "an odd K": entry(K=24),
    "no time": entry(us="fast"),
    "not a truth value": entry(quantised=0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_one_warning(kept, caplog, damage):
    kept.write_text(DAMAGES[damage](json.loads(kept.read_text())))
    assert load_tuned(GPU, H200) == {}
    (message,) = messages(caplog)
    assert message.startswith(f"{kept} is damaged (")


def test_bytes_that_are_no_text_are_ignored(kept, caplog):
    kept.write_bytes(b"\xff\xfe\x00")
    assert load_tuned(GPU, H200) == {}
    (message,) = messages(caplog)
    assert message.startswith(f"{kept} cannot be read (")


def test_a_split_must_fit_the_largest_m_of_its_range(kept, caplog):
    """49 tokens would fit, 64 do not."""
    split = {"held": 2, "cluster": 1, "clusters": 8, "depth": 2, "x_depth": 3}
    document = json.loads(kept.read_text())
    document["plans"] = [document["plans"][1] | {"tokens": [49, 64], "split": split}]
    kept.write_text(json.dumps(document))
    assert load_tuned(GPU, H200) == {}
    (message,) = messages(caplog)
    assert "bytes of shared memory, a CTA has 232448" in message


@pytest.mark.parametrize(("value", "is_used"), [("", True), ("1", True), ("0", False)])
def test_a_variable_switches_tuned_plans_off(kept, monkeypatch, value, is_used):
    monkeypatch.setenv("NVFP4R_TUNED_PLANS", value)
    assert load_tuned(GPU, H200) == (PLANS if is_used else {})


def test_another_value_of_the_variable_is_refused(monkeypatch):
    monkeypatch.setenv("NVFP4R_TUNED_PLANS", "no")
    with pytest.raises(ValueError, match="NVFP4R_TUNED_PLANS is 'no'; set it to 0 or 1"):
        load_tuned(GPU, H200)


def test_a_folder_that_may_only_be_read(monkeypatch):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to strangers
        monkeypatch.setenv("NVFP4R_CACHE_DIR", name)
        file = tuned_file(GPU, H200)
        file.write(PLANS, None)
        file.path.chmod(0o444)
        Path(name).chmod(0o555)
        try:
            done = subprocess.run([sys.executable, "-c", STRANGER], capture_output=True, text=True)
        finally:
            Path(name).chmod(0o755)
        was_read, error = done.stdout.splitlines()
        assert was_read == "True", done.stderr
        assert f"{file.path}: tuned plans cannot be kept (Permission denied); set NVFP4R" in error
        assert [path.name for path in Path(name).iterdir()] == [file.path.name]


def test_a_full_disk_leaves_the_old_file(kept, monkeypatch):
    before = kept.read_bytes()

    def full(self, blob):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"plans-nvidia-h200\.json: tuned plans cannot be kept"):
        tuned_file(GPU, H200).write({}, None)
    assert kept.read_bytes() == before
    assert list(kept.parent.iterdir()) == [kept]


# ---- who uses them ------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Device 0 is an H200, and what is read for it is forgotten before and after."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU)
    monkeypatch.setattr(launches, "required_facts", lambda index: H200)
    launches.tuned_plans.cache_clear()
    yield
    launches.tuned_plans.cache_clear()


@pytest.mark.parametrize("M", [3, 5, 8])
def test_a_tuned_plan_serves_its_whole_range(kept, gpu, M):
    plan = plan_for(M, 256, 512, "bf16", H200, 0)
    assert (plan.kernel, plan.grid) == ("linear_small_bf16_w12", 16)
    assert plan.reason == "tuned on this GPU: takes 20% less time than the rule's plan"
    assert plan.shared_bytes == 2 * (12 * 2304 + 16) + 2 * 12 * 16 * M * 4


@pytest.mark.parametrize("M", [1, 2])
def test_a_tuned_plan_may_keep_x_in_shared_memory(kept, gpu, M):
    plan = plan_for(M, 256, 512, "bf16", H200, 0, quantised=True)
    assert (plan.kernel, plan.grid, plan.depth) == ("linear_small_bf16_w12_s", 8, 3)
    assert (plan.threads, plan.apart) == (448, False)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_tuned_plan_may_prepare_x_apart(folder, gpu, quantised):
    """Measured with that kernel in front of it."""
    problem = Problem((1, 2), 256, 512, "bf16", quantised)
    tuned_file(GPU, H200).write({problem: Tuned(SmallSplit(8, 16), 3.0, 4.0)}, None)
    plan = plan_for(2, 256, 512, "bf16", H200, 0, quantised)
    assert (plan.kernel, plan.apart) == ("linear_small_bf16_w8", quantised)


@pytest.mark.parametrize("M", [17, 24, 32])
def test_the_bits_of_a_row_do_not_depend_on_m(kept, gpu, M):
    plan = plan_for(M, 256, 512, "bf16", H200, 0, quantised=True)
    assert plan.kernel == "linear_medium_bf16_n4_r1"
    assert (plan.cluster, plan.grid, plan.depth, plan.x_depth) == (2, 16, 2, 3)


def test_a_tuned_plan_replaces_linear_large_in_its_range_alone(folder, gpu, caplog):
    """That 33 to 64 tokens are linear_large's by the rule does not make the file a damaged one."""
    split = MediumSplit(1, 2, 8, 2, 2)
    problem = Problem((33, 48), 4240, 512, "bf16", False)
    tuned_file(GPU, H200).write({problem: Tuned(split, 8.0, 10.0)}, None)
    for M in (33, 48):
        plan = plan_for(M, 4240, 512, "bf16", H200, 0)
        assert (plan.path, plan.kernel, plan.split) == ("medium", "linear_medium_bf16_n6_r1", split)
    for M in (49, 66, 96, 144):
        plan = plan_for(M, 4240, 512, "bf16", H200, 0)
        assert plan == choose_plan(M, 4240, 512, "bf16", H200)
        assert plan.path == "large"
    assert messages(caplog) == []


@pytest.mark.parametrize(
    "problem",
    [
        (9, 256, 512, "bf16", False),  # another range
        (2, 256, 512, "bf16", False),
        (3, 256, 1024, "bf16", False),
        (3, 272, 512, "bf16", False),
        (3, 256, 512, "f16", False),
        (3, 256, 512, "bf16", True),  # another kernel
        (65, 256, 512, "bf16", False),
    ],
)
def test_everything_else_goes_by_the_rule(kept, gpu, problem):
    *sizes, quantised = problem
    expected = choose_plan(*sizes, H200, quantised)
    assert plan_for(*sizes, H200, 0, quantised) == expected
    assert not expected.reason.startswith("tuned")


def test_the_file_is_read_once(kept, gpu):
    before = plan_for(3, 256, 512, "bf16", H200, 0)
    kept.unlink()
    assert plan_for(3, 256, 512, "bf16", H200, 0) == before
    launches.tuned_plans.cache_clear()
    assert plan_for(3, 256, 512, "bf16", H200, 0) == choose_plan(3, 256, 512, "bf16", H200)


def test_a_bad_file_is_told_of_once(kept, gpu, caplog):
    kept.write_text("{")
    for _ in range(3):
        assert plan_for(3, 256, 512, "bf16", H200, 0) == choose_plan(3, 256, 512, "bf16", H200)
    assert len(messages(caplog)) == 1


class OnGpu(torch.Tensor):
    """Says that it is on device 0."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.mark.parametrize("op", [ops.linear, ops.gemv])
def test_the_ops_use_them(kept, gpu, monkeypatch, op):
    used = []

    def run_plan(plan, x, layer):
        used.append(plan)
        return torch.zeros(x.shape[0], layer.N)

    monkeypatch.setattr(ops, "run_plan", run_plan)
    for name in ("device_facts", "required_facts"):
        monkeypatch.setattr(ops, name, lambda index: H200)
    packed = pack(quantize(torch.randn(256, 512)), "bf16")
    x, tiles, alpha = (
        tensor.as_subclass(OnGpu)
        for tensor in (torch.zeros(3, 512).bfloat16(), packed.tiles, packed.alpha)
    )
    op._init_fn(x, tiles, alpha, None, None, 256, 512, "bf16")
    op._init_fn(x.repeat(3, 1), tiles, alpha, None, None, 256, 512, "bf16")
    assert [plan.kernel for plan in used] == ["linear_small_bf16_w12", "linear_medium_bf16_n2_r1"]
    assert used[0].reason.startswith("tuned on this GPU")
