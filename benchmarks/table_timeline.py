"""Tables of docs/performance.md for the parts of a decode step, from results/timeline.jsonl.

Sets them beside the layers' times alone (linear.jsonl) and those of a token without a profiler
(e2e.jsonl), and holds what is known of each part that is not a layer: whether a plug-in could do
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import table_e2e
import table_linear
from timeline import CACHE_WRITE, COMBINE, EMBEDDING, HEAD, LAYERS, NORM, QK, SILU

Line = dict[str, Any]
ENGINES = tuple(table_e2e.SERIES)
NVFP4_OVER_BF16 = 9 / 32  # bytes of a weight
LARGEST = "gate_up"  # the layer whose share of the bandwidth the head is thought to reach
CAN_GO = {
    HEAD: "yes, where the model comes with it in NVFP4 (`reset-quantize --quantize-lm-head`)",
    "attention": "no, it is vLLM's FlashAttention",
    COMBINE: "no; fewer parts, by a setting of vLLM's, saved 0.4 % of an 8B token or less",
    NORM: "in part: every CTA of the layer behind would do it again, and the compiled graph must "
    "be rewritten",
    SILU: "in part, at the end of gate_up; the compiled graph must be rewritten",
    QK: "no; a pass of vLLM's, off by default, makes one kernel of the two, in a quarter less time "
    "(`enable_qk_norm_rope_fusion`)",
    CACHE_WRITE: "no",
    EMBEDDING: "no",
    "sampling": "no",
    "requests and their tables": "no",
    "copies and fills": "no",
}
OVER_ALONE = "our layers, over their times back to back"
OVER_ALONE_CAN_GO = "yes, where the kernels around them take part in programmatic dependent launch"
IDLE_BEFORE = "idle before our layers"
IDLE_CAN_GO = "the same"
UNKNOWN_CAN_GO = "not looked at"


class Timeline:
    """The newest trace of every model and engine, part by part."""

    def __init__(self, lines: list[Line]) -> None:
        self._traces: dict[tuple[str, str], dict[str, Line]] = {}
        for line in lines:
            key = line["model"], line["impl"]
            if line["part"] == "step":  # the first line of a trace
                self._traces[key] = {}
            self._traces[key][line["part"]] = line
        self.models = sorted({model for model, _ in self._traces}, key=lambda x: (len(x), x))

    def has(self, model: str, impl: str) -> bool:
        return (model, impl) in self._traces

    def parts(self, model: str, impl: str = "nvfp4r") -> dict[str, Line]:
        """By name, without the whole step."""
        return {k: line for k, line in self._traces[model, impl].items() if k != "step"}

    def step(self, model: str, impl: str = "nvfp4r") -> Line:
        return self._traces[model, impl]["step"]

    def us(self, model: str, impl: str, part: str, field: str = "us") -> float:
        """0 where the engine has no such part."""
        return float(self._traces[model, impl].get(part, {}).get(field, 0.0))

    def layers_us(self, model: str, impl: str = "nvfp4r", field: str = "us") -> float:
        return sum(self.us(model, impl, layer, field) for layer in LAYERS)

    def others_us(self, model: str, impl: str) -> float:
        return float(self.step(model, impl)["busy_us"]) - self.layers_us(model, impl)


def timeline_table(lines: list[Line], linear: list[Line], e2e: list[Line]) -> str:
    """Parts of a step, the layers in it and alone, what is left, and what the goals would need.

    Raises:
        ValueError: a model has no trace of `stock` or `nvfp4r`.
    """
    times, alone, whole = Timeline(lines), table_linear.Figures(linear), table_e2e.Figures(e2e)
    for model in times.models:
        missing = [impl for impl in ("stock", "nvfp4r") if not times.has(model, impl)]
        if missing:
            raise ValueError(
                f"results/timeline.jsonl has no trace of {model} with {' and '.join(missing)}; "
                f"run: python benchmarks/e2e.py --shape {model} --profile FOLDER, then timeline.py"
            )
    sources = dict.fromkeys(
        f"{line['date']}, {line['gpu']}, driver {line['driver']}, torch {line['torch']}, "
        f"vLLM {line['vllm']}, commit {line['git']}: `{line['command']}`"
        for model in times.models
        for line in (times.step(model, impl) for impl in ENGINES if times.has(model, impl))
    )
    tables = (
        _parts(times),
        _layers(times, alone),
        _left(times, alone),
        _needed(times, alone, whole),
    )
    return "\n\n".join([*tables, "\n".join(sources)])


def _parts(times: Timeline) -> str:
    heads = [
        f"{model}: {' / '.join(table_e2e.SERIES[impl][0] for impl in ENGINES)}"
        for model in times.models
    ]
    rows = [f"| microseconds per token | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]

    def add(title: str, figure: Callable[[str, str], str]) -> None:
        cells = [
            " / ".join(figure(model, impl) if times.has(model, impl) else "-" for impl in ENGINES)
            for model in times.models
        ]
        rows.append(f"| {title} | {' | '.join(cells)} |")

    def part_us(part: str) -> Callable[[str, str], str]:
        return lambda model, impl: f"{times.us(model, impl, part):.0f}"

    for part in LAYERS:
        add(part, part_us(part))
    add("**these layers**", lambda model, impl: f"**{times.layers_us(model, impl):.0f}**")
    for part in _others(times):
        add(part, part_us(part))
    add("**all but the layers**", lambda model, impl: f"**{times.others_us(model, impl):.0f}**")
    add("nothing runs", lambda model, impl: f"{times.step(model, impl)['idle_us']:.0f}")
    add("waiting for the host", lambda model, impl: f"{times.step(model, impl)['waiting_us']:.0f}")
    add("**a step**", lambda model, impl: f"**{times.step(model, impl)['step_us']:.0f}**")
    add("without a profiler", lambda model, impl: f"{1e3 * times.step(model, impl)['tpot_ms']:.0f}")
    add("launches", lambda model, impl: f"{times.step(model, impl)['launches']:.0f}")
    return "\n".join(rows)


def _others(times: Timeline) -> list[str]:
    """Every part but the layers, those that take most of our engine's steps first."""
    took: dict[str, float] = {}
    for model in times.models:
        for impl in ENGINES:
            if times.has(model, impl):
                for part, line in times.parts(model, impl).items():
                    took[part] = took.get(part, 0.0) + line["us"] * (impl == "nvfp4r")
    return sorted((part for part in took if part not in LAYERS), key=lambda part: -took[part])


def _layers(times: Timeline, alone: table_linear.Figures) -> str:
    rows = [
        "| layer, us per call | nvfp4r in a step | idle before it | alone, back to back "
        "| alone, no PDL | limit | Marlin in a step | alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in times.models:
        for layer in LAYERS:
            shape = _shape(model, layer)
            calls = times.parts(model)[layer]["launches"]
            ours, idle, marlin = (
                times.us(model, impl, layer, field) / calls
                for impl, field in (("nvfp4r", "us"), ("nvfp4r", "idle_us"), ("stock", "us"))
            )
            kinds = (alone.us(shape, 1, impl) for impl in ("nvfp4r", "nvfp4r_no_pdl", "marlin"))
            with_pdl, without, stock = kinds
            rows.append(
                f"| {shape} | {ours:.1f} | {idle:.2f} | {with_pdl:.1f} | {without:.1f} "
                f"| {_limit(alone, shape):.1f} | {marlin:.1f} | {stock:.1f} |"
            )
    return "\n".join(rows)


def _left(times: Timeline, alone: table_linear.Figures) -> str:
    rows = [
        f"| what is left, us per token | {' | '.join(times.models)} | can a plug-in do without? |",
        "|---" * (len(times.models) + 2) + "|",
    ]

    def add(title: str, figure: Callable[[str], float], verdict: str) -> None:
        cells = " | ".join(f"{figure(model):.0f}" for model in times.models)
        rows.append(f"| {title} | {cells} | {verdict} |")

    def over_alone(model: str) -> float:
        return times.layers_us(model) - back_to_back_us(times, alone, model)

    def idle(model: str) -> float:
        return times.layers_us(model, field="idle_us")

    add(OVER_ALONE, over_alone, OVER_ALONE_CAN_GO)
    add(IDLE_BEFORE, idle, IDLE_CAN_GO)
    for part in _others(times):
        add(part, partial(times.us, impl="nvfp4r", part=part), CAN_GO.get(part, UNKNOWN_CAN_GO))
        if part == HEAD:
            add(
                "of which a head in NVFP4 would save, at gate_up's share of the bandwidth",
                lambda model: head_saving_us(times, alone, model),
                "",
            )
    add("idle elsewhere", lambda model: times.step(model)["idle_us"] - idle(model), "no")
    return "\n".join(rows)


def _needed(times: Timeline, alone: table_linear.Figures, whole: table_e2e.Figures) -> str:
    """What our layers might take for a goal at batch 1, with every other part as it is."""
    rows = [
        "| goal, batch 1 | a token may take, ms | so the layers, ms | of the read bandwidth "
        "| the layers take | of the read bandwidth | limit by bytes, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in times.models:
        bases = (("bf16", "BF16", table_e2e.BF16_GOALS), ("stock", "stock", table_e2e.STOCK_GOALS))
        for impl, base, goals in bases:
            if model not in goals:
                continue
            ours, other = (whole.decoding(model, x)[1]["tpot_ms"] for x in ("nvfp4r", impl))
            layers = times.layers_us(model) / 1e3
            limit = sum(
                _limit(alone, _shape(model, layer)) * times.parts(model)[layer]["launches"]
                for layer in LAYERS
            )
            limit /= 1e3
            allowed = other / goals[model]
            rest = allowed - (ours - layers)
            rows.append(
                f"| {model}, {goals[model]:.3g}x {base} | {allowed:.2f} | {rest:.2f} "
                f"| {limit / rest:.0%} | {layers:.2f} | {limit / layers:.0%} | {limit:.2f} |"
            )
    return "\n".join(rows)


def back_to_back_us(times: Timeline, alone: table_linear.Figures, model: str) -> float:
    """All layers of a token by their times in linear.jsonl, with PDL."""
    return sum(
        alone.us(_shape(model, layer), 1, "nvfp4r") * times.parts(model)[layer]["launches"]
        for layer in LAYERS
    )


def head_saving_us(times: Timeline, alone: table_linear.Figures, model: str) -> float:
    """If it were NVFP4 and as near to the bandwidth as the largest layer is in a step."""
    layer = times.parts(model)[LARGEST]
    share = _limit(alone, _shape(model, LARGEST)) * layer["launches"] / layer["us"]
    return times.us(model, "nvfp4r", HEAD) * (1 - NVFP4_OVER_BF16 / share)


def _shape(model: str, layer: str) -> str:
    """As linear.jsonl calls it: qwen3-32b's o is 32B o."""
    return f"{model.rpartition('-')[2].upper()} {layer}"


def _limit(alone: table_linear.Figures, shape: str) -> float:
    line = alone.line(shape, 1, "nvfp4r")
    return float(line["N"] * line["K"] * 9 / 16 / alone.read / 1e6)
