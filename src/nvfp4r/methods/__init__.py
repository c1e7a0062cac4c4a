"""The ways to choose codes and scales for a weight, by name.

Every method ends in the same format, so that readers need not know which one was used; only a
rotation changes what a layer has to do with its inputs. This module lists them and computes
nothing. What each is worth is in docs/quantisation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nvfp4r.methods.rotation import Rotation


@dataclass(frozen=True)
class Method:
    """A way to quantise weights.

    Attributes:
        name: as users write it.
        summary: one clause for a help text.
        calibrated: whether it runs the model over texts; the others look at the weights alone.
        rotation: what is done to weights and inputs along K before they are quantised.
    """

    name: str
    summary: str
    calibrated: bool = False
    rotation: Rotation | None = None


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method("rtn", "round to nearest, ties to even"),
            Method("four-over-six", "round to nearest, each block scaled to 6 or to 4"),
            Method("brq", "round to nearest after a rotation", rotation="hadamard16"),
            Method("gptq", "second-order rounding on calibration data", calibrated=True),
            Method("mr-gptq", "gptq after a rotation", calibrated=True, rotation="hadamard16"),
            Method("awq", "scales channels by their activations", calibrated=True),
        )
    }
)
"""All methods, in the order in which they are listed to users."""


def check_method(name: str) -> Method:
    """The method of that name.

    Raises:
        ValueError: there is none; the message names all.
    """
    if name not in METHODS:
        raise ValueError(f"method is {name!r}, need one of {', '.join(METHODS)}")
    return METHODS[name]
