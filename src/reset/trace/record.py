"""The record of one generated text: which token got which temperature, and from what numbers.

Plain values that survive a JSON round trip, checked when they are built. Does not compute an
entropy, a threshold or a temperature (docs/policy.md has the equations), and draws nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

SCHEMA_VERSION = 1
"""Version of the JSON layout; raised whenever a field changes its name or its meaning."""

_FINISH_REASONS = ("stop", "length")
_POLICY_FIELDS = ("t_low", "tau_0", "t_high", "window", "policy", "estimator", "base_temp")
_ENTROPIES = ("entropy_nats", "step_entropy_nats", "mean_entropy_nats")

# Numbers come from float32 sums: one-hot rows may give -1e-8 nats or a probability of 1 + 1e-7.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class TokenTrace:
    """One output token and the numbers that chose its temperature.

    Args:
        position: output position, from 0; prompt tokens do not count.
        token_id: id in the vocabulary, >= 0.
        text: what the token adds to the text. May be empty (an end-of-text token), and may hold
            U+FFFD where the token is only a part of a character.
        entropy_nats: H_t, entropy of the raw logits, >= 0.
        step_entropy_nats: H_step(t), the estimate for the current step.
        mean_entropy_nats: H_bar(t), mean of all entropies of this request before t.
        threshold_nats: tau_t, or None where H_t was compared with nothing: policy "fixed", and a
            confident step of policy "uniform".
        temperature: T_t, the temperature that the token was sampled at.
        step: index of the step that the token belongs to, from 0.
        ends_step: True if the token completes the delimiter; the next token starts a step.
        probability: of this token under the raw logits, 0 .. 1; None if it was not recorded.
        alternatives: (text, probability) of the likeliest tokens under the raw logits, best
            first; may hold this token, may be empty.

    Raises:
        ValueError: a number is not finite or out of range; the message names position and field.
        TypeError: a field has the wrong type, e.g. a tensor where a float is needed.
    """

    position: int
    token_id: int
    text: str
    entropy_nats: float
    step_entropy_nats: float
    mean_entropy_nats: float
    threshold_nats: float | None
    temperature: float
    step: int
    ends_step: bool
    probability: float | None = None
    alternatives: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        _integer("position", self.position)
        where = f"token {self.position}: "
        _integer(where + "token_id", self.token_id)
        _integer(where + "step", self.step)
        _instance(where + "text", self.text, str, "a string, empty if the token adds no text")
        _instance(where + "ends_step", self.ends_step, bool, "True or False")
        for name in _ENTROPIES:
            advice = "; entropies are of the raw logits, in nats"
            _number(where + name, getattr(self, name), low=-_ROUNDING, advice=advice)
        if self.threshold_nats is not None:
            advice = "; pass None where the policy compared H_t with no threshold"
            _number(where + "threshold_nats", self.threshold_nats, low=-_ROUNDING, advice=advice)
        _number(where + "temperature", self.temperature, low=0.0)
        if self.probability is not None:
            _probability(where + "probability", self.probability)
        pairs = tuple(tuple(pair) for pair in self.alternatives)
        for rank, pair in enumerate(pairs):
            name = f"{where}alternatives[{rank}]"
            if len(pair) != 2:
                raise ValueError(f"{name} has {len(pair)} entries; (text, probability) is needed")
            _instance(name + " text", pair[0], str, "a string")
            _probability(name + " probability", pair[1])
        object.__setattr__(self, "alternatives", pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values under the names of the fields, for JSON; `from_dict` is the inverse."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["alternatives"] = [list(pair) for pair in self.alternatives]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TokenTrace:
        """Build from plain values; a missing or unknown key is a ValueError that names it."""
        return cls(**_exact_keys("a token", values, [field.name for field in fields(cls)]))


@dataclass(frozen=True)
class Trace:
    """A whole generated text: its tokens in order, the policy that ran and how it ended.

    Args:
        model: name or path of the model, for the reader.
        prompt: the prompt as text.
        policy: the parameters in force, `ReSETConfig.to_dict()`: t_low, tau_0, t_high, window,
            policy, estimator, base_temp. Every token's temperature must be t_low or t_high, or
            base_temp where policy is "fixed".
        seed: of the sampler, or None if it was not set.
        tokens: in order of position, without gaps, from 0; may be empty.
        finish_reason: "stop" (the model ended the text) or "length" (the token limit did).
        seconds: wall time of the decoding, > 0, or None if it was not measured.
        versions: package name -> version.

    Raises:
        ValueError: positions have gaps, a step does not follow from `ends_step`, a temperature is
            not one of the policy's, or a value is out of range. The message names the field.
        TypeError: a field has the wrong type.
    """

    model: str
    prompt: str
    policy: dict[str, Any]
    seed: int | None
    tokens: tuple[TokenTrace, ...]
    finish_reason: Literal["stop", "length"]
    seconds: float | None
    versions: dict[str, str]

    def __post_init__(self) -> None:
        _instance("model", self.model, str, "a string")
        _instance("prompt", self.prompt, str, "a string")
        if self.seed is not None:
            _instance("seed", self.seed, int, "an integer, or None")
        if self.finish_reason not in _FINISH_REASONS:
            raise ValueError(f"finish_reason is {self.finish_reason!r}; pass 'stop' or 'length'")
        if self.seconds is not None:
            _number("seconds", self.seconds, low=0.0)
            if self.seconds == 0:
                raise ValueError("seconds is 0; pass the wall time, or None if not measured")
        _instance("versions", self.versions, dict, "a dict of strings")
        for name, version in self.versions.items():
            _instance(f"versions[{name!r}]", version, str, "a string")
        _check_policy(self.policy)
        for name in ("policy", "versions"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "tokens", tuple(self.tokens))
        self._check_order()
        self._check_temperatures()

    def _check_order(self) -> None:
        step = 0
        for index, token in enumerate(self.tokens):
            _instance(f"tokens[{index}]", token, TokenTrace, "a TokenTrace")
            if token.position != index:
                raise ValueError(
                    f"tokens[{index}] has position {token.position}; positions must count 0, 1, 2, "
                    "... without gaps. Record every output token once, in order"
                )
            if token.step != step:
                raise ValueError(
                    f"token {index} has step {token.step}, but step {step} follows from ends_step "
                    "of the tokens before it; a step begins only after a token that ends one"
                )
            step += token.ends_step

    def _check_temperatures(self) -> None:
        legal = self._temperatures()
        for token in self.tokens:
            if not any(math.isclose(token.temperature, t, rel_tol=_ROUNDING) for t in legal):
                raise ValueError(
                    f"token {token.position} has temperature {token.temperature}; policy "
                    f"{self.policy['policy']!r} allows {' or '.join(map(str, legal))}. "
                    "Pass the policy parameters that the text was sampled with"
                )

    def _temperatures(self) -> tuple[float, ...]:
        if self.policy["policy"] == "fixed":
            return (self.policy["base_temp"],)
        return (self.policy["t_low"], self.policy["t_high"])

    @property
    def is_fixed(self) -> bool:
        """True if one temperature was used throughout, so that no token is low or high."""
        return bool(self.policy["policy"] == "fixed")

    def is_at_t_high(self, token: TokenTrace) -> bool:
        """True if `token` was sampled at T_high; always False under policy "fixed".

        Temperatures are float32, so the nearer of the two counts. Equal T_low and T_high: True.
        """
        if self.is_fixed:
            return False
        t_low, t_high = self._temperatures()
        return abs(token.temperature - t_high) <= abs(token.temperature - t_low)

    def step_means_nats(self) -> tuple[float, ...]:
        """Mean H_t of each step, in nats, one per step."""
        entropies: list[list[float]] = []
        for token in self.tokens:
            if token.step == len(entropies):
                entropies.append([])
            entropies[token.step].append(token.entropy_nats)
        return tuple(math.fsum(values) / len(values) for values in entropies)

    def summary(self) -> dict[str, float | int | None]:
        """Figures of the whole text.

        Returns:
            tokens: number of output tokens.
            steps: number of steps that hold at least one token.
            share_t_high: tokens sampled at T_high / tokens, 0 .. 1; None under policy "fixed",
                which has no T_high, and for an empty text.
            mean_entropy_nats: mean H_t; None for an empty text.
            tokens_per_second: tokens / seconds; None if seconds were not measured.
        """
        count = len(self.tokens)
        high = sum(self.is_at_t_high(token) for token in self.tokens)
        total = math.fsum(token.entropy_nats for token in self.tokens)
        return {
            "tokens": count,
            "steps": self.tokens[-1].step + 1 if count else 0,
            "share_t_high": high / count if count and not self.is_fixed else None,
            "mean_entropy_nats": total / count if count else None,
            "tokens_per_second": count / self.seconds if self.seconds is not None else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values with "schema_version", for JSON; `from_dict` is the inverse."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["policy"], values["versions"] = dict(self.policy), dict(self.versions)
        values["tokens"] = [token.to_dict() for token in self.tokens]
        return {"schema_version": SCHEMA_VERSION, **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """Build from plain values.

        Raises:
            ValueError: the schema version is another one, a key is missing or unknown, or a value
                is not valid.
        """
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"trace has schema_version {version!r}; this release reads {SCHEMA_VERSION}. "
                "Record the trace again, or read it with the release that wrote it"
            )
        names = ["schema_version", *(field.name for field in fields(cls))]
        known = _exact_keys("a trace", values, names)
        del known["schema_version"]
        _instance("tokens", known["tokens"], list, "a list of tokens")
        known["tokens"] = tuple(TokenTrace.from_dict(token) for token in known["tokens"])
        return cls(**known)

    def to_json(self) -> str:
        """One line of ASCII JSON; `from_json` gives an equal trace."""
        return json.dumps(self.to_dict(), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote.

        Raises:
            ValueError: `text` is not a JSON object, or as for `from_dict`.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"trace is not JSON ({error}); pass what Trace.to_json wrote"
            ) from None
        if not isinstance(values, dict):
            raise ValueError(f"trace is a JSON {type(values).__name__}; an object is needed")
        return cls.from_dict(values)


def _check_policy(policy: dict[str, Any]) -> None:
    _instance("policy", policy, dict, "a dict, such as ReSETConfig.to_dict()")
    missing = [name for name in _POLICY_FIELDS if name not in policy]
    if missing:
        raise ValueError(f"policy lacks {', '.join(missing)}; pass ReSETConfig.to_dict()")
    for name in ("policy", "estimator"):
        _instance(f"policy[{name!r}]", policy[name], str, "a string")
    needed = ("base_temp",) if policy["policy"] == "fixed" else ("t_low", "t_high")
    for name in ("t_low", "tau_0", "t_high", "base_temp"):
        if policy[name] is not None or name in needed:
            _number(f"policy[{name!r}]", policy[name], low=0.0)
    _integer("policy['window']", policy["window"])


def _exact_keys(what: str, values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    _instance(what, values, dict, "an object")
    missing = [name for name in names if name not in values]
    unknown = sorted(set(values) - set(names))
    if missing or unknown:
        raise ValueError(
            f"{what} lacks [{', '.join(missing)}] and has unknown [{', '.join(unknown)}]; "
            f"it must have exactly {', '.join(names)}"
        )
    return dict(values)


def _instance(name: str, value: Any, kind: type, needed: str) -> None:
    # True is an int to Python, but never a seed or an id.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); pass {needed}")


def _integer(name: str, value: Any) -> None:
    _instance(name, value, int, "an integer >= 0")
    if value < 0:
        raise ValueError(f"{name} is {value}; it must be >= 0")


def _number(name: str, value: Any, low: float, advice: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); pass a float")
    if not math.isfinite(value) or value < low:
        raise ValueError(f"{name} is {value}; it must be finite and >= 0{advice}")


def _probability(name: str, value: Any) -> None:
    _number(name, value, low=0.0)
    if value > 1 + _ROUNDING:
        raise ValueError(f"{name} is {value}; a probability is at most 1, pass no logit or percent")
