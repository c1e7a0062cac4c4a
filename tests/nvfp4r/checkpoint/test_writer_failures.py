"""What the writer refuses, and that a failure leaves nothing behind and an old output alone."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nvfp4r.checkpoint import load_checkpoint
from nvfp4r.checkpoint.writer import save_checkpoint
from nvfp4r.format import NVFP4Tensor
from nvfp4r.quantize import quantize

WEIGHT = torch.linspace(-1, 1, 48 * 32).reshape(48, 32)
QUANTISED = quantize(WEIGHT)
ONE = torch.tensor(1.0)


def tree(folder):
    """Every path below a folder with its content, to see that nothing changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def save(path, tensors=(("a.weight", QUANTISED),), **options):
    return save_checkpoint(path, tensors, config={}, **options)


@pytest.fixture(params=[False, True], ids=["new", "force"])
def target(request, tmp_path):
    """An output that does not exist, or an old checkpoint that is to be replaced."""
    path = tmp_path / "place" / "out"
    path.parent.mkdir()
    if request.param:
        save(path, [("old.weight", QUANTISED)])
    return SimpleNamespace(path=path, force=request.param, before=tree(path.parent))


def fused():
    return NVFP4Tensor.fuse([QUANTISED, QUANTISED])


def with_scale(value):
    scale = torch.tensor(value)
    return NVFP4Tensor(QUANTISED.codes, QUANTISED.block_scale, scale)


def with_block_scale_byte(byte):
    scale_bytes = QUANTISED.block_scale.view(torch.uint8).clone()
    scale_bytes[2, 1] = byte
    block_scale = scale_bytes.view(torch.float8_e4m3fn)
    return NVFP4Tensor(QUANTISED.codes, block_scale, QUANTISED.global_scale)


W4A4 = {"activations": "nvfp4"}
MODULES = [("mlp.gate_proj.weight", QUANTISED), ("mlp.up_proj.weight", QUANTISED)]
REFUSED = [
    ("dialect", {"dialect": "gguf"}, ValueError, "got 'gguf', need one of modelopt"),
    ("activations", {"activations": "fp8"}, ValueError, "got 'fp8', need one of nvfp4, none"),
    ("W4A4 without scales", W4A4, ValueError, "activations='nvfp4' without input_scales"),
    ("W4A16 with scales", {"input_scales": {"a": ONE}}, ValueError, "'none' with input_scales"),
    ("missing scale", {**W4A4, "input_scales": {}}, ValueError, "input_scales has no a, need one"),
    (
        "scale of no module",
        {**W4A4, "input_scales": {"a": ONE, "b": ONE}},
        ValueError,
        "input_scales has b .*no quantised module",
    ),
    (
        "zero input scale",
        {**W4A4, "input_scales": {"a": 0 * ONE}},
        ValueError,
        "a.input_scale is 0.0, need a finite multiplier > 0",
    ),
    (
        "NaN input scale",
        {**W4A4, "input_scales": {"a": math.nan * ONE}},
        ValueError,
        "a.input_scale is nan, need a finite multiplier > 0",
    ),
    (
        "wide input scale",
        {**W4A4, "input_scales": {"a": torch.ones(2)}},
        ValueError,
        r"a.input_scale: got torch.float32 \[2\], need one float32 value",
    ),
    ("no tensors", {"tensors": []}, ValueError, "got no tensors, need at least one"),
    ("shard size", {"max_shard_bytes": 0}, ValueError, "max_shard_bytes is 0, need at least 1"),
    ("config", {"producer_details": {"x": {1}}}, TypeError, "cannot be written as JSON"),
    ("A9", {"exclude": ["a*"]}, ValueError, "a.weight is quantised, but the exclusion list"),
    (
        "A8",
        {"tensors": [MODULES[0], ("mlp.up_proj.weight", WEIGHT)], "exclude": ["*.up_proj"]},
        ValueError,
        "^the exclusion list covers mlp.up_proj but not mlp.gate_proj",
    ),
    (
        "plain matrix",
        {"tensors": [("lm_head.weight", WEIGHT)]},
        ValueError,
        r"lm_head.weight is torch.float32 \[48, 32\] and not in the exclusion list",
    ),
    ("twice", {"tensors": [("x", ONE), ("x", ONE)]}, ValueError, "x was given twice"),
    (
        "twice by suffix",
        {"tensors": [("a.weight", QUANTISED), ("a.weight_scale", ONE)]},
        ValueError,
        "a.weight_scale was given twice",
    ),
    ("name", {"tensors": [("a.codes", QUANTISED)]}, ValueError, "must be named <module>.weight"),
    ("type", {"tensors": [("a", [1.0])]}, TypeError, "a: got list, need a Tensor or NVFP4Tensor"),
    ("KV", {"tensors": [("attn.k_scale", ONE)]}, ValueError, "attn.k_scale: scales of a quantised"),
    ("fused", {"tensors": [("a.weight", fused())]}, ValueError, r"shape \[96\], need \[\]; write"),
    ("zero", {"tensors": [("a.weight", with_scale(0.0))]}, ValueError, "global_scale is 0.0"),
    (
        "NaN block scale",
        {"tensors": [("a.weight", with_block_scale_byte(0x7F))]},
        ValueError,
        r"a.weight: 1 of 96 NaN block scales.*\[2, 1\]",
    ),
    (
        "no divisor",
        {"tensors": [("a.weight", with_scale(1e-40))], "dialect": "compressed-tensors"},
        ValueError,
        "a.weight_global_scale: the multiplier .* has no finite float32 divisor",
    ),
    (
        "unknown layout",
        {"tensors": [("experts", torch.zeros(2, 2, dtype=torch.uint8))]},
        ValueError,
        "out: what was written does not read back: .*experts is U8",
    ),
]


@pytest.mark.parametrize(
    ("options", "error", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refused_and_nothing_left(target, options, error, message):
    with pytest.raises(error, match=message):
        save(target.path, force=target.force, **options)
    assert tree(target.path.parent) == target.before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit])
def test_an_error_between_tensors_leaves_nothing(target, error):
    def stream():
        yield "a.weight", QUANTISED
        yield "b.weight", QUANTISED
        assert len(list(target.path.parent.glob(".out.partial-*/shard-*"))) == 1
        raise error("stop")

    with pytest.raises(error, match="stop"):
        save(target.path, stream(), force=target.force, max_shard_bytes=1)
    assert tree(target.path.parent) == target.before


def test_what_is_damaged_while_writing_does_not_appear(target):
    def stream():
        yield "a.weight", QUANTISED
        yield "b.weight", QUANTISED
        (shard,) = target.path.parent.glob(".out.partial-*/shard-*")
        os.truncate(shard, shard.stat().st_size - 1)

    message = r"out: what was written does not read back: .*out/model-00001.*truncated or damaged"
    with pytest.raises(ValueError, match=message):
        save(target.path, stream(), force=target.force, max_shard_bytes=1)
    assert tree(target.path.parent) == target.before


def test_success_replaces_the_old_output_and_leaves_nothing_else(target):
    save(target.path, force=target.force)
    assert load_checkpoint(target.path).names() == ("a.weight",)
    assert os.listdir(target.path.parent) == ["out"]


def test_a_failing_rename_brings_the_old_output_back(tmp_path, monkeypatch):
    path = tmp_path / "place" / "out"
    path.parent.mkdir()
    save(path, [("old.weight", QUANTISED)])
    before = tree(path.parent)
    rename = Path.rename

    def failing(self, other):
        if self.name.startswith(".out.partial-") and other == path:
            raise OSError(errno.EIO, "broken disk")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken disk"):
        save(path, force=True)
    assert tree(path.parent) == before


def test_the_disk_is_checked_before_anything_is_written_or_read(target, monkeypatch):
    usage = SimpleNamespace(total=10**9, used=10**9 - 999, free=999)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    def stream():
        pytest.fail("no tensor must be taken")
        yield

    place = target.path.parent
    with pytest.raises(OSError, match=rf"{target.path}: needs 1,000 bytes.*999 bytes free") as info:
        save(target.path, stream(), force=target.force, expected_bytes=1000)
    assert info.value.errno == errno.ENOSPC
    assert tree(place) == target.before
    save(target.path, force=target.force, expected_bytes=999)


def test_copied_files_count_in_the_disk_check(tmp_path, monkeypatch):
    source = tmp_path / "model"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(b"x" * 500)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1499))
    with pytest.raises(OSError, match="needs 1,500 bytes"):
        save(tmp_path / "out", copy_from=source, expected_bytes=1000)


FULL_DISK = """
import json, resource, sys
import torch
from nvfp4r.quantize import quantize
from nvfp4r.checkpoint.writer import save_checkpoint

source, *paths = sys.argv[1:]
small = [("a.weight", quantize(torch.ones(64, 64)))]
large = [*small, ("b.embed.weight", torch.ones(1 << 16))]
cases = {
    "shard 2": (large, {}, None),
    "config.json": (small, {"x": "y" * 100_000}, None),
    "tokenizer.json": (small, {}, source),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
for path in paths:
    for what, (tensors, config, copy_from) in cases.items():
        try:
            save_checkpoint(
                path, tensors, config=config, copy_from=copy_from, force=True, max_shard_bytes=4096
            )
        except OSError as error:
            print(json.dumps([path, what, error.errno, error.strerror]))
"""


def test_a_full_disk_names_the_output_and_the_bytes_needed(tmp_path):
    """A real file size limit: the system refuses to write on, as it does on a full disk."""
    source, place = tmp_path / "model", tmp_path / "place"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(b"x" * 100_000)
    place.mkdir()
    save(place / "old")
    before = tree(place)
    paths = [str(place / "old"), str(place / "new")]
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(source), *paths],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    needed = {"shard 2": 1 << 18, "config.json": 100_000, "tokenizer.json": 100_000}
    failures = [json.loads(line) for line in result.stdout.splitlines()]
    assert [failure[:2] for failure in failures] == [[p, what] for p in paths for what in needed]
    for path, what, number, text in failures:
        assert number == errno.EFBIG
        assert text.startswith(f"{path}: cannot write {what}, which needs ")
        claimed = int(text.split("needs ")[1].split(" bytes")[0].replace(",", ""))
        assert needed[what] <= claimed < needed[what] * 1.02
        assert "make room or choose another output" in text
    assert tree(place) == before


def test_an_existing_output_is_refused(tmp_path):
    save(tmp_path / "out")
    before = tree(tmp_path)
    with pytest.raises(ValueError, match=r"out: exists already; .*--force"):
        save(tmp_path / "out")
    assert tree(tmp_path) == before


def test_force_replaces_checkpoints_only(tmp_path):
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("irreplaceable")
    with pytest.raises(ValueError, match=r"thesis: has no config\.json, so it is no checkpoint"):
        save(other, force=True)
    assert (other / "chapter1.tex").read_text() == "irreplaceable"
    (other / "chapter1.tex").unlink()
    save(other, force=True)  # an empty folder may be filled
    assert load_checkpoint(other).names() == ("a.weight",)


def test_outputs_that_are_no_folders(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=f"{name}: exists and is not a folder"):
            save(tmp_path / name, force=True)


def test_a_missing_parent_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"the folder .*/missing does not exist; create it first"):
        save(tmp_path / "missing" / "out")


@pytest.mark.parametrize("output", ["model", "model/out", ".", "link/out"])
def test_output_and_input_must_not_overlap(tmp_path, output):
    source = tmp_path / "top" / "model"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (tmp_path / "top" / "config.json").write_text("{}")
    (tmp_path / "top" / "link").symlink_to(source)
    before = tree(tmp_path)
    with pytest.raises(ValueError, match="overlaps the input"):
        save(tmp_path / "top" / output, copy_from=source, force=True)
    assert tree(tmp_path) == before


def test_a_missing_input_folder(tmp_path):
    with pytest.raises(ValueError, match="nothing: no such folder to copy"):
        save(tmp_path / "out", copy_from=tmp_path / "nothing")
