"""tau_0 of a model that is loaded: decode held-out problems, take the percentile, keep the origin.

Knows the transformers engine; the rule is calibrate.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from reset.calibrate import (
    DEFAULT_PERCENTILE,
    Calibration,
    percentile_threshold,
    text_sha256,
    threshold_interval,
)
from reset.config import ReSETConfig
from reset.evaluate.engines import Request
from reset.evaluate.engines.chat import prompt_ids
from reset.evaluate.engines.hf import TransformersEngine

LEVEL = 0.95


def find_threshold(
    engine: TransformersEngine,
    problems: Sequence[str],
    *,
    data: str,
    percentile: float = DEFAULT_PERCENTILE,
    temperature: float = 0.6,
    top_p: float = 0.95,
    max_tokens: int = 8192,
    batch_size: int = 8,
    seed: int = 0,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Calibration:
    """Decode `problems` at one temperature and take tau_0 from the raw-logit entropies.

    Args:
        engine: the model that will be served: the NVFP4 one, not its BF16 source.
        problems: texts, each put to the model alone through its chat template.
        data: where they came from.
        percentile: 0 .. 100.
        temperature, top_p, max_tokens: of the decoding; entropies are those before them.
        batch_size: problems decoded at once.
        seed: of the first batch, later ones add 1; also that of the interval.
        on_progress: called with the number of problems done.

    Raises:
        ValueError: an argument is out of range, or no problems.
    """
    from reset import engine as decoding

    baseline = ReSETConfig(policy="fixed", base_temp=temperature)
    percentile_threshold([[0.0]], percentile)
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; it must be at least 1")
    loaded, about = engine.loaded, engine.describe()
    decoding.check_sampling(max_tokens, top_p, seed)
    prompts = []
    for problem in problems:
        request = Request((("user", problem),), seed, baseline, max_tokens, top_p)
        text = engine.render(request)
        prompts.append(decoding.Prompt(text, tuple(prompt_ids(loaded.tokenizer, text))))
    traces = []
    for start in range(0, len(prompts), batch_size):
        traces += decoding.generate(
            loaded,
            prompts[start : start + batch_size],
            baseline,
            max_new_tokens=max_tokens,
            top_p=top_p,
            seed=seed + start // batch_size,
            alternatives=0,
        )
        on_progress(len(traces))
    entropies = [[token.entropy_nats for token in trace.tokens] for trace in traces]
    tau_0 = percentile_threshold(entropies, percentile)
    sampling: dict[str, Any] = {
        **{"temperature": temperature, "top_p": top_p, "seed": seed},
        **{"batch_size": batch_size, "max_tokens": max_tokens, "thinking": about["thinking"]},
    }
    ends = threshold_interval(entropies, percentile, seed=seed, level=LEVEL)
    return Calibration(
        config={"tau_0": tau_0},
        percentile=percentile,
        model=loaded.name,
        model_sha256=about["model_sha256"],
        quantisation=loaded.quantisation,
        data=data,
        problems=[text_sha256(problem) for problem in problems],
        tokens=[len(tokens) for tokens in entropies],
        truncated=sum(trace.finish_reason == "length" for trace in traces),
        sampling=sampling,
        versions=decoding.package_versions(),
        tau_0_interval=None if ends is None else {"low": ends[0], "high": ends[1], "level": LEVEL},
    )
