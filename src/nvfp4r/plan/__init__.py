"""Which kernel multiplies which shape, and how its work is shared: plain data and rules.

Launches nothing and asks no GPU. `choose_plan` is the rule; small, medium and large.py hold what
was measured for each kernel, tuned.py what `nvfp4r bench --tune` has found for one GPU.
"""

from nvfp4r.plan.choose import (
    TILE_BYTES,
    TILE_COLUMNS,
    TILE_ROWS,
    TOKEN_RANGES,
    DeviceFacts,
    Plan,
    Split,
    choose_plan,
    even_shared_bytes,
    in_passes,
    passes_for,
    plan_with,
    token_range,
)
from nvfp4r.plan.large import LargeSplit
from nvfp4r.plan.medium import MediumSplit
from nvfp4r.plan.small import SmallSplit

__all__ = [
    "TILE_BYTES",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "TOKEN_RANGES",
    "DeviceFacts",
    "LargeSplit",
    "MediumSplit",
    "Plan",
    "SmallSplit",
    "Split",
    "choose_plan",
    "even_shared_bytes",
    "in_passes",
    "passes_for",
    "plan_with",
    "token_range",
]
