"""What a request and the server may say about ReSET, checked: keys, values, defaults, opt-out.

A request speaks through `SamplingParams.extra_args` (`vllm_xargs` over HTTP), the server through
the environment variable RESET_DEFAULTS or `--additional-config`. Needs no vLLM: a request is
anything with `extra_args` and `temperature`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from reset.config import ReSETConfig

DEFAULTS_VARIABLE = "RESET_DEFAULTS"
"""Environment variable that holds the server's defaults as a JSON object."""

MAX_WINDOW = 1024
"""Largest window that a request may ask for: every slot of the engine reserves this much."""

SWITCH = "reset"
REQUEST_ID = "reset_request_id"
"""Written by the check of a request, so that a preempted request is known when it comes back."""

IGNORED_KEYS = ("reset_nl_ids", "reset_dnl_ids")
"""Sent by scripts for the public reference; newlines are found by the engine."""

_GREEDY = 1e-5  # vLLM: a request below this temperature is decoded by argmax
_CONFIG_KEYS = tuple(field.name for field in fields(ReSETConfig))
_VALUE_KEYS = (*_CONFIG_KEYS, "preset")
LEGAL_KEYS = (SWITCH, *_VALUE_KEYS)

# These belong to nobody else, so a request that carries one means ReSET. "window" or "policy" alone
# may be meant for another logits processor.
_OWN_KEYS = ("t_low", "t_high", "tau_0", "base_temp")

_ON = (True, 1, "1", "true", "on")
_OFF = (False, 0, "0", "false", "off")
_MISSPELT = {
    "tau": "tau_0",
    "taut": "tau_0",
    "templow": "t_low",
    "temphigh": "t_high",
    "temperaturelow": "t_low",
    "temperaturehigh": "t_high",
    "basetemperature": "base_temp",
}


@dataclass(frozen=True)
class ServerOptions:
    """What the server was started with.

    Args:
        defaults: keys and values for requests, as a request would send them; None: ReSET is off
            unless a request switches it on.
        shared: True if the process that checks requests sees `defaults` too (the environment
            variable), so that a request may replace single values of them.
        tokenizer: folder or name of the tokenizer that finds step borders; None: the engine's.
    """

    defaults: Mapping[str, Any] | None = None
    shared: bool = True
    tokenizer: str | None = None


def server_options(
    environment: Mapping[str, str], additional_config: Mapping[str, Any] | None = None
) -> ServerOptions:
    """Read and check the server's options.

    Args:
        environment: of this process; RESET_DEFAULTS is looked at.
        additional_config: of the engine (`--additional-config`), key "reset"; None where the
            engine's configuration is not known, as in the process that checks requests.

    Raises:
        ValueError, TypeError: no JSON object, an unknown key, a value out of range, or both places
            are used. Names the place and the field.
    """
    text = environment.get(DEFAULTS_VARIABLE)
    given = None if additional_config is None else additional_config.get("reset")
    if text is not None and given is not None:
        raise ValueError(
            f'both {DEFAULTS_VARIABLE} and --additional-config "reset" are set; keep one of them'
        )
    if text is not None:
        return _environment_options(text)
    if given is None:
        return ServerOptions()
    return _options('--additional-config "reset"', given, shared=False)


@lru_cache(maxsize=8)
def _environment_options(text: str) -> ServerOptions:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{DEFAULTS_VARIABLE} is not JSON ({error}); "
            'set it to an object such as {"t_low": 0.1, "tau_0": 0.55}'
        ) from None
    return _options(DEFAULTS_VARIABLE, given, shared=True)


def _options(place: str, given: Any, shared: bool) -> ServerOptions:
    if not isinstance(given, Mapping):
        raise TypeError(f"{place} is a {type(given).__name__}; an object is needed")
    values = dict(given)
    tokenizer = values.pop("tokenizer", None)
    if tokenizer is not None and not isinstance(tokenizer, str):
        raise TypeError(f"{place}: tokenizer is {tokenizer!r}; a folder or a name is needed")
    if unknown := sorted(set(values) - set(LEGAL_KEYS)):
        legal = ", ".join((*LEGAL_KEYS, "tokenizer"))
        raise ValueError(f"{place}: unknown key(s) {', '.join(unknown)}; legal are {legal}")
    if not values or not _switch(values.get(SWITCH, True)):
        return ServerOptions(None, shared, tokenizer)
    del_switch = {key: value for key, value in values.items() if key != SWITCH}
    try:
        _config(del_switch)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{place}: {error}") from None
    return ServerOptions(del_switch, shared, tokenizer)


def request_config(
    extra_args: Mapping[str, Any] | None, temperature: float, server: ServerOptions
) -> ReSETConfig | None:
    """The policy of a request, or None if it is to be left alone, bit for bit.

    Args:
        extra_args: of the request; keys of other logits processors are ignored.
        temperature: of the request; 0 means greedy decoding, which ReSET leaves alone.
        server: from `server_options`.

    Raises:
        ValueError: a value is out of range, of the wrong type or missing, or a key looks like a
            misspelt one of ours. Names the field.
    """
    sent = dict(extra_args or {})
    _refuse_misspelt(sent)
    switch = _switch(sent[SWITCH]) if SWITCH in sent else None
    values = {key: sent[key] for key in _VALUE_KEYS if key in sent}
    means_reset = switch or any(key in sent for key in _OWN_KEYS)
    if switch is False:
        return None
    if not means_reset and not (server.defaults is not None and server.shared):
        # Nothing that is surely ours: the server's defaults, if there are any.
        values = {}
    if values or switch:
        base = server.defaults if server.defaults is not None and server.shared else {}
        config = _config({**_without_replaced(base, values), **values}, switched_on=True)
    elif server.defaults is not None:
        config = _config(server.defaults)
    else:
        return None
    return None if temperature < _GREEDY else config


def _without_replaced(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that a request keeps: its own preset replaces the server's numbers."""
    if "preset" in values:
        return {key: value for key, value in base.items() if key not in ("t_low", "tau_0")}
    return dict(base)


def _config(values: Mapping[str, Any], switched_on: bool = False) -> ReSETConfig:
    """Build the configuration; every failure is a ValueError, which vLLM answers with HTTP 400."""
    checked = {key: _plain(key, value) for key, value in values.items()}
    preset = checked.pop("preset", None)
    try:
        config = ReSETConfig(**checked) if preset is None else ReSETConfig.preset(preset, **checked)
    except TypeError as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        if switched_on and "is missing" in str(error):
            raise ValueError(
                f"{error}. This request switches ReSET on: send t_low and tau_0, or a preset, in "
                f"vllm_xargs, or start the server with {DEFAULTS_VARIABLE}"
            ) from None
        raise
    if config.window > MAX_WINDOW:
        raise ValueError(f"window is {config.window}; in vLLM it must be at most {MAX_WINDOW}")
    return config


def _plain(key: str, value: Any) -> Any:
    """A value as it came over HTTP, for ReSETConfig: JSON has 32.0 for 32."""
    wants_text = key in ("policy", "estimator", "preset")
    if wants_text != isinstance(value, str) or isinstance(value, (list, tuple, dict)):
        wanted = "a string" if wants_text else "a number"
        raise ValueError(f"{key} is {value!r} ({type(value).__name__}); {wanted} is needed")
    if key == "window" and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _switch(value: Any) -> bool:
    text = value.lower() if isinstance(value, str) else value
    if isinstance(text, (bool, int, str)):
        if text in _ON:
            return True
        if text in _OFF:
            return False
    raise ValueError(f"{SWITCH} is {value!r}; 1 switches ReSET on for a request, 0 off")


def _refuse_misspelt(sent: Mapping[str, Any]) -> None:
    known = (*LEGAL_KEYS, *IGNORED_KEYS, REQUEST_ID)
    plain = {_plain_name(key): key for key in LEGAL_KEYS}
    for key in sent:
        if key in known:
            continue
        name = _plain_name(key)
        meant = plain.get(name) or _MISSPELT.get(name)
        if meant is None and SWITCH in sent:
            close = difflib.get_close_matches(name, list(plain), n=1, cutoff=0.85)
            meant = plain[close[0]] if close else None
        if meant is not None:
            raise ValueError(f"unknown key {key!r}; did you mean {meant!r}?")
        if key.startswith("reset_"):
            raise ValueError(f"unknown key {key!r}; legal are {', '.join(LEGAL_KEYS)}")


def _plain_name(key: str) -> str:
    return key.lower().replace("_", "").replace("-", "")
