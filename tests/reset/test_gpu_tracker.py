"""On a CUDA GPU: the Triton kernels against torch, in CUDA graphs, without waiting.

make test-gpu
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from reset import ReSETConfig, TemperaturePolicy, scale_logits
from reset.sampler import apply_temperature
from reset.tracker import RequestTracker
from tests.reset.engine_calls import random_calls
from tests.reset.kernel_cases import MIXED, KernelCases, detector, exact_entropy, random_logits
from tests.reset.tracker_spec import PIECES

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
WIDTHS = [1, 7, 50_257, 151_936, 262_144]


class TestCuda(KernelCases):
    device = DEVICE
    calls = 100


@contextmanager
def no_waiting():
    """Any operation in the block that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def tracker(slots: int = 8, **options) -> RequestTracker:
    return RequestTracker(detector(), slots, device=DEVICE, **options)


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def layouts(count: int, seed: int, max_rows: int = 2):
    """[slots, token, position] of calls on the slots of MIXED, each padded to the same rows."""
    length = 40
    found = []
    for call in random_calls(seed, count, list(MIXED), max_rows):
        padding = length - len(call.slots)
        found.append(
            [
                rows(*call.slots, *[-1] * padding),
                rows(*call.tokens, *[0] * padding),
                rows(*call.positions, *[0] * padding),
            ]
        )
    return found


def admit_mixed(made: RequestTracker) -> RequestTracker:
    made.admit(list(MIXED), list(MIXED.values()), [1.0, 0.6, 0.25])
    return made


def test_auto_means_triton_here():
    assert tracker().backend == "triton"
    assert tracker(backend="torch").backend == "torch"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 33, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_counts_and_widths(width, count, dtype):
    made, plain = (tracker(count, backend=backend) for backend in ("triton", "torch"))
    for one in (made, plain):
        one.admit(list(range(count)), [MIXED[0]] * count, [1.0] * count)
    logits = random_logits(count, width, dtype, seed=width).to(DEVICE)
    zeros = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    layout = (torch.arange(count, device=DEVICE), zeros, zeros)
    ours, expected = logits.clone(), logits.clone()
    decision = made.scale(ours, *layout)
    for first in range(0, count, 16):  # float64 of everything would take gigabytes
        part = slice(first, first + 16)
        exact, off = exact_entropy(logits[part])
        assert ((decision.entropy[part] - exact).abs() <= off).all()
    wanted = plain.decide(decision.entropy.float(), *layout)
    assert all(torch.equal(a, b) for a, b in zip(decision, wanted, strict=True))
    apply_temperature(expected, decision.temperature)
    assert torch.equal(ours, expected)


def test_1024_rows_advance_together():
    made, plain = (tracker(1024, backend=backend) for backend in ("triton", "torch"))
    for one in (made, plain):
        one.admit(list(range(1024)), [MIXED[0]] * 1024, [0.5] * 1024)
    slots = torch.randperm(1024, device=DEVICE)
    for position in range(20):
        logits = random_logits(1024, 3000, torch.float32, seed=position).to(DEVICE)
        token = torch.randint(0, len(PIECES), (1024,), device=DEVICE)
        layout = (slots, token, torch.full_like(slots, position))
        decision = made.scale(logits, *layout)
        wanted = plain.decide(decision.entropy.float(), *layout)
        assert all(torch.equal(a, b) for a, b in zip(decision, wanted, strict=True))
    assert torch.equal(made.summary(), plain.summary())


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_a_captured_call_replays_as_it_runs(backend):
    """200 replays: histories evolve, tickets are back at 0 each time."""
    made, eager = (admit_mixed(tracker(max_rows=2, backend=backend)) for _ in range(2))
    calls = layouts(200, seed=1)
    static = [values.clone() for values in calls[0]]
    logits = random_logits(40, 9000, torch.float32, seed=0).to(DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.scale(logits.clone(), *static)
    torch.cuda.current_stream().wait_stream(side)
    captured = logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decision = made.scale(captured, *static)
    admit_mixed(made)

    for number, call in enumerate(calls):
        fresh = random_logits(40, 9000, torch.float32, seed=number).to(DEVICE)
        captured.copy_(fresh)
        for target, source in zip(static, call, strict=True):
            target.copy_(source)
        graph.replay()
        expected = eager.scale(fresh, *call)
        for got, wanted in zip(decision, expected, strict=True):
            assert torch.equal(got.nan_to_num(-1), wanted.nan_to_num(-1))
        assert torch.equal(captured, fresh)
    assert torch.equal(made.summary(), eager.summary())
    assert (made.summary()[list(MIXED), 0] > 50).all()


def test_a_captured_scale_logits_replays_as_it_runs():
    config = ReSETConfig(t_low=0.1, tau_0=1.5, window=8)
    captured_policy, eager = (TemperaturePolicy(config, 8, device=DEVICE) for _ in range(2))
    new_step = torch.zeros(8, dtype=torch.bool, device=DEVICE)
    logits = random_logits(8, 9000, torch.bfloat16, seed=0).to(DEVICE)
    scale_logits(logits.clone(), captured_policy, new_step)
    captured = logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decision = scale_logits(captured, captured_policy, new_step)
    captured_policy.reset()
    for number in range(200):
        fresh = random_logits(8, 9000, torch.bfloat16, seed=number).to(DEVICE)
        captured.copy_(fresh)
        new_step.copy_(torch.rand(8, device=DEVICE) < 0.1)
        graph.replay()
        expected = scale_logits(fresh, eager, new_step)
        assert all(torch.equal(a, b) for a, b in zip(decision, expected, strict=True))
        assert torch.equal(captured, fresh)
    assert torch.equal(captured_policy.state, eager.state)


@pytest.mark.parametrize("count", [1, 8, 200])
def test_twenty_runs_give_the_same_bits(count):
    logits = random_logits(count, 151_936, torch.float32, seed=3).to(DEVICE)
    zeros = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    results = set()
    for _ in range(20):
        made = tracker(count)
        made.admit(list(range(count)), [MIXED[0]] * count, [1.0] * count)
        ours = logits.clone()
        decision = made.scale(ours, torch.arange(count, device=DEVICE), zeros, zeros)
        bits = ours.view(torch.int32).long()
        weights = torch.arange(1, bits.shape[1] + 1, device=DEVICE)
        results.add(((bits * weights).sum().item(), *decision.entropy.tolist()))
    assert len(results) == 1


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_nothing_waits_for_the_device(backend):
    """Admissions, parking, releases and calls; and the mode that watches does notice a wait."""
    made = admit_mixed(tracker(max_rows=2, backend=backend))
    calls = layouts(30, seed=2)
    batches = [
        random_logits(40, 9000, torch.float32, seed=number).to(DEVICE)
        for number in range(len(calls))
    ]
    made.scale(batches[0].clone(), *calls[0])  # the first call compiles and loads kernels
    with no_waiting():
        for logits, call in zip(batches, calls, strict=True):
            made.scale(logits, *call)
            made.copy([0, 1], [5, 6])
            made.release([6])
            made.admit([1], [MIXED[0]], [0.7], outputs=[[0, 1, 2]])
            made.copy([5], [0])
            made.summary()
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        batches[0][0, 0].item()


def test_admissions_in_a_row_keep_their_own_numbers():
    """Staging memory is reused by the host allocator only when its copy is done."""
    made = tracker(64)
    busy = torch.randn(4096, 4096, device=DEVICE)
    for slot in range(64):
        busy = busy @ busy * 1e-3  # keeps the device behind the host
        config = ReSETConfig(policy="fixed", base_temp=0.01 * (slot + 1))
        made.admit([slot], [config], [1.0])
    zeros = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    logits = torch.zeros(64, 100, device=DEVICE)
    decision = made.scale(logits, torch.arange(64, device=DEVICE), zeros, zeros)
    wanted = [0.01 * (slot + 1) for slot in range(64)]
    assert decision.temperature.tolist() == pytest.approx(wanted)


def test_a_second_stream_gives_the_same():
    made, other = (admit_mixed(tracker(max_rows=2)) for _ in range(2))
    side = torch.cuda.Stream()
    for number, call in enumerate(layouts(20, seed=4)):
        logits = random_logits(40, 9000, torch.float32, seed=number).to(DEVICE)
        ours = logits.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made.scale(ours, *call)
        torch.cuda.current_stream().wait_stream(side)
        other.scale(logits, *call)
        assert torch.equal(ours, logits)
