"""Legal ranges, presets and messages of ReSETConfig."""

import json
import math

import pytest

from reset import ReSETConfig
from reset.config import published_presets


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"t_low": 0.1}, "tau_0 is missing.*reset-calibrate.*Qwen3-8B"),
        ({"t_low": 0.1, "policy": "threshold"}, "tau_0 is missing"),
        ({"tau_0": 0.5}, "t_low is missing.*reset-calibrate"),
        ({"t_low": 1.1, "tau_0": 0.5}, "t_low is 1.1 and t_high is 1.0; t_low must not exceed"),
        ({"t_low": -0.1, "tau_0": 0.5}, "t_low is -0.1; it must be finite and >= 0"),
        ({"t_low": math.nan, "tau_0": 0.5}, "t_low is nan"),
        ({"t_low": 0.1, "tau_0": math.inf}, "tau_0 is inf"),
        ({"t_low": 0.1, "tau_0": -1}, "tau_0 is -1.0"),
        ({"t_low": 0.1, "tau_0": 0.5, "t_high": math.nan}, "t_high is nan"),
        ({"t_low": 0.1, "tau_0": 0.5, "window": 0}, "window is 0; it must be between 1 and"),
        ({"t_low": 0.1, "tau_0": 0.5, "window": 10**6}, "window is 1000000"),
        ({"t_low": 0.1, "tau_0": 0.5, "policy": "ReSET"}, "policy is 'ReSET'; .* reset, fixed"),
        ({"t_low": 0.1, "tau_0": 0.5, "estimator": "mean"}, "estimator is 'mean'"),
        ({"policy": "fixed", "base_temp": -1}, "base_temp is -1.0"),
    ],
)
def test_bad_values_name_the_field(values, message):
    with pytest.raises(ValueError, match=message):
        ReSETConfig(**values)


@pytest.mark.parametrize(
    "values",
    [{"t_low": "0.1"}, {"t_low": True}, {"window": 3.0}, {"window": True}, {"t_high": None}],
)
def test_wrong_types_are_type_errors(values):
    with pytest.raises(TypeError, match=next(iter(values))):
        ReSETConfig(**{"t_low": 0.1, "tau_0": 0.5, **values})


@pytest.mark.parametrize("policy", ["sliding", "relative", "uniform"])
def test_policies_without_tau_0_do_not_ask_for_it(policy):
    assert ReSETConfig(t_low=0.1, policy=policy).tau_0 is None
    assert ReSETConfig(policy="fixed").t_low is None


def test_presets_are_the_published_values():
    expected = {
        "Qwen3-8B": (0.1, 0.5505),
        "Qwen3-14B": (0.3, 0.4863),
        "Qwen3-32B": (0.1, 0.5363),
        "DeepSeek-R1-Distill-Qwen-7B": (0.4, 0.6446),
        "DeepSeek-R1-Distill-Qwen-14B": (0.3, 0.6488),
    }
    assert set(published_presets()) == set(expected)
    for name, (t_low, tau_0) in expected.items():
        config = ReSETConfig.preset(name)
        assert (config.t_low, config.tau_0, config.t_high, config.window) == (t_low, tau_0, 1.0, 32)
    assert ReSETConfig.preset("Qwen/qwen3-8b", t_high=0.8).t_high == 0.8


def test_unknown_preset_lists_those_that_exist():
    with pytest.raises(ValueError, match=r"'Qwen3-4B'.*Qwen3-8B.*reset-calibrate"):
        ReSETConfig.preset("Qwen3-4B")


def test_config_is_frozen_and_round_trips():
    config = ReSETConfig(t_low=0.1, tau_0=0.5505, window=16, estimator="ema")
    with pytest.raises(AttributeError):
        config.t_low = 0.2
    assert ReSETConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match=r"unknown field\(s\) t_mid"):
        ReSETConfig.from_dict({"t_mid": 1})


def test_calibration_file(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"config": {"t_low": 0.2, "tau_0": 0.7}}))
    assert ReSETConfig.from_file(path, window=8) == ReSETConfig(t_low=0.2, tau_0=0.7, window=8)
    path.write_text(json.dumps({"tau_0": 0.7}))
    with pytest.raises(ValueError, match='no "config" object'):
        ReSETConfig.from_file(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ReSETConfig.from_file(path)


def test_prints_itself():
    assert str(ReSETConfig(policy="fixed", base_temp=0.6)) == "fixed: T 0.6"
    assert "tau_0 0.5505 nats" in str(ReSETConfig.preset("Qwen3-8B"))
