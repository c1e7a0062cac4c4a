"""Hidden states between layers: bit for bit, in memory up to a limit, and a disk too small."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from nvfp4r.hf import hidden_states
from nvfp4r.hf.hidden_states import HiddenStates, require_room

CPU = torch.device("cpu")
STATE_BYTES = 4 * 6 * 8


def state(seed: int, tokens: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, 8, generator=generator).to(dtype)


def limit(monkeypatch, states: int) -> None:
    monkeypatch.setattr(hidden_states, "IN_MEMORY_BYTES", states * STATE_BYTES)


def same(ours: torch.Tensor | None, truth: torch.Tensor) -> bool:
    assert ours is not None
    assert (ours.dtype, ours.shape) == (truth.dtype, truth.shape)
    assert ours.is_contiguous()  # in memory as from disk
    return torch.equal(ours.view(torch.uint8), truth.contiguous().view(torch.uint8))


@pytest.mark.parametrize("in_memory", [0, 1, 2, 9])
def test_states_come_back_bit_for_bit_over_layers(tmp_path, monkeypatch, in_memory):
    """Over three layers, of texts of several lengths, in another order than they were put."""
    limit(monkeypatch, in_memory)
    lengths = [6, 1, 9, 6, 3]
    with HiddenStates(tmp_path, CPU) as hidden:
        assert [hidden.get(i) for i in range(5)] == [None] * 5
        for layer in range(3):
            made = [state(10 * layer + i, tokens) for i, tokens in enumerate(lengths)]
            for i in (4, 1, 0, 3, 2):
                hidden.put(i, made[i])
            assert all(same(hidden.get(i), made[i]) for i in range(5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("in_memory", [0, 9])
def test_every_dtype_shape_and_value_comes_back(tmp_path, monkeypatch, dtype, in_memory):
    limit(monkeypatch, in_memory)
    special = state(0, dtype=dtype)
    special[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-7])
    turned = state(1, dtype=dtype).transpose(1, 2)  # not contiguous
    with HiddenStates(tmp_path, CPU) as hidden:
        hidden.put(0, special)
        hidden.put(1, turned)
        hidden.put(0, special[:, :2])  # smaller
        hidden.put(2, torch.zeros(4, 1, 3, 8))
        assert same(hidden.get(0), special[:, :2])
        assert same(hidden.get(1), turned)
        hidden.put(0, torch.cat([special] * 3))  # larger: must not run into the next
        assert same(hidden.get(0), torch.cat([special] * 3))
        assert same(hidden.get(1), turned)
        assert same(hidden.get(2), torch.zeros(4, 1, 3, 8))


def disk_bytes(hidden: HiddenStates) -> int:
    return 0 if hidden._file is None else os.fstat(hidden._file.fileno()).st_size


def test_the_disk_takes_what_is_beyond_the_limit_and_no_more_in_later_layers(tmp_path, monkeypatch):
    limit(monkeypatch, 2)
    with HiddenStates(tmp_path, CPU) as hidden:
        for layer in range(3):
            for i in range(5):
                hidden.put(i, state(layer + i))
                assert disk_bytes(hidden) == STATE_BYTES * max(0, 4 - 1 if layer else i - 1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc of Linux")
def test_nothing_has_a_name_and_the_file_is_closed_on_any_end(tmp_path, monkeypatch):
    """Without a name there is nothing to be left, not even by a process that is killed."""
    limit(monkeypatch, 0)
    before = open_files()
    hidden = HiddenStates(tmp_path, CPU)

    def run() -> None:
        with hidden:
            hidden.put(0, state(0))
            assert disk_bytes(hidden) == STATE_BYTES
            assert list(tmp_path.iterdir()) == []
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert open_files() == before
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_named(tmp_path, monkeypatch):
    limit(monkeypatch, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with HiddenStates(tmp_path, CPU) as hidden:
        for i in range(3):
            hidden.put(i, state(i))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * STATE_BYTES + 50, limits[1]))
        try:
            with pytest.raises(
                OSError, match="cannot write the calibration texts' hidden"
            ) as error:
                hidden.put(3, state(3))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.errno == errno.EFBIG
    for part in (str(tmp_path), f"{3 * STATE_BYTES:,} bytes so far", "--calib-samples"):
        assert part in str(error.value)
    assert list(tmp_path.iterdir()) == []


Usage = namedtuple("Usage", "total used free")


def test_room_is_looked_for_before(tmp_path, monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9 * gib, 7 * gib, 2 * gib))
    require_room(tmp_path, 3 * gib)
    require_room(tmp_path, 2 * gib, others_bytes=gib)
    with pytest.raises(OSError, match="need 2,147,483,649 bytes, but") as error:
        require_room(tmp_path, 3 * gib + 1)
    assert error.value.errno == errno.ENOSPC
    assert f"{tmp_path} has 2,147,483,648 bytes free" in str(error.value)
    with pytest.raises(OSError, match="need 2,147,483,648 bytes and finished layers 1, but"):
        require_room(tmp_path, 3 * gib, others_bytes=1)
    # What stays in memory needs no disk; others look for what else they write.
    require_room(tmp_path, gib, others_bytes=9 * gib)
