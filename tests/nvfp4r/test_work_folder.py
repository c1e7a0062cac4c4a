"""Finished parts of a job: whole or absent, and only for the same settings."""

from __future__ import annotations

import errno

import pytest
import torch

from nvfp4r.work_folder import WorkFolder

SETTINGS = {"--method": "gptq", "--damping": 0.01, "files": [["a.safetensors", 5, 7]]}
TENSORS = {"a": torch.arange(6).view(2, 3), "b": torch.tensor(0.5)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.work"


def test_parts_come_back_in_another_process_of_the_same_settings(path):
    work = WorkFolder(path, SETTINGS)
    assert not path.exists()  # nothing is made before there is something to keep
    assert not work.has("00001")
    work.save("00001", TENSORS, {"seconds": 1.5})
    again = WorkFolder(path, dict(SETTINGS))
    assert again.has("00001")
    assert not again.has("00002")
    for name, tensor in TENSORS.items():
        assert torch.equal(again.tensor("00001", name), tensor)
    assert again.record("00001") == {"seconds": 1.5}
    again.remove()
    assert not path.exists()
    again.remove()  # nothing to do


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("--method", "mr-gptq", "another --method: gptq, now mr-gptq"),
        ("--damping", 0.02, "another --damping: 0.01, now 0.02"),
        ("files", [["a.safetensors", 5, 8]], "another files"),
        ("new", 1, "another new: None, now 1"),
    ],
)
def test_other_settings_are_refused_by_name(path, name, value, shown):
    WorkFolder(path, SETTINGS).save("00000", TENSORS, {})
    before = sorted(path.iterdir())
    with pytest.raises(ValueError, match="holds finished layers of a command with") as error:
        WorkFolder(path, {**SETTINGS, name: value})
    assert shown in str(error.value)
    assert sorted(path.iterdir()) == before


def test_what_is_no_work_folder_is_left_alone(path):
    path.write_text("mine")
    with pytest.raises(ValueError, match="it is no folder"):
        WorkFolder(path, SETTINGS)
    path.unlink()
    path.mkdir()
    (path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"no readable settings\.json; move it away"):
        WorkFolder(path, SETTINGS)
    (path / "settings.json").write_text("{")
    with pytest.raises(ValueError, match=r"no readable settings\.json; move it away"):
        WorkFolder(path, SETTINGS)


def test_a_part_whose_writing_was_ended_is_not_there(path, monkeypatch):
    work = WorkFolder(path, SETTINGS)
    work.save("00000", TENSORS, {})

    def ended(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", ended)
    with pytest.raises(KeyboardInterrupt):
        work.save("00001", TENSORS, {})
    monkeypatch.undo()
    again = WorkFolder(path, SETTINGS)
    assert again.has("00000")
    assert not again.has("00001")
    again.save("00001", TENSORS, {})
    assert again.record("00001") == {}


def test_a_full_disk_names_the_file(path, monkeypatch):
    work = WorkFolder(path, SETTINGS)
    work.save("00000", TENSORS, {})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"00001\.safetensors: cannot write .*No space") as error:
        work.save("00001", TENSORS, {})
    assert error.value.errno == errno.ENOSPC


def test_a_damaged_part_is_refused_by_name(path):
    work = WorkFolder(path, SETTINGS)
    work.save("00000", TENSORS, {})
    file = path / "00000.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    for read in (lambda: work.tensor("00000", "a"), lambda: work.record("00000")):
        with pytest.raises(ValueError, match=r"00000\.safetensors: cannot .*remove this file"):
            read()
