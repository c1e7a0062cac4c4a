"""How many threads torch uses inside one operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """Lets every torch operation of this process run in the thread that calls it.

    For long runs of small operations: threads that share one wait for each other after it, and on a
    busy machine, or in a container with fewer cores than it sees, that takes many times longer than
    the work. The number of threads is restored afterwards.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
