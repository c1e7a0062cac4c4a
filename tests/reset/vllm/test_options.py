"""What requests and servers may say, and what they are told if it is wrong."""

from __future__ import annotations

import json

import pytest

from reset import ReSETConfig
from reset.vllm.options import (
    DEFAULTS_VARIABLE,
    LEGAL_KEYS,
    MAX_WINDOW,
    ServerOptions,
    request_config,
    server_options,
)

NOTHING = ServerOptions()
VALUES = {"t_low": 0.1, "tau_0": 0.55}
CONFIG = ReSETConfig(**VALUES)


def by_environment(**values) -> ServerOptions:
    return server_options({DEFAULTS_VARIABLE: json.dumps(values)})


def by_config(**values) -> ServerOptions:
    return server_options({}, {"reset": values})


@pytest.mark.parametrize(
    ("sent", "server", "expected"),
    [
        (None, NOTHING, None),
        ({}, NOTHING, None),
        ({"other": [1]}, NOTHING, None),
        ({"window": 5, "policy": "theirs"}, NOTHING, None),  # another processor's
        ({"reset": 1, **VALUES}, NOTHING, CONFIG),
        ({"reset": True, **VALUES}, NOTHING, CONFIG),
        (VALUES, NOTHING, CONFIG),
        ({"reset": 0, **VALUES}, NOTHING, None),
        ({"reset": "off", **VALUES}, NOTHING, None),
        ({"reset": 1, **VALUES, "window": 8.0}, NOTHING, ReSETConfig(**VALUES, window=8)),
        ({"reset": 1, "preset": "Qwen3-8B"}, NOTHING, ReSETConfig.preset("Qwen3-8B")),
        (
            {"reset": 1, "policy": "fixed", "base_temp": 0.7},
            NOTHING,
            ReSETConfig(policy="fixed", base_temp=0.7),
        ),
        # as scripts for the public reference send it
        (
            {"reset": True, "t_high": 1.0, **VALUES, "window": 32, "reset_nl_ids": [198]},
            NOTHING,
            CONFIG,
        ),
        (None, by_environment(**VALUES), CONFIG),
        ({"reset": 1}, by_environment(**VALUES), CONFIG),
        ({"reset": 0}, by_environment(**VALUES), None),
        ({"t_low": 0.2}, by_environment(**VALUES), ReSETConfig(t_low=0.2, tau_0=0.55)),
        ({"window": 4}, by_environment(**VALUES), ReSETConfig(**VALUES, window=4)),
        ({"preset": "Qwen3-8B"}, by_environment(**VALUES), ReSETConfig.preset("Qwen3-8B")),
        (None, by_environment(reset=0, **VALUES), None),
        (None, by_environment(preset="Qwen3-8B"), ReSETConfig.preset("Qwen3-8B")),
        (None, by_config(**VALUES), CONFIG),
        ({"reset": 0}, by_config(**VALUES), None),
        ({"other": 1}, by_config(**VALUES), CONFIG),
        ({"t_low": 0.3, "tau_0": 0.4}, by_config(**VALUES), ReSETConfig(t_low=0.3, tau_0=0.4)),
    ],
)
def test_the_policy_of_a_request(sent, server, expected):
    assert request_config(sent, 1.0, server) == expected


@pytest.mark.parametrize("server", [NOTHING, by_environment(**VALUES), by_config(**VALUES)])
def test_a_greedy_request_is_left_alone(server):
    assert request_config({"reset": 1, **VALUES}, 0.0, server) is None
    assert request_config(None, 0.0, server) is None


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"reset": 1}, "t_low is missing.*send t_low and tau_0, or a preset, in vllm_xargs"),
        ({"reset": 1, "t_low": 0.1}, "tau_0 is missing"),
        ({"tau_0": 0.5}, "t_low is missing"),
        ({"reset": 2, **VALUES}, "reset is 2; 1 switches"),
        ({"reset": [1], **VALUES}, r"reset is \[1\]"),
        ({**VALUES, "t_low": "0.1"}, r"t_low is '0.1' \(str\); a number is needed"),
        ({**VALUES, "tau_0": [0.5]}, r"tau_0 is \[0.5\] \(list\)"),
        ({**VALUES, "policy": 3}, "policy is 3"),
        ({**VALUES, "policy": "magic"}, "policy is 'magic'"),
        ({**VALUES, "t_low": -1}, "t_low is -1"),
        ({**VALUES, "t_low": 2}, "t_low must not exceed"),
        ({**VALUES, "tau_0": float("nan")}, "tau_0 is nan"),
        ({**VALUES, "t_low": True}, "t_low is True"),
        ({**VALUES, "window": 0}, "window is 0"),
        ({**VALUES, "window": 2.5}, "window is 2.5"),
        ({**VALUES, "window": MAX_WINDOW + 1}, f"at most {MAX_WINDOW}"),
        ({"reset": 1, "preset": "Qwen3-4B"}, "no preset is named 'Qwen3-4B'"),
        ({"reset": 1, "t_low": 0.1, "tau0": 0.5}, "unknown key 'tau0'; did you mean 'tau_0'?"),
        ({"T_low": 0.1}, "unknown key 'T_low'; did you mean 't_low'?"),
        ({"t-high": 0.1}, "did you mean 't_high'?"),
        ({"ReSET": 1}, "unknown key 'ReSET'; did you mean 'reset'?"),
        ({"reset": 1, **VALUES, "windw": 3}, "did you mean 'window'?"),
        ({"reset_window": 3}, "unknown key 'reset_window'; legal are reset, t_low"),
    ],
)
def test_l7_what_is_wrong_is_named(sent, message):
    with pytest.raises(ValueError, match=message):
        request_config(sent, 1.0, NOTHING)


def test_defaults_that_the_check_cannot_see_are_not_mixed_with_what_a_request_sends():
    """Else a request would pass the check and fail in the engine, which cannot answer it."""
    with pytest.raises(ValueError, match="tau_0 is missing"):
        request_config({"t_low": 0.2}, 1.0, by_config(**VALUES))


@pytest.mark.parametrize(
    ("environment", "additional", "message"),
    [
        ("{", None, "RESET_DEFAULTS is not JSON"),
        ("[1]", None, "RESET_DEFAULTS is a list; an object is needed"),
        ('{"t_low": 0.1}', None, "RESET_DEFAULTS: tau_0 is missing"),
        ('{"tau0": 0.1}', None, "RESET_DEFAULTS: unknown key.*tau0"),
        ('{"tokenizer": 3}', None, "tokenizer is 3"),
        (None, {"reset": 1}, '--additional-config "reset" is a int'),
        (None, {"reset": {"t_low": 2, "tau_0": 1}}, '--additional-config "reset": t_low is 2'),
        ("{}", {"reset": {}}, "both RESET_DEFAULTS and --additional-config"),
    ],
)
def test_bad_server_options_name_their_place(environment, additional, message):
    given = {} if environment is None else {DEFAULTS_VARIABLE: environment}
    with pytest.raises((ValueError, TypeError), match=message):
        server_options(given, additional)


def test_a_tokenizer_alone_switches_nothing_on():
    server = by_config(tokenizer="somewhere")
    assert (server.defaults, server.tokenizer) == (None, "somewhere")


def test_every_field_of_the_policy_can_be_sent():
    assert set(LEGAL_KEYS) == {"reset", "preset", *CONFIG.to_dict()}
