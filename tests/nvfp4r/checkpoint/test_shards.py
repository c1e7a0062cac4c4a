"""Damaged files: truncated, missing, or at odds with the index."""

from __future__ import annotations

import json
import re

import pytest
import torch

from nvfp4r.checkpoint import load_checkpoint
from tests.nvfp4r.toy import expect_refusal, write_tensors, write_toy


def shard(folder, number):
    return folder / f"model-{number:05d}-of-00003.safetensors"


def index_of(folder):
    return folder / "model.safetensors.index.json"


def edit_index(folder, change):
    index = json.loads(index_of(folder).read_text())
    change(index["weight_map"])
    index_of(folder).write_text(json.dumps(index))


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_file(tmp_path, keep):
    toy = write_toy(tmp_path / "toy")
    file = toy.folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    lines = expect_refusal(
        toy.folder, r"model\.safetensors: cannot be read as a whole .*fetch or write it again"
    )
    assert len(lines) == 1


def test_a_truncated_shard_is_reported_once_and_the_rest_is_read(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    file = shard(toy.folder, 2)
    file.write_bytes(file.read_bytes()[:-1])
    lines = expect_refusal(toy.folder, re.escape(file.name), "truncated or damaged")
    assert len(lines) == 1
    names = load_checkpoint(toy.folder, check=False).names()
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" in names
    assert len(names) < len(toy.plain) + len(toy.weights)


def test_garbage_instead_of_a_file(tmp_path):
    toy = write_toy(tmp_path / "toy")
    (toy.folder / "model.safetensors").write_bytes(b"\xff" * 4096)
    expect_refusal(toy.folder, r"model\.safetensors: cannot be read as a whole")


def test_the_index_names_a_missing_shard(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    shard(toy.folder, 3).unlink()
    lines = expect_refusal(toy.folder, r"model-00003-of-00003\.safetensors: no such file", "fetch")
    assert len(lines) == 1


def test_a_tensor_is_not_in_its_shard(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    edit_index(toy.folder, lambda m: m.update({"lm_head.weight": shard(toy.folder, 1).name}))
    expect_refusal(
        toy.folder,
        r"index\.json: places lm_head\.weight in model-00001.* does not hold it; "
        r"it is in model-00003-of-00003\.safetensors",
    )


def test_a_tensor_is_in_no_shard(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    edit_index(toy.folder, lambda m: m.update({"model.extra": shard(toy.folder, 1).name}))
    expect_refusal(toy.folder, r"places model\.extra in model-00001.* does not hold it;")


def test_a_tensor_is_not_in_the_index(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    edit_index(toy.folder, lambda m: m.pop("lm_head.weight"))
    expect_refusal(toy.folder, r"index\.json: does not mention lm_head\.weight")


def test_a_tensor_is_in_two_shards(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    tensors = {name: toy.plain[name] for name in names}
    part = tmp_path / "part"
    part.mkdir()
    write_tensors(part, tensors)
    (part / "model.safetensors").rename(shard(toy.folder, 3))
    expect_refusal(
        toy.folder, r"model\.embed_tokens\.weight is stored in .*model-00001.* and .*model-00003"
    )


@pytest.mark.parametrize("file", ["../evil.safetensors", "/etc/x.safetensors", "x.bin", "", 3])
def test_the_index_must_stay_in_its_folder(tmp_path, file):
    toy = write_toy(tmp_path / "toy", shards=3)
    edit_index(toy.folder, lambda m: m.update({"lm_head.weight": file}))
    with pytest.raises(ValueError, match=r"places lm_head\.weight in .*file in this folder"):
        load_checkpoint(toy.folder)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_an_unusable_index(tmp_path, content):
    toy = write_toy(tmp_path / "toy", shards=3)
    index_of(toy.folder).write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: weight_map is"):
        load_checkpoint(toy.folder)


def test_an_index_and_a_whole_file(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    write_tensors(toy.folder, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match=r"holds both model\.safetensors and .*index\.json"):
        load_checkpoint(toy.folder)


def test_shards_without_an_index(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    index_of(toy.folder).unlink()
    with pytest.raises(ValueError, match="found 3 safetensors files without"):
        load_checkpoint(toy.folder)


def test_no_weights(tmp_path):
    toy = write_toy(tmp_path / "toy")
    (toy.folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"need model\.safetensors.* found none"):
        load_checkpoint(toy.folder)


def test_no_folder_and_no_config(tmp_path):
    with pytest.raises(ValueError, match="nothing: no such folder"):
        load_checkpoint(tmp_path / "nothing")
    toy = write_toy(tmp_path / "toy")
    (toy.folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        load_checkpoint(toy.folder)


def test_a_file_that_disappears_while_it_is_read(tmp_path):
    toy = write_toy(tmp_path / "toy", shards=3)
    checkpoint = load_checkpoint(toy.folder)
    shard(toy.folder, 3).unlink()
    with pytest.raises(ValueError, match=r"model-00003-of-00003\.safetensors: no such file"):
        checkpoint["lm_head.weight"]
