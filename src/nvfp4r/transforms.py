"""Rotated inputs as compressed-tensors describes them: `transform_config` and its stored matrices.

A checkpoint whose quantised layers expect their inputs rotated says so with one transform of type
"hadamard" and block size 16, on the inputs of all quantised layers and, folded in already, on their
weights. Such a block is read into a `Transform` and written from one; every other transform is
refused by name. What a rotation computes is methods/rotation.py's business.

Source: the library's classes TransformConfig, TransformScheme and TransformArgs, 0.17 and 0.20. Its
matrix is H with entries 1 and -1, divided by 4 when it is applied: `hadamard16`, its own inverse,
so that `inverse` changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4r.format import BLOCK
from nvfp4r.groups import matches_any
from nvfp4r.methods.rotation import Rotation, hadamard16

KEY = "transform_config"

_GROUP = "hadamard16"  # what we call ours; part of the names of the stored matrices
_LINEAR = "Linear"
_LOCATIONS = ("input", "weight_input")
_PRECISIONS = tuple(f"torch.{name}" for name in ("float32", "float64", "bfloat16", "float16"))
_SUPPORTED = (
    f"supported is one transform, a hadamard of block size {BLOCK} on input and weight_input of "
    "all quantised layers; quantise the original model with reset-quantize"
)


@dataclass(frozen=True)
class Scope:
    """Layers that one side of a transform is applied to.

    Attributes:
        targets: "Linear" for all linear layers, names, or regular expressions after "re:".
        ignore: patterns for `groups.matches_any`.
    """

    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, module: str, is_linear: bool = True) -> bool:
        """Whether it applies to a layer of that name."""
        is_target = any(
            target == module
            or (target == _LINEAR and is_linear)
            or (target.startswith("re:") and re.match(target[3:], module) is not None)
            for target in self.targets
        )
        return is_target and _LINEAR not in self.ignore and not matches_any(module, self.ignore)


@dataclass(frozen=True)
class Transform:
    """A rotation of inputs along K, and the layers that it belongs to.

    Attributes:
        rotation: what is done to inputs, and has been done to the weights.
        group: the name of the transform, which its stored matrices carry.
        inputs: layers whose inputs are rotated.
        weights: layers whose stored weights are.
    """

    rotation: Rotation
    group: str
    inputs: Scope
    weights: Scope

    @property
    def submodule(self) -> str:
        """Below a layer, the module that holds the matrix of its inputs as `weight`."""
        return f"{self.group}_input"

    @property
    def named(self) -> tuple[str, ...]:
        """Targets that are names, of one layer each or of a class other than Linear."""
        targets = (*self.inputs.targets, *self.weights.targets)
        return tuple(t for t in targets if t != _LINEAR and not t.startswith("re:"))

    def covers(self, module: str, is_linear: bool = True) -> bool:
        """Whether the layer of that name has rotated weights and wants rotated inputs.

        Raises:
            ValueError: one of the two alone.
        """
        rotated = {
            "weight": self.weights.covers(module, is_linear),
            "input": self.inputs.covers(module, is_linear),
        }
        if len(set(rotated.values())) > 1:
            one, other = sorted(rotated, key=rotated.__getitem__, reverse=True)
            raise ValueError(
                f"{KEY} rotates the {one} of {module}, but not the {other}, so that the layer "
                f"would compute something else; {_SUPPORTED}"
            )
        return rotated["input"]


def parse_transforms(value: Any, where: str) -> Transform | None:
    """The rotation that a `transform_config` describes; None if it holds no transform.

    Args:
        value: content of the key, None if there is none.
        where: file and key, for errors.

    Raises:
        ValueError: anything but a rotation that layers here compute; names what it is.
    """
    if not value:
        return None
    groups = _entries(value, where, ("config_groups",)).get("config_groups")
    if not groups:
        return None
    if not isinstance(groups, dict) or len(groups) != 1:
        found = ", ".join(map(str, groups)) if isinstance(groups, dict) else repr(groups)
        raise ValueError(f"{where}: config_groups is {found}, need one transform; {_SUPPORTED}")
    ((group, scheme),) = groups.items()
    where = f"{where}: {group}"
    if not group or "." in group:
        raise ValueError(f"{where}: need a name without dots, which are part of tensor names")
    keys = ("type", "apply", "randomize", "requires_grad", "head_dim", "precision")
    scheme = _entries(scheme, where, keys)
    for key, allowed in (
        ("type", ("hadamard",)),
        ("head_dim", (BLOCK,)),
        ("randomize", (False, None)),
        ("requires_grad", (False, None)),  # learned, so not a Hadamard matrix any more
        ("precision", (*_PRECISIONS, None)),  # of the sums; here they are float32
    ):
        if scheme.get(key) not in allowed:
            raise ValueError(
                f"{where}: {key} is {scheme.get(key)!r}, need {allowed[0]!r}; {_SUPPORTED}"
            )
    scopes = _scopes(scheme.get("apply"), where)
    return Transform("hadamard16", group, scopes["input"], scopes["weight_input"])


def _scopes(apply: Any, where: str) -> dict[str, Scope]:
    """The layers by location; both locations, each once."""
    if not isinstance(apply, list):
        raise ValueError(f"{where}: apply is {apply!r}, need a list; {_SUPPORTED}")
    scopes: dict[str, Scope] = {}
    for entry in apply:
        entry = _entries(entry, f"{where}.apply", ("targets", "location", "inverse", "ignore"))
        location = entry.get("location")
        if location not in _LOCATIONS or location in scopes:
            raise ValueError(
                f"{where}: apply has location {location!r}{' twice' * (location in scopes)}, need "
                f"{' and '.join(_LOCATIONS)}, each once; {_SUPPORTED}"
            )
        if not isinstance(entry.get("inverse", False), bool):
            raise ValueError(f"{where}: inverse is {entry['inverse']!r}, need true or false")
        targets = _names(entry, "targets", where)
        if not targets:
            raise ValueError(f"{where}: targets of {location} is empty, need layers; {_SUPPORTED}")
        scopes[location] = Scope(targets, _names(entry, "ignore", where))
    for location in _LOCATIONS:
        if location not in scopes:
            raise ValueError(
                f"{where}: apply has no location {location!r}, so that weights and inputs would "
                f"not belong together; {_SUPPORTED}"
            )
    return scopes


def _entries(value: Any, where: str, allowed: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: got {type(value).__name__}, need a JSON object; {_SUPPORTED}")
    for key in value:
        if key not in allowed:
            raise ValueError(f"{where}: {key} is not known here; {_SUPPORTED}")
    return value


def _names(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    """A list of names, or one name; regular expressions are checked."""
    value = entry.get(key)
    names = [value] if isinstance(value, str) else ([] if value is None else value)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: {key} is {value!r}, need a list of names")
    try:
        matches_any("", names)
    except ValueError as error:
        raise ValueError(f"{where}: {key}: {error}") from None
    return tuple(names)


def transform_block(rotation: Rotation, targets: Iterable[str], ignore: Iterable[str]) -> Any:
    """The `transform_config` of a checkpoint whose quantised layers are rotated.

    Args:
        rotation: see methods/rotation.py.
        targets, ignore: as in the quantisation block, so that both mean the same layers.

    Raises:
        ValueError: a rotation that the format has no words for.
    """
    if rotation != "hadamard16":
        raise ValueError(f"rotation is {rotation!r}, need 'hadamard16'")
    scope = {"targets": list(targets), "ignore": list(ignore)}
    return {
        "config_groups": {
            _GROUP: {
                "type": "hadamard",
                "apply": [
                    {**scope, "location": "input", "inverse": False},
                    {**scope, "location": "weight_input", "inverse": True},
                ],
                "randomize": False,
                "requires_grad": False,
                "head_dim": BLOCK,
                "precision": "torch.float32",
            }
        }
    }


def stored_matrix(module: str) -> dict[str, Tensor]:
    """The matrix that goes with a rotated layer, by its name in the file.

    Layers here need none, but some engines multiply with what is stored. It is not yet divided by
    the square root of its size.
    """
    return {f"{module}.{_GROUP}_input.weight": _signs(torch.bfloat16)}


def is_stored_matrix(tensor: Tensor) -> bool:
    """Whether a stored matrix is the Hadamard matrix, so that `rotate` does what it says."""
    return tensor.shape == (BLOCK, BLOCK) and torch.equal(
        tensor.cpu().double(), _signs(torch.float64)
    )


def _signs(dtype: torch.dtype) -> Tensor:
    return hadamard16(torch.float64).sign().to(dtype)
