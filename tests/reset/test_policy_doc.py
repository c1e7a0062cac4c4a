"""The hand-computed table of docs/policy.md holds for the specification and for the policy."""

import re
from pathlib import Path

import pytest
import torch

from reset import ReSETConfig, TemperaturePolicy
from tests.reset.spec import Request

TEXT = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")


def example() -> tuple[dict, list[list[str]]]:
    section = TEXT.split("## An example by hand")[1]
    numbers = dict(re.findall(r"(T_low|T_high|tau_0|w) = ([\d.]+)", section.splitlines()[2]))
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if re.match(r"\| \d", line)
    ]
    config = {
        "t_low": float(numbers["T_low"]),
        "t_high": float(numbers["T_high"]),
        "tau_0": float(numbers["tau_0"]),
        "window": int(numbers["w"].rstrip(".")),
    }
    return config, rows


def test_worked_example():
    config, rows = example()
    assert len(rows) == 6
    policy = TemperaturePolicy(ReSETConfig(**config), slots=1)
    request = Request(**config)
    for position, (t, starts, *numbers) in enumerate(rows):
        assert int(t) == position
        entropy, step_entropy, mean_entropy, threshold, temperature = map(float, numbers)
        new_step = starts == "yes"
        token = request.feed(entropy, new_step)
        decision = policy.decide(torch.tensor([entropy]), torch.tensor([new_step]))
        for got in (token, decision):
            assert float(got.step_entropy) == pytest.approx(step_entropy, abs=1e-9)
            assert float(got.mean_entropy) == pytest.approx(mean_entropy, abs=1e-9)
            assert float(got.threshold) == pytest.approx(threshold, abs=1e-9)
            assert float(got.temperature) == temperature


def test_every_policy_and_estimator_is_documented():
    from reset.config import ESTIMATORS, POLICIES

    for name in (*POLICIES, *ESTIMATORS):
        assert f"| `{name}` |" in TEXT
