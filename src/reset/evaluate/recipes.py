"""Recipes: the arms of a comparison, each a few settings that replace those of the command.

A recipe is a YAML file:

    about: what it compares
    arms:            # in this order; the first is the baseline
      fixed-0.6: {policy: fixed, base_temp: 0.6}
      reset: {policy: reset}

Legal settings are the fields of `ReSETConfig`, top_p and min_p. Knows no engine and no task.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from reset.config import ReSETConfig
from reset.evaluate.runner import RunPlan

_PLAN_KEYS = ("top_p", "min_p")
_CONFIG_KEYS = tuple(field.name for field in fields(ReSETConfig))
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def read_recipe(path: Path) -> dict[str, dict[str, Any]]:
    """The arms of a recipe by name, in its order.

    Raises:
        ValueError: not YAML, no arms or only one, a name that cannot be a folder's, or an unknown
            setting.
        OSError: no such file.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not YAML ({error})") from error
    arms = content.get("arms") if isinstance(content, dict) else None
    if not isinstance(arms, dict) or len(arms) < 2:
        raise ValueError(f"{path}: need an object `arms` with two or more arms")
    legal = (*_CONFIG_KEYS, *_PLAN_KEYS)
    for name, settings in arms.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{path}: arm {name!r} needs a name of letters, digits, '.', '_', '-'")
        if not isinstance(settings, dict):
            raise ValueError(f"{path}: arm {name} is {settings!r}, need an object of settings")
        if unknown := [key for key in settings if key not in legal]:
            raise ValueError(
                f"{path}: arm {name} has unknown settings {unknown}; legal are {', '.join(legal)}"
            )
    return arms


def arm_plan(plan: RunPlan, settings: dict[str, Any]) -> RunPlan:
    """`plan` with the settings of an arm in place of its own.

    Raises:
        ValueError, TypeError: a value is out of range, or one that the policy needs is missing.
    """
    config = replace(plan.config, **{k: v for k, v in settings.items() if k in _CONFIG_KEYS})
    return replace(plan, config=config, **{k: v for k, v in settings.items() if k in _PLAN_KEYS})
