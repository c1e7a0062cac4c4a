"""What the Triton kernels must do, for any device; the truth is the torch path on the same device.

`KernelCases` runs on a GPU in test_gpu_tracker.py and on a CPU, under Triton's interpreter, in
interpreted_kernels.py. Entropies may differ by rounding, so a kernel's decisions are compared with
those that torch makes from the kernel's own entropies, bit for bit, and its entropies with float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reset import Decision, ReSETConfig, StepDetector, TemperaturePolicy, scale_logits
from reset.config import ESTIMATORS, POLICIES
from reset.sampler import apply_temperature
from reset.tracker import RequestTracker
from tests.reset.engine_calls import random_calls
from tests.reset.tracker_spec import PIECES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIXED = {
    0: ReSETConfig(t_low=0.1, tau_0=1.5, window=8),
    1: ReSETConfig(t_low=0.2, tau_0=1.0, window=1, policy="relative"),
    3: ReSETConfig(t_low=0.0, tau_0=2.0, window=2, estimator="ema"),
}


def detector() -> StepDetector:
    return StepDetector.from_pieces(PIECES)


def random_logits(rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[rows, width]: some rows sharp, some flat, some entries masked."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=generator) ** 2 * 12
    logits = torch.randn(rows, width, generator=generator) * spread
    logits[:, 5::7] = -torch.inf
    return logits.to(dtype)


def exact_entropy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(H [R] float64, how far float32 may be from it [R]).

    With u = 2^-24, x = z - max <= 0, a = E|x| and b = E[x^2] under the softmax: a weight e^x has a
    relative error of (2|x| + 4) u (rounding of x, of its product with log2 e, and 2 ulp of exp2),
    and a sum of one tile 24 u (16 terms in a thread, then a tree over 256). So the sum S of the
    weights is off by (2a + 28) u relatively, and the weighted sum W by (2b + 30a) u S. Since
    H = log S - W / S, |dH| <= dS/S + dW/S + a dS/S, and H itself is rounded to float32.
    """
    z = logits.double()
    log_p = torch.log_softmax(z, dim=1)
    p = log_p.exp()
    x = torch.where(p > 0, z - z.amax(dim=1, keepdim=True), 0.0)
    a, b = (p * -x).sum(1), (p * x * x).sum(1)
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(1)
    off = (2 * a + 28) * (1 + a) + 2 * b + 30 * a + entropy
    return entropy, off * 2.0**-24


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal in every bit that counts: NaN equals NaN."""
    return torch.equal(torch.isnan(got), torch.isnan(wanted)) and torch.equal(
        torch.nan_to_num(got, nan=0.0, posinf=math.inf, neginf=-math.inf),
        torch.nan_to_num(wanted, nan=0.0, posinf=math.inf, neginf=-math.inf),
    )


def same_decision(got: Decision, wanted: Decision) -> bool:
    return all(same(one, other) for one, other in zip(got, wanted, strict=True))


class Operations(TorchDispatchMode):
    """Names of torch's operations, in order; what Triton launches is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


class KernelCases:
    device: str
    calls: int  # of an engine, one after the other

    def stored(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """float32 `values` as the kernels store them."""
        return values.to(dtype)

    def scaled(self, logits: torch.Tensor, temperature: torch.Tensor, **options) -> torch.Tensor:
        """What the rows must become: the torch path in float32, then rounded."""
        if logits.dtype == torch.float32:
            apply_temperature(expected := logits.clone(), temperature, **options)
            return expected
        wide = logits.float()  # shifted so that the largest is 0, as 16-bit logits are
        top = wide.amax(dim=1, keepdim=True)
        greedy = (temperature <= 1e-6).unsqueeze(1)
        expected = torch.where(greedy, wide, wide - torch.where(top == -torch.inf, 0.0, top))
        apply_temperature(expected, temperature, **options)
        expected = expected.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf)
        lowest = torch.finfo(logits.dtype).min
        expected = torch.where(wide == -torch.inf, wide, expected.clamp(min=lowest))
        masked = torch.where(greedy & (expected == lowest), -torch.inf, expected)
        stored = self.stored(masked, logits.dtype)
        rows = options.get("rows")
        return stored if rows is None else torch.where(rows.unsqueeze(1), stored, logits)

    def trackers(self, slots: int = 5, **options) -> tuple[RequestTracker, RequestTracker]:
        """(Triton, torch)."""
        one, other = (
            RequestTracker(detector(), slots, device=self.device, backend=backend, **options)
            for backend in ("triton", "torch")
        )
        return one, other

    def rows(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("max_rows", [1, 3])
    def test_calls_of_an_engine_agree_with_torch(self, dtype, max_rows):
        own = [1.0, 0.6, 0.25]
        fused, plain = self.trackers(max_window=8, max_rows=max_rows)
        for tracker in (fused, plain):
            tracker.admit(list(MIXED), list(MIXED.values()), own)
        index_type = torch.int32 if dtype == torch.float32 else torch.int64
        temperatures = set()
        for number, call in enumerate(random_calls(max_rows, self.calls, list(MIXED), max_rows)):
            logits = random_logits(len(call.slots), 5000, dtype, seed=number).to(self.device)
            layout = [
                self.rows(values, index_type)
                for values in (call.slots, call.tokens, call.positions)
            ]
            ours = logits.clone()
            decision = fused.scale(ours, *layout)
            entropy, temperature = decision.entropy.float(), decision.temperature
            assert same_decision(decision, plain.decide(entropy, *layout))
            assert torch.equal(fused.summary(), plain.summary())
            advanced = ~temperature.isnan()
            exact, off = exact_entropy(logits)
            assert ((decision.entropy - exact).abs() <= off)[advanced].all()
            own_temperature = torch.tensor(
                [dict(zip(MIXED, own, strict=True)).get(slot, 1.0) for slot in call.slots],
                device=self.device,
            )
            expected = self.scaled(
                logits, temperature, own_temperature=own_temperature, rows=advanced
            )
            assert same(ours, expected)
            temperatures |= set(temperature[advanced].tolist())
        assert len(temperatures) >= 3

    @pytest.mark.parametrize("estimator", ESTIMATORS)
    def test_every_policy_decides_as_torch_does(self, estimator):
        configs = [
            ReSETConfig(t_low=0.2, tau_0=1.0, window=3, policy=policy, estimator=estimator)
            for policy in POLICIES
        ]
        count = len(configs)
        fused, plain = self.trackers(count, max_window=3)
        for tracker in (fused, plain):
            tracker.admit(list(range(count)), configs, [1.0] * count)
        generator = torch.Generator().manual_seed(1)
        for position in range(self.calls):
            logits = random_logits(count, 40, torch.float32, seed=position).to(self.device)
            token = torch.randint(0, len(PIECES), (count,), generator=generator).to(self.device)
            layout = (self.rows(list(range(count))), token, self.rows([position] * count))
            decision = fused.scale(logits, *layout)
            assert same_decision(decision, plain.decide(decision.entropy.float(), *layout))

    def test_the_first_step_is_always_confident(self):
        """H_step and H_bar are the same mean then: equal in every bit, as in the torch path."""
        fused, _ = self.trackers()
        fused.admit([0], [ReSETConfig(t_low=0.1, tau_0=0.5, window=4)], [1.0])
        for position in range(16):
            logits = random_logits(1, 40, torch.float32, seed=position).to(self.device)
            layout = (self.rows([0]), self.rows([PIECES.index("a")]), self.rows([position]))
            decision = fused.scale(logits, *layout)
            assert torch.equal(decision.step_entropy, decision.mean_entropy)

    @pytest.mark.parametrize("width", [1, 7, 4096, 4097, 50_257])
    def test_widths_and_strides(self, width):
        """Rows may be a view of padded ones; what lies between them is not touched."""
        fused, plain = self.trackers()
        for tracker in (fused, plain):
            tracker.admit([0, 1], [MIXED[0], MIXED[3]], [1.0, 1.0])
        padded = torch.full((2, width + 3), 77.0, device=self.device)
        logits = random_logits(2, width, torch.float32, seed=width).to(self.device)
        ours = padded[:, 1 : width + 1]
        ours.copy_(logits)
        layout = (self.rows([0, 1]), self.rows([0, 0]), self.rows([0, 0]))
        decision = fused.scale(ours, *layout)
        exact, off = exact_entropy(logits)
        assert ((decision.entropy - exact).abs() <= off).all()
        assert same_decision(decision, plain.decide(decision.entropy.float(), *layout))
        assert same(ours, self.scaled(logits, decision.temperature))
        assert (padded[:, 0] == 77).all()
        assert (padded[:, width + 1 :] == 77).all()

    def test_the_largest_vocabularies(self):
        for width in (151_936, 262_144, 262_208):
            fused, _ = self.trackers()
            fused.admit([2], [MIXED[0]], [1.0])
            logits = random_logits(1, width, torch.float32, seed=2).to(self.device)
            ours = logits.clone()
            decision = fused.scale(ours, self.rows([2]), self.rows([0]), self.rows([0]))
            exact, off = exact_entropy(logits)
            assert ((decision.entropy - exact).abs() <= off).all()
            assert same(ours, self.scaled(logits, decision.temperature))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_e1_e2_e4_masks_and_bad_values(self, dtype):
        """One candidate, none, NaN, +inf, NaN in an otherwise masked tile, a very low logit."""
        logits = random_logits(8, 5000, dtype, seed=3).to(self.device)
        logits[0] = -torch.inf
        logits[0, 4500] = 3.0
        logits[1] = -torch.inf
        logits[2, 4999] = torch.nan
        logits[3, 17] = torch.inf
        logits[4] = -torch.inf
        logits[4, 2] = torch.nan
        logits[5] = torch.nan
        logits[6, 0] = torch.finfo(dtype).min
        fused, plain = self.trackers(8)
        config = ReSETConfig(t_low=1e-5, tau_0=0.5)  # E3: overflows float16 without the shift
        for tracker in (fused, plain):
            tracker.admit(list(range(8)), [config] * 8, [1.0] * 8)
        layout = [self.rows(v) for v in (list(range(8)), [0] * 8, [0] * 8)]
        ours = logits.clone()
        decision = fused.scale(ours, *layout)
        assert decision.entropy[:2].tolist() == [0.0, 0.0]
        assert decision.temperature.isnan().tolist() == [False] * 2 + [True] * 4 + [False] * 2
        assert same_decision(decision, plain.decide(decision.entropy.float(), *layout))
        assert same(ours, self.scaled(logits, decision.temperature))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_e3_argmax_is_the_first_of_equals_in_whichever_tile(self, dtype):
        places = [(0, 1), (4095, 4096), (4096, 9999), (8191, 8192), (5, 4997)]
        logits = random_logits(len(places) + 2, 10_000, dtype, seed=4).to(self.device)
        for row, place in enumerate(places):
            logits[row, list(place)] = 60.0
        logits[-2] = -torch.inf
        logits[-1] = 0.0  # all equal
        count = len(logits)
        fused, _ = self.trackers(count)
        config = ReSETConfig(t_low=0.0, t_high=0.0, tau_0=0.5)
        fused.admit(list(range(count)), [config] * count, [0.7] * count)
        fused.scale(logits, *[self.rows(v) for v in (list(range(count)), [0] * count, [0] * count)])
        kept = (logits != -torch.inf).nonzero().tolist()
        assert kept == [[row, place[0]] for row, place in enumerate(places)] + [[count - 1, 0]]
        assert (logits[: len(places)].amax(1) == 60.0).all()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_of_nobody_are_left_alone_bit_for_bit(self, dtype):
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        fused, plain = self.trackers(max_rows=2)
        for tracker in (fused, plain):
            tracker.admit([0, 1], [MIXED[3], MIXED[0]], [1.0, 1.0])
            tracker.release([1])
        logits = random_logits(8, 5000, dtype, seed=5).to(self.device)
        logits[:, 0] = torch.nan
        logits.view(integers)[:, 0] += 1  # other bits of NaN
        before = logits.clone()
        slots, positions = [-1, 0, 1, 1, 0, 0, 0, 99], [0, -1, 0, 1, 0, 1, 2, 0]
        layout = [self.rows(v) for v in (slots, [10**6] * 8, positions)]
        decision = fused.scale(logits, *layout)
        assert torch.equal(logits.view(integers)[:4], before.view(integers)[:4])
        assert decision.temperature.isnan().all()
        assert (logits[4:].isnan() | (before[4:] == -torch.inf)).all()  # too many, or no such slot
        assert same_decision(decision, plain.decide(decision.entropy.float(), *layout))
        assert same(fused.summary(), plain.summary())

    def test_a_row_does_not_depend_on_its_neighbours(self):
        logits = random_logits(4, 9000, torch.float32, seed=6).to(self.device)
        together, _ = self.trackers()
        alone, _ = self.trackers()
        for tracker in (together, alone):
            tracker.admit([0, 1, 2, 3], [MIXED[0]] * 4, [1.0] * 4)
        layout = [self.rows(v) for v in ([3, 0, 2, 1], [0] * 4, [0] * 4)]
        ours = logits.clone()
        decision = together.scale(ours, *layout)
        for row in range(4):
            single = logits[row : row + 1].clone()
            one = alone.scale(single, *[values[row : row + 1] for values in layout])
            assert torch.equal(single, ours[row : row + 1])
            assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(one, decision, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("named", [False, True])
    def test_scale_logits_agrees_with_torch(self, dtype, named):
        config = ReSETConfig(t_low=0.2, tau_0=1.5, window=3)
        fused, plain = (TemperaturePolicy(config, slots=6, device=self.device) for _ in range(2))
        generator = torch.Generator().manual_seed(7)
        for number in range(12):
            rows = int(torch.randint(1, 4, (), generator=generator))
            slots = torch.randperm(6, generator=generator)[:rows].to(self.device)
            new_step = (torch.rand(rows, generator=generator) < 0.3).to(self.device)
            logits = random_logits(rows, 5000, dtype, seed=number).to(self.device)
            ours = logits.clone()
            where = slots if named else None
            decision = scale_logits(ours, fused, new_step, where, backend="triton")
            exact, off = exact_entropy(logits)
            assert ((decision.entropy - exact).abs() <= off).all()
            assert same_decision(decision, plain.decide(decision.entropy.float(), new_step, where))
            assert torch.equal(fused.state, plain.state)
            assert same(ours, self.scaled(logits, decision.temperature))

    @pytest.mark.parametrize("rows", [1, 8])
    def test_a_step_is_two_launches_and_memory_for_the_decision(self, rows, monkeypatch):
        """Whatever torch did besides would lie on the device's critical path, or the host's."""
        tracker = RequestTracker(detector(), rows, device=self.device, backend="triton")
        tracker.admit(list(range(rows)), [MIXED[0]] * rows, [1.0] * rows)
        logits = random_logits(rows, 5000, torch.float32, seed=1).to(self.device)
        slots, token = self.rows(list(range(rows))), self.rows([0] * rows, torch.int32)
        positions = [self.rows([step] * rows) for step in range(3)]
        tracker.scale(logits, slots, token, positions[0])  # compiles, and reserves scratch
        launched = []
        monkeypatch.setattr(
            tracker._kernels, "_launch", lambda *arguments: launched.append(arguments[2])
        )
        with Operations() as operations:
            for position in positions[1:]:
                tracker.scale(logits, slots, token, position)
        assert launched == [(2, rows, 1)] * 2, "a pair of launches a step, of two tiles a row"
        assert operations.names == ["empty", "empty", "unbind"] * 2

    def test_wrong_arguments_are_refused(self):
        fused, _ = self.trackers()
        one = self.rows([0])
        transposed = torch.zeros(4, 2, device=self.device).T
        with pytest.raises(ValueError, match="each row must be contiguous"):
            fused.scale(transposed, self.rows([0, 1]), self.rows([0, 0]), self.rows([0, 0]))
        policy = TemperaturePolicy(MIXED[0], slots=1, device=self.device)
        logits = torch.zeros(1, 4, device=self.device)
        with pytest.raises(ValueError, match=r"new_step .* one per row of logits"):
            scale_logits(logits, policy, one, backend="triton")
        assert not policy.state.any()
