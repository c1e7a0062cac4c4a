"""Synthetic traces for the tests of the page: a worked maths solution with made-up distributions.

Every token gets an explicit small distribution, so entropy, probability and alternatives agree with
one another; thresholds and temperatures follow from the scalar specification of docs/policy.md in
spec.py, for every policy and estimator. No model ran, and the model name says so.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

from reset.trace import TokenTrace, Trace
from tests.reset.spec import Request

PROMPT = "How many positive integers n ≤ 100 make n² + n a multiple of 12? Think step by step."

# One paragraph per step; the number says how unsure the imagined model is there.
STEPS = (
    (0.8, "We need to count the positive integers n ≤ 100 with n² + n divisible by 12."),
    (0.9, "Factor the expression: n² + n = n(n + 1), a product of two consecutive integers."),
    (
        0.7,
        "Since 12 = 4 · 3, the product must be divisible by 4 and by 3:\n"
        "mod 4: n ≡ 0 or n ≡ 3\nmod 3: n ≡ 0 or n ≡ 2",
    ),
    (
        2.6,
        "Hmm, maybe it is simpler to go through the residues one by one? Alternatively, combine "
        "the two conditions with the Chinese remainder theorem, which should give "
        "2 · 2 = 4 residues modulo 12.",
    ),
    (0.8, "They are n ≡ 0, 3, 8, 11 (mod 12). Check: 3 · 4 = 12, 8 · 9 = 72, 11 · 12 = 132."),
    (
        0.9,
        "From 1 to 96 there are 8 full blocks of 12, each with 4 solutions, so 8 · 4 = 32 of them.",
    ),
    (
        2.4,
        "Wait, I should be careful with the rest. The numbers 97, 98, 99, 100 leave the "
        "remainders 1, 2, 3, 4, so only 99 works, which adds 1 more.",
    ),
    (0.6, "The total is 32 + 1 = 33.\n**Answer: 33**"),
)

_FORKS = ("Hmm", "Wait", "Alternatively", " maybe", "They", "From", " so", " which", "Factor")
_POOLS = {
    "digit": [*"0123456789"],
    "opening": ["So", "Now", "Then", "But", "Let", "First", "Next", "Thus", "Since", "Also"],
    "word": [" the", " we", " this", " that", " it", " all", " both", " then", " each", " them"],
    "operator": [" =", " +", " ·", " −", " ≡", " ≤", " /", " ^", "(", ")"],
    "punctuation": [",", ".", ":", ";", "!", "?", " and", " –"],
    "newline": ["\n\n", "\n", ".\n\n", " ", "<|im_end|>"],
}


def sample_policy(**changes: Any) -> dict[str, Any]:
    """Parameters as `ReSETConfig.to_dict` gives them."""
    policy = {"t_low": 0.1, "tau_0": 0.65, "t_high": 1.0, "window": 12, "policy": "reset"}
    return {**policy, "estimator": "hybrid", "base_temp": 0.6, **changes}


def sample_trace(seed: int = 5, repeat: int = 1, **policy: Any) -> Trace:
    """The worked solution as a trace, about 250 tokens in 8 steps; `repeat` makes it longer."""
    rng = random.Random(seed)
    pieces = [piece for _ in range(repeat) for piece in _pieces()] + [("", 0.2)]
    tokens = _decide([_draw(rng, *piece) for piece in pieces], sample_policy(**policy))
    return Trace(
        model="Synthetic example (no model ran)",
        prompt=PROMPT,
        policy=sample_policy(**policy),
        seed=seed,
        tokens=tokens,
        finish_reason="stop",
        seconds=len(tokens) / 41.7,
        versions={"reset-decoding": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
    )


def _pieces() -> list[tuple[str, float]]:
    """(token text, how unsure): words with their space, single digits, ".\\n\\n" as one token."""
    pieces = []
    for number, (spread, text) in enumerate(STEPS):
        ending = "\n\n" if number + 1 < len(STEPS) else ""
        for piece in re.findall(r"[.?]?\n+| ?[A-Za-z]+| ?[0-9]| ?[^\s\w]|²|\s", text + ending):
            pieces.append((piece, spread * _unsure(piece)))
    return pieces


def _unsure(piece: str) -> float:
    if piece in _FORKS:
        return 2.2
    if _kind(piece) in ("word", "opening"):
        return 0.75
    return 0.35 if _kind(piece) == "newline" else 0.25


def _kind(piece: str) -> str:
    word = piece.strip()
    if "\n" in piece or not word:
        return "newline"
    if word in "0123456789":
        return "digit"
    if word.isalpha():
        return "opening" if piece[0].isupper() else "word"
    return "punctuation" if word in ",.:?*" else "operator"


def _draw(rng: random.Random, text: str, unsure: float) -> dict[str, Any]:
    """A distribution with `text` at a random rank: entropy, probability and the five likeliest."""
    others = [word for word in _POOLS[_kind(text)] if word.strip(" ") != text.strip(" ")]
    rng.shuffle(others)
    # The k-th likeliest loses k / width of logit; a width of 0.1 is nearly one-hot.
    width = max(0.08, unsure * rng.uniform(0.25, 1.9) ** 1.6)
    weights = [math.exp(-rank / width) for rank in range(len(others) + 1)]
    shares = [weight / sum(weights) for weight in weights]
    rank = rng.choices(range(len(shares)), shares)[0]
    words = [*others[:rank], text, *others[rank:]]
    return {
        "text": text,
        "token_id": sum(ord(char) * 31**place for place, char in enumerate(text)) % 150_000,
        "entropy_nats": -sum(share * math.log(share) for share in shares if share > 0),
        "probability": shares[rank],
        "alternatives": tuple(zip(words, shares, strict=True))[:5],
    }


def _decide(drawn: list[dict[str, Any]], policy: dict[str, Any]) -> tuple[TokenTrace, ...]:
    """Thresholds and temperatures by the scalar specification, one token after the other."""
    request = Request(**policy)
    tokens, step, ended, before = [], 0, False, ""
    for position, token in enumerate(drawn):
        decided = request.feed(token["entropy_nats"], new_step=ended)
        step += ended
        ended = "\n\n" in before[-1:] + token["text"]
        before += token["text"]
        tokens.append(
            TokenTrace(
                position=position,
                step_entropy_nats=decided.step_entropy,
                mean_entropy_nats=decided.mean_entropy,
                threshold_nats=decided.threshold if math.isfinite(decided.threshold) else None,
                temperature=decided.temperature,
                step=step,
                ends_step=ended,
                **token,
            )
        )
    return tuple(tokens)
