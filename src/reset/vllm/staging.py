"""Small tables of integers from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """[len(rows), width] int64 on `device`; all rows have one width.

    The copy is queued, not waited for. Its pinned source is a new one each time, which torch's
    allocator does not hand out again before the copy is done.
    """
    if device.type == "cpu":
        return torch.tensor(rows, dtype=torch.int64)
    return torch.tensor(rows, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
