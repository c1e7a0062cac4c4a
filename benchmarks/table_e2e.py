"""Tables and plot of docs/performance.md for whole models in vLLM: results/e2e.jsonl, reset_vllm.

Ratios are recorded by the programs themselves, from figures of one round; nothing here divides
figures of two runs. Holds the goals of these figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

Line = dict[str, Any]
BF16_GOALS = {"qwen3-32b": 2.7, "qwen3-8b": 2.2}  # times as fast at batch 1
STOCK_GOALS = {"qwen3-32b": 1.5}
AT_BATCH_8 = 0.9  # of those
RESET_GOAL = 1.02
TTFT_GOALS = {512: 1.25, 2048: 1.0, 8192: 1.0}  # over stock, by the prompt's tokens
SERIES = {"bf16": ("BF16", "0.75"), "stock": ("stock NVFP4", "tab:orange")}
SERIES["nvfp4r"] = ("nvfp4r", "tab:blue")


def verdicts(line: Line) -> list[str]:
    """What one line's ratios are, each with its goal where there is one."""
    where = f"{line['model']} {line['impl']}, batch {line['batch']}, prompt {line['prompt']}"
    found = []
    for field, base in (("over_bf16", "BF16"), ("over_stock", "stock")):
        if line["impl"] == "nvfp4r" and line.get(field):
            ratio, goal = 1 / line[field], speed_goal(line, base)
            found.append(
                f"{where}: {ratio:.2f}x {base}{_against(goal, ratio >= (goal or 0), '>=')}"
            )
    if line.get("over_plain"):
        ratio = line["over_plain"]
        goal = RESET_GOAL if line["impl"].endswith("+reset") else None
        met = goal is None or ratio <= goal
        found.append(f"{where}: {ratio:.3f} of plain's time{_against(goal, met, '<=')}")
    if line.get("over_off"):
        found.append(f"{where}: {line['over_off']:.3f} of its own time with ReSET off")
    if line["impl"] == "nvfp4r" and line["batch"] == 1 and line.get("ttft_over_stock"):
        ratio, goal = line["ttft_over_stock"], TTFT_GOALS.get(line["prompt"])
        met = goal is None or ratio <= goal
        found.append(f"{where}: first token {ratio:.2f} of stock's time{_against(goal, met, '<=')}")
    return found


def speed_goal(line: Line, base: str) -> float | None:
    goal = (BF16_GOALS if base == "BF16" else STOCK_GOALS).get(line["model"])
    share = {1: 1.0, 8: AT_BATCH_8}.get(line["batch"])
    return goal * share if goal and share else None


def _against(goal: float | None, met: bool, sign: str) -> str:
    if goal is None:
        return ""
    return f" (goal {sign} {goal:.3g}, {'met' if met else 'missed'})"


class Figures:
    """The newest measurement of every model, engine, batch and prompt."""

    def __init__(self, lines: list[Line]) -> None:
        keys = ("model", "impl", "batch", "prompt")
        self._newest = {tuple(line[key] for key in keys): line for line in lines}
        self.models = sorted(
            {line["model"] for line in lines}, key=lambda model: (len(model), model)
        )

    def find(self, **match: Any) -> list[Line]:
        """The lines with these values, in the order batch, prompt."""
        lines = (
            line
            for line in self._newest.values()
            if all(line[key] == value for key, value in match.items())
        )
        return sorted(lines, key=lambda line: (line["batch"], line["prompt"]))

    def one(self, **match: Any) -> Line | None:
        return next(iter(self.find(**match)), None)

    def decoding(self, model: str, impl: str) -> dict[int, Line]:
        """By batch, those with a time per output token."""
        return {
            line["batch"]: line for line in self.find(model=model, impl=impl) if "tpot_ms" in line
        }


def e2e_table(lines: list[Line]) -> str:
    """Time per output token, what ReSET and the head change, first token, memory, and sources."""
    figures = Figures(lines)
    parts = [_speed(figures), _beside_plain(figures), _first_token(figures), _memory(figures)]
    sources = dict.fromkeys(_source(line) for line in figures.find())
    return "\n\n".join([*filter(None, parts), "\n".join(sources)])


def _speed(figures: Figures) -> str:
    rows = [
        "| model, batch | BF16 | stock NVFP4 | nvfp4r | x BF16 | goal | x stock | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in figures.models:
        engines = {impl: figures.decoding(model, impl) for impl in SERIES}
        for batch in sorted(set().union(*engines.values())):
            cells = [_ms(engines[impl].get(batch), "tpot_ms") for impl in SERIES]
            ours = engines["nvfp4r"].get(batch, {"model": model, "batch": batch})
            for field, base in (("over_bf16", "BF16"), ("over_stock", "stock")):
                goal = speed_goal(ours, base)
                cells.append(f"{1 / ours[field]:.2f}x" if field in ours else "-")
                cells.append(f">= {goal:.3g}x" if goal else "-")
            rows.append(f"| {model}, {batch} | {' | '.join(cells)} |")
    return "Milliseconds per output token:\n\n" + "\n".join(rows)


def _beside_plain(figures: Figures) -> str:
    rows = []
    for model in figures.models:
        for impl in ("stock+reset", "nvfp4r+reset", "nvfp4r+head"):
            for batch, line in figures.decoding(model, impl).items():
                if "over_plain" in line:
                    goal = f"<= {RESET_GOAL}" if impl.endswith("+reset") else "-"
                    own = f"{line['over_off']:.3f}" if "over_off" in line else "-"
                    rows.append(
                        f"| {model}, {batch} | {impl} | {_ms(line, 'tpot_ms')} "
                        f"| {line['over_plain']:.3f} | {goal} | {own} |"
                    )
    head = (
        "| model, batch | engine | ms per output token | over the plain engine | goal "
        "| ReSET on over off, same engine |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|", *rows]) if rows else ""


def _first_token(figures: Figures) -> str:
    rows = [
        "| model | prompt, batch | BF16 | stock NVFP4 | nvfp4r | over stock | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in figures.models:
        cases = {(x["prompt"], x["batch"]) for x in figures.find(model=model)}
        for prompt, batch in sorted(cases):
            where = {"model": model, "prompt": prompt, "batch": batch}
            cells = [_ms(figures.one(impl=impl, **where), "ttft_ms") for impl in SERIES]
            ratio = (figures.one(impl="nvfp4r", **where) or {}).get("ttft_over_stock")
            goal = TTFT_GOALS.get(prompt) if batch == 1 else None
            cells += [f"{ratio:.2f}" if ratio else "-", f"<= {goal}" if goal else "-"]
            rows.append(f"| {model} | {prompt}, {batch} | {' | '.join(cells)} |")
    head = "Milliseconds to the first token; the aim is stock's time or less for every prompt:"
    return f"{head}\n\n" + "\n".join(rows)


def _memory(figures: Figures) -> str:
    rows = [
        "| model | engine | weights, GB | peak while loading, GB | loading, s | ready, s |",
        "|---|---|---|---|---|---|",
    ]
    for model in figures.models:
        for impl in dict.fromkeys(line["impl"] for line in figures.find(model=model)):
            line = figures.one(model=model, impl=impl)
            assert line is not None
            weights, peak = (
                f"{line[key]:.1f}" if key in line else "-" for key in ("weights_gb", "peak_gb")
            )
            rows.append(
                f"| {model} | {impl} | {weights} | {peak} "
                f"| {line['load_s']:.1f} | {line['start_s']:.0f} |"
            )
    return "\n".join(rows)


def _ms(line: Line | None, field: str) -> str:
    if not line or field not in line:
        return "-"
    return f"{line[field]:.2f} ({line[f'lowest_{field}']:.2f} to {line[f'highest_{field}']:.2f})"


def reset_table(lines: list[Line]) -> str:
    """Time per output token with ReSET off and on in one engine, and the stock engines."""
    newest: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        newest[line["model"], line["weights"], line["batch"], line["impl"]] = line
    rows = [
        "| model, batch | engine | ms per output token | on over off | goal |",
        "|---|---|---|---|---|",
    ]
    for model, weights, batch, impl in sorted(newest, key=lambda key: key[:3]):
        line = newest[model, weights, batch, impl]
        ratio, goal = "-", "-"
        if impl.endswith("_on"):
            median, low, high = (
                f"{line[key]:.3f}" for key in ("on_over_off", "lowest_ratio", "highest_ratio")
            )
            ratio, goal = f"{median} ({low} to {high})", f"<= {RESET_GOAL}"
        rows.append(
            f"| {model} {weights}, {batch} | {impl} | {line['tpot_ms']:.2f} | {ratio} | {goal} |"
        )
    sources = dict.fromkeys(map(_source, newest.values()))
    return "\n".join([*rows, "", *sources])


def _source(line: Line) -> str:
    return (
        f"{line['date']}, {line['gpu'] or line['cpu']}, driver {line['driver']}, "
        f"torch {line['torch']}, vLLM {line['vllm']}, commit {line['git']}: `{line['command']}`"
    )


def plot_e2e(lines: list[Line], path: Path) -> None:
    """Bars of time per output token by batch, one panel a model; ratios to BF16 over the bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figures = Figures(lines)
    models = [model for model in figures.models if any(figures.decoding(model, x) for x in SERIES)]
    plot, panels = plt.subplots(
        1, len(models), figsize=(1 + 5 * len(models), 4), layout="constrained", squeeze=False
    )
    for axes, model in zip(panels[0], models, strict=True):
        _bars(axes, figures, model)
    panels[0][0].set_ylabel("ms per output token")
    panels[0][0].legend(frameon=False, loc="upper left", ncols=len(SERIES))
    newest = max(figures.find(), key=lambda line: line["date"])
    plot.suptitle(
        f"Decoding in vLLM {newest['vllm']}, {newest['gpu'] or newest['cpu']};\n"
        "above a bar: times as fast as BF16",
        fontsize="medium",
    )
    with plt.rc_context({"svg.hashsalt": "e2e"}):
        plot.savefig(path, metadata={"Date": None})
    plt.close(plot)


def _bars(axes: Any, figures: Figures, model: str) -> None:
    engines = {impl: figures.decoding(model, impl) for impl in SERIES}
    batches = sorted(set().union(*engines.values()))
    for index, (impl, (label, colour)) in enumerate(SERIES.items()):
        shown = {place: engines[impl].get(batch) for place, batch in enumerate(batches)}
        here = {place + 0.27 * (index - 1): line for place, line in shown.items() if line}
        heights = [line["tpot_ms"] for line in here.values()]
        bars = axes.bar(list(here), heights, 0.25, color=colour, label=label)
        ratios = [f"{1 / x['over_bf16']:.2f}x" if "over_bf16" in x else "" for x in here.values()]
        axes.bar_label(bars, ratios, fontsize=7)
    axes.set_xticks(range(len(batches)), map(str, batches))
    axes.set_xlabel("batch")
    axes.set_title(model)
    axes.margins(y=0.2)
    axes.spines[["top", "right"]].set_visible(False)
