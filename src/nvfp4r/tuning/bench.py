"""Measures packed linear layers on this machine's GPU, and tunes their plans.

Every result is compared with float64 before anything is timed. This module prints nothing;
matrix.py has the products and their times, tuner.py says which plan wins, plan/tuned.py keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from nvfp4r.doctor import diagnose
from nvfp4r.jit import UnsupportedGPUError, load_module
from nvfp4r.jit.cache import FOLDER_VARIABLE
from nvfp4r.launches import plan_for, required_facts, tuned_plans
from nvfp4r.plan import DeviceFacts, Plan, choose_plan, token_range
from nvfp4r.plan.medium import MAX_MEDIUM_M
from nvfp4r.plan.tuned import Problem, Tuned, TunedFile, tuned_file
from nvfp4r.tuning.candidates import candidate_plans
from nvfp4r.tuning.matrix import Matrix, Product
from nvfp4r.tuning.shapes import Shape
from nvfp4r.tuning.timing import read_bandwidth, rotated_bytes
from nvfp4r.tuning.tuner import Plans, Verdict, tune

_PLAUSIBLE = 1.05  # times the bandwidth of a large sum, which is not the very best a GPU can do
_SWEEP_REPEATS = 5


class MeasurementError(RuntimeError):
    """A kernel gave a wrong result, or a time that cannot be true: no figure of it counts."""


@dataclass(frozen=True)
class Machine:
    """The GPU that is measured.

    Attributes:
        index: of torch's current device.
        gpu: its name.
        driver: version of the NVIDIA driver, None if it is not told.
        facts: what plans know of it.
        read_tb_per_s: what summing a large array reaches.
        rotated_bytes: what the copies of a matrix take at least.
    """

    index: int
    gpu: str
    driver: str | None
    facts: DeviceFacts
    read_tb_per_s: float
    rotated_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "gpu": self.gpu,
            "driver": self.driver,
            "torch": torch.__version__,
            "read_tb_per_s": _rounded(self.read_tb_per_s),
            "rotated_bytes": self.rotated_bytes,
        }


@dataclass(frozen=True)
class Measurement:
    """One shape and M.

    Attributes:
        plan: what the op used.
        times: "median_us", "p10_us", "p90_us" of the op.
        dense_us: median of cuBLAS with 16-bit weights.
        tb_per_s: bytes of the packed weight over the op's median.
        of_read: share of the machine's read bandwidth.
    """

    shape: Shape
    M: int
    plan: Plan
    times: dict[str, float]
    dense_us: float
    tb_per_s: float
    of_read: float

    @property
    def over_dense(self) -> float:
        """How many times faster than cuBLAS with 16-bit weights."""
        return self.dense_us / self.times["median_us"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {
            **self.times,
            "dense_us": self.dense_us,
            "over_dense": self.over_dense,
            "tb_per_s": self.tb_per_s,
            "of_read": self.of_read,
        }
        rounded = {name: _rounded(value) for name, value in figures.items()}
        plan = asdict(self.plan)
        return {"bench": "linear", **asdict(self.shape), "M": self.M, **rounded, "plan": plan}


@dataclass(frozen=True)
class TuningJob:
    """A shape, and for which M of one range its plans are measured: one at least."""

    shape: Shape
    tokens: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last M of the range."""
        return token_range(self.tokens[0])


@dataclass(frozen=True)
class Tuning:
    """What came of a TuningJob."""

    job: TuningJob
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        verdict = self.verdict
        return {
            "bench": "tune",
            **asdict(self.job.shape),
            "range": list(self.job.bounds),
            "tokens": list(self.job.tokens),
            "default_us": _rounded(verdict.default_us),
            "best_us": _rounded(verdict.best_us),
            "gain": _rounded(verdict.gain),
            "is_kept": verdict.is_kept,
            "tried": verdict.tried,
            "best": asdict(verdict.best[0]) if verdict.best else None,
            "wrong": [asdict(plans[0]) for plans in verdict.wrong],
        }


def require_machine() -> Machine:
    """The current GPU, with its kernels loaded and its read bandwidth measured.

    Raises:
        ValueError: there is no CUDA GPU, or the kernels are not built for it.
        ImportError: the compiler of the kernels is missing.
    """
    if not torch.cuda.is_available():
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise ValueError(
            f"torch, built {build}, finds no CUDA GPU; a measurement needs an NVIDIA GPU of "
            "compute capability 8.0 or later with its driver, a CUDA build of torch, and the "
            "compiler: pip install 'reset-decoding[gpu]'. nvfp4r doctor says what is missing"
        )
    index = torch.cuda.current_device()
    gpu = torch.cuda.get_device_name(index)
    try:
        facts = required_facts(index)
    except UnsupportedGPUError as error:
        raise ValueError(f"{gpu}: {error}") from error
    load_module(index)
    driver = diagnose().driver
    return Machine(index, gpu, driver, facts, read_bandwidth(), rotated_bytes(index))


def measure(
    shapes: Sequence[Shape], tokens: Sequence[int], product: Product, machine: Machine
) -> Iterator[Measurement]:
    """Every shape and M by the public op, with the plan that it uses.

    Raises:
        ValueError: a shape is too small to be measured, or too large for the GPU.
        MeasurementError: a wrong result, or a time that cannot be true.
    """
    for shape in shapes:
        with _naming_full_memory(shape):
            found = _measure_shape(shape, tokens, product, machine)
        yield from found


def _measure_shape(
    shape: Shape, tokens: Sequence[int], product: Product, machine: Machine
) -> list[Measurement]:
    matrix = Matrix(shape, product, machine.rotated_bytes)
    arguments = (shape.N, shape.K, product.order, machine.facts, machine.index, product.quantised)
    plans = [plan_for(M, *arguments) for M in tokens]
    for M, plan in zip(tokens, plans, strict=True):
        _require_right(matrix.op_excess(M), shape, M, plan)
    found = []
    dense_us = matrix.dense_us(tokens)
    for M, plan, dense in zip(tokens, plans, dense_us, strict=True):
        times = matrix.op_us(M)
        tb_per_s = matrix.nbytes / times["median_us"] / 1e6
        of_read = tb_per_s / machine.read_tb_per_s
        if of_read > _PLAUSIBLE:
            raise MeasurementError(
                f"shape {shape}, M = {M}: {tb_per_s:.2f} TB/s is more than the memory gives "
                f"({machine.read_tb_per_s:.2f} TB/s); another program may have used the GPU while "
                "its bandwidth was measured, so run it again"
            )
        found.append(Measurement(shape, M, plan, times, dense, tb_per_s, of_read))
    return found


def tuning_jobs(shapes: Sequence[Shape], tokens: Sequence[int]) -> list[TuningJob]:
    """One for each shape and each range of M that some of the tokens lie in.

    Raises:
        ValueError: all tokens are above those that plans can be tuned for.
    """
    ranges: dict[tuple[int, int], list[int]] = {}
    for M in tokens:
        if M <= MAX_MEDIUM_M:
            ranges.setdefault(token_range(M), []).append(M)
    if not ranges:
        raise ValueError(
            f"--tokens: got {','.join(map(str, tokens))}; --tune needs some of 1 .. "
            f"{MAX_MEDIUM_M}, as plans for more tokens are the rule's alone"
        )
    return [TuningJob(shape, tuple(within)) for shape in shapes for within in ranges.values()]


def job_candidates(job: TuningJob, product: Product, facts: DeviceFacts) -> list[Plans]:
    """Every way to share the work of a job, as a plan for each of its tokens."""
    of_each = (
        candidate_plans(M, job.shape.N, job.shape.K, product.order, facts, product.quantised)
        for M in job.tokens
    )
    return list(zip(*of_each, strict=True))


def tune_all(
    jobs: Sequence[TuningJob],
    product: Product,
    machine: Machine,
    *,
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Tuning]:
    """Tunes job by job; what one finds is on the disk, and used by the ops, when the next starts.

    A plan from an earlier run that is not found again is removed.

    Args:
        jobs: as `tuning_jobs` makes them.
        product: what is computed.
        machine: where.
        advance: called after each of the `job_candidates`.

    Raises:
        ValueError: as `measure`; or there is no folder to keep plans in.
        OSError: the folder cannot be written, which shows before anything is measured.
        MeasurementError: the rule's own plan gives a wrong result.
    """
    file = require_tuned_file(machine)
    plans = file.read()
    file.write(plans, machine.driver)
    for job in jobs:
        with _naming_full_memory(job.shape):
            verdict = _tune_job(job, product, machine, advance)
        problem = Problem(job.bounds, job.shape.N, job.shape.K, product.order, product.quantised)
        plans.pop(problem, None)
        split = verdict.best[0].split if verdict.best else None
        if split is not None and verdict.is_kept:
            plans[problem] = Tuned(split, verdict.best_us, verdict.default_us)
        file.write(plans, machine.driver)
        tuned_plans.cache_clear()
        yield Tuning(job, verdict)


def require_tuned_file(machine: Machine) -> TunedFile:
    """Where tuned plans of this GPU are kept.

    Raises:
        ValueError: there is no folder for it.
    """
    file = tuned_file(machine.gpu, machine.facts)
    if file is None:
        raise ValueError(
            f"there is no home folder to keep tuned plans in; set {FOLDER_VARIABLE} to a folder"
        )
    return file


def _tune_job(
    job: TuningJob, product: Product, machine: Machine, advance: Callable[[], None]
) -> Verdict:
    shape, facts, tokens = job.shape, machine.facts, job.tokens
    matrix = Matrix(shape, product, machine.rotated_bytes)
    arguments = (shape.N, shape.K, product.order, facts, product.quantised)
    default = tuple(choose_plan(M, *arguments) for M in tokens)
    for M, plan in zip(tokens, default, strict=True):
        _require_right(matrix.plan_excess(plan, M), shape, M, plan)

    def pairs(plans: Plans) -> list[tuple[Plan, int]]:
        return list(zip(plans, tokens, strict=True))

    return tune(
        default,
        job_candidates(job, product, facts),
        can_run=lambda plans: all(matrix.can_run(plan) for plan in plans),
        is_right=lambda plans: all(matrix.plan_excess(*pair) <= 1 for pair in pairs(plans)),
        measure=lambda plans: sum(matrix.plan_us(*pair, _SWEEP_REPEATS) for pair in pairs(plans)),
        advance=advance,
    )


def _require_right(excess: float, shape: Shape, M: int, plan: Plan) -> None:
    if not excess <= 1:  # NaN is wrong, too
        raise MeasurementError(
            f"shape {shape}, M = {M}, {plan.kernel or plan.path}: the result is off by "
            f"{excess:.3g} times what float32 sums allow, so nothing was timed; check the GPU's "
            "memory with nvidia-smi -q -d ECC, and report it with the output of nvfp4r doctor"
        )


@contextmanager
def _naming_full_memory(shape: Shape) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"shape {shape}: the GPU's memory does not hold its copies ({error}); end other "
            "programs on the GPU, or measure a smaller shape with --shape"
        ) from error


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
