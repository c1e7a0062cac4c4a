"""Recipes: those of the repository are sound, and bad ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from reset.config import ESTIMATORS, POLICIES, ReSETConfig
from reset.evaluate.recipes import arm_plan, read_recipe
from tests.reset.evaluate.scripted import plan

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.yaml"))
BASE = plan(config=ReSETConfig(t_low=0.1, tau_0=0.55))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_has_legal_arms_that_differ(path):
    plans = [arm_plan(BASE, settings) for settings in read_recipe(path).values()]
    seen = {(str(one.config), one.top_p, one.min_p) for one in plans}
    assert len(seen) == len(plans) >= 4


def test_the_comparisons_of_the_paper_are_there():
    policies = read_recipe(next(path for path in RECIPES if path.stem == "policies"))
    configs = [arm_plan(BASE, settings).config for settings in policies.values()]
    assert {config.policy for config in configs} == set(POLICIES)
    assert {c.base_temp for c in configs if c.policy == "fixed"} == {0.6, 1.0}
    estimators = read_recipe(next(path for path in RECIPES if path.stem == "estimators"))
    assert {one["estimator"] for one in estimators.values()} == set(ESTIMATORS)
    names = {path.stem for path in RECIPES}
    assert {"t_low", "t_high", "window", "top_p", "min_p"} <= names


def test_an_arm_replaces_its_own_settings_only():
    arm = arm_plan(BASE, {"t_low": 0.3, "top_p": 0.9})
    assert (arm.config.t_low, arm.config.tau_0, arm.top_p) == (0.3, 0.55, 0.9)
    assert arm.task is BASE.task


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arms: [", "is not YAML"),
        ("- a", "two or more arms"),
        ("arms: {one: {}}", "two or more arms"),
        ("arms: {../up: {}, b: {}}", "needs a name of letters"),
        ("arms: {a: {}, b: 3}", "arm b is 3, need an object"),
        ("arms: {a: {}, b: {temperature: 1}}", r"arm b has unknown settings \['temperature'\]"),
    ],
)
def test_bad_recipes_are_refused(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_recipe(path)


def test_a_value_out_of_range_is_refused():
    with pytest.raises(ValueError, match="t_low must not exceed t_high"):
        arm_plan(BASE, {"t_low": 1.5})
