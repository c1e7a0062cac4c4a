"""Round-to-nearest quantisers for weights and activations, and the choice of the global scale.

The rounding is defined in docs/format.md and spelled out again, slowly, in reference.py; this
module and rounding.py give the same bits fast, on any device, with temporaries of a few MiB. It
knows nothing about checkpoints, about which layers share a scale (groups.py), about calibration
data or about better ways to choose scales and codes (methods/).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nvfp4r.format import BLOCK, E2M1_MAX, E4M3_MAX, NVFP4Tensor, e2m1_table, row_chunks
from nvfp4r.rounding import blocks_of, e4m3_bounds, round_blocks

_log = logging.getLogger(__name__)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SMALLEST_GLOBAL_SCALE = 2.0**-126  # normal, and its reciprocal is finite
_SATURATION = 464.0  # halfway from 448 to 480, which E4M3 does not have; the tie goes down

RowRounder = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rows [R, K], global_scale [], `e4m3_bounds`) -> codes [16, B], block scale bytes [B]; uint8."""


def global_scale_from_amax(
    amax: float | Tensor,
    name: str = "tensor",
    headroom: float = 1.0,
    *,
    top_scale: float = E4M3_MAX,
) -> Tensor:
    """The global scale under which `amax * headroom` is the largest value that fits.

    That is `amax * headroom / 2688`, moved by at most one unit in the last place to a value that is
    *reciprocal-exact*: a float32 divisor exists whose float32 reciprocal is this multiplier
    (`divisor_for`), so a checkpoint holds the same matrix in either dialect.

    Nothing can be derived from `amax == 0` (no data, or only zeros): the scale is then 1.0 and a
    warning names the tensor. Otherwise the result is at least 2**-126.

    Args:
        amax: largest magnitude, one number, finite and >= 0.
        name: what errors and the warning call the tensor.
        headroom: room above `amax` for values that calibration did not see, >= 1.
        top_scale: block scale that `amax * headroom` gets, for methods that need larger ones as
            well; the largest there is by default, and 2688 is 6 times that.

    Returns:
        float32 [] on the CPU, finite and > 0.

    Raises:
        ValueError: `amax` is negative, NaN, infinite or not one number; `headroom` is below 1 or
            not finite; the product does not fit float32.
    """
    if isinstance(amax, Tensor) and amax.numel() != 1:
        raise ValueError(f"{name}: amax has shape {list(amax.shape)}, need one number")
    value = float(amax)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(
            f"{name}: amax is {value}, need a finite number >= 0; look for NaN or inf in the data"
        )
    if not (math.isfinite(headroom) and headroom >= 1):
        raise ValueError(f"{name}: headroom is {headroom}, need a finite factor >= 1")
    if value * headroom > torch.finfo(torch.float32).max:
        raise ValueError(
            f"{name}: amax {value} with headroom {headroom} exceeds float32; lower the headroom"
        )
    if value == 0:
        _log.warning("%s: the largest magnitude is 0; its global scale is set to 1.0", name)
        return torch.tensor(1.0)
    wanted = max(value * headroom / (E2M1_MAX * top_scale), _SMALLEST_GLOBAL_SCALE)
    divisor = 1.0 / torch.tensor(wanted, dtype=torch.float32)
    return 1.0 / divisor


def divisor_for(global_scale: Tensor) -> Tensor | None:
    """The float32 divisor whose float32 reciprocal is exactly this multiplier, if there is one.

    About one float32 value in six has none; results of `global_scale_from_amax` always have one.

    Args:
        global_scale: float32 [], finite and > 0.

    Returns:
        float32 [] or None. Of several divisors, the one with the fewest significant bits: a round
        one, such as 3584, survives reading and writing.

    Raises:
        TypeError: not a float32 tensor.
        ValueError: not one number, or zero, negative, NaN or infinite.
    """
    _require_scale(global_scale, "divisor_for", "global_scale", check_value=True)
    nearest = 1.0 / global_scale
    limits = torch.tensor([0.0, math.inf]).to(nearest.device)
    divisors = torch.cat((nearest.view(1), torch.nextafter(nearest, limits)))
    divisors = divisors[1.0 / divisors == global_scale]
    if divisors.numel() == 0:
        return None
    bits = divisors.view(torch.int32)
    return divisors[(bits & -bits).argmax()]  # the largest lowest set bit


def quantize(
    weight: Tensor, *, global_scale: Tensor | None = None, name: str = "weight"
) -> NVFP4Tensor:
    """Rounds a weight matrix to NVFP4: nearest value, ties to the even code, saturating.

    It minimises nothing and sees no activations. With a given `global_scale` below amax/2688 the
    largest weights saturate; that is not reported.

    Args:
        weight: [N, K] bfloat16, float16 or float32, K a multiple of 16, finite.
        global_scale: float32 [], the scale to use, for layers that share one; by default the
            `global_scale_from_amax` of this matrix.
        name: what errors call the tensor.

    Returns:
        The quantised matrix on the device of `weight`.

    Raises:
        TypeError: `weight` or `global_scale` is no tensor, or of another dtype.
        ValueError: wrong number of dimensions; empty; K not a multiple of 16; NaN or inf in the
            weight (how many, and where the first is); `global_scale` not one number, zero,
            negative, NaN or infinite.
    """
    amax = check_weight(weight, global_scale, name)
    if global_scale is None:
        global_scale = global_scale_from_amax(amax, name)
    return quantize_rows(weight, global_scale, _round_rows)


def check_weight(weight: Tensor, global_scale: Tensor | None, name: str) -> float:
    """Raises what `quantize` says; returns the largest magnitude of `weight`."""
    _require_floats(weight, name)
    if weight.ndim != 2 or weight.numel() == 0:
        raise ValueError(f"{name}: got shape {list(weight.shape)}, need [N, K], not empty")
    if global_scale is not None:
        _require_scale(global_scale, name, "global_scale", check_value=True)
    return _finite_amax(weight.detach(), name)


def quantize_rows(weight: Tensor, global_scale: Tensor, round_rows: RowRounder) -> NVFP4Tensor:
    """Quantises a checked matrix in chunks of rows, so that temporaries stay small.

    Args:
        weight: [N, K], see `check_weight`.
        global_scale: float32 [] on any device.
        round_rows: makes codes and block scales of a chunk; see `RowRounder`.
    """
    weight = weight.detach()
    N, K = weight.shape
    global_scale = _moved(global_scale.detach(), weight.device)
    codes = torch.empty((N, K // 2), dtype=torch.uint8, device=weight.device)
    scale_bytes = torch.empty((N, K // BLOCK), dtype=torch.uint8, device=weight.device)
    bounds = e4m3_bounds(weight.device)
    for rows in row_chunks(N, K, weight.device):
        block_codes, block_bytes = round_rows(weight[rows], global_scale, bounds)
        packed = block_codes[0::2] | (block_codes[1::2] << 4)  # [8, blocks]
        codes[rows] = packed.t().reshape(-1, K // 2)
        scale_bytes[rows] = block_bytes.view(-1, K // BLOCK)
    return NVFP4Tensor(codes, scale_bytes.view(torch.float8_e4m3fn), global_scale)


def _round_rows(rows: Tensor, global_scale: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale_bytes, _ = round_blocks(blocks_of(rows), global_scale, bounds)
    return codes, scale_bytes


def quantize_activations(x: Tensor, input_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds activations to NVFP4 under a static scale and gives them back as ordinary numbers.

    This emulates the activation side of a W4A4 layer; the rounding is that of `quantize`. Nothing
    waits for the device, so bad values are not refused but stay visible: a block with a NaN or an
    infinity, and everything under an invalid `input_scale` on an accelerator, becomes NaN.

    Args:
        x: [..., K] bfloat16, float16 or float32, K a multiple of 16.
        input_scale: float32 [], the global scale of the activations, > 0.

    Returns:
        values: [..., K] float32, `e2m1 * e4m3` *without* `input_scale`, at most 2688 and exactly
            representable in float16.
        saturated_blocks: int64 [], how many blocks are too large for `input_scale`: their scale
            before rounding is above 464, so they were clipped.

    Raises:
        TypeError: `x` or `input_scale` is no tensor, or of another dtype.
        ValueError: K not a multiple of 16; `input_scale` not one number or, where it can be read
            without waiting (on the CPU), zero, negative, NaN or infinite.
    """
    check_activations(x, input_scale)
    K = x.shape[-1]
    rows_of_x = x.detach().reshape(-1, K)
    input_scale = _moved(input_scale.detach(), x.device)
    valid = torch.isfinite(input_scale) & (input_scale > 0)
    saturated = torch.zeros((), dtype=torch.int64, device=x.device)
    values = torch.empty(rows_of_x.shape, dtype=torch.float32, device=x.device)
    table, bounds = e2m1_table(x.device), e4m3_bounds(x.device)
    for rows in row_chunks(rows_of_x.shape[0], K, x.device):
        codes, scale_bytes, unrounded = round_blocks(
            blocks_of(rows_of_x[rows]), input_scale, bounds
        )
        scale = scale_bytes.view(torch.float8_e4m3fn).float()
        scale = torch.where(torch.isfinite(unrounded) & valid, scale, math.nan)
        values[rows] = (table[codes.int()] * scale).t().reshape(-1, K)
        saturated += (unrounded > _SATURATION).sum()
    return values.view(x.shape), saturated


def check_activations(x: Tensor, input_scale: Tensor) -> None:
    """Raises what `quantize_activations` says; does not wait for a device."""
    _require_floats(x, "activations")
    on_cpu = isinstance(input_scale, Tensor) and input_scale.device.type == "cpu"
    _require_scale(input_scale, "activations", "input_scale", check_value=on_cpu)


def _require_floats(tensor: Tensor, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got a {type(tensor).__name__}, need a torch.Tensor")
    if tensor.dtype not in _FLOATS:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, need bfloat16, float16 or float32")
    if tensor.ndim == 0 or tensor.shape[-1] == 0 or tensor.shape[-1] % BLOCK:
        raise ValueError(
            f"{name}: got shape {list(tensor.shape)}, need a last dimension that is a multiple of "
            f"{BLOCK}; leave this layer unquantised"
        )


def _require_scale(scale: Tensor, name: str, field: str, *, check_value: bool) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}: {field} is a {type(scale).__name__}, need a float32 tensor")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: {field} has dtype {scale.dtype}, need torch.float32")
    if scale.ndim != 0:
        raise ValueError(f"{name}: {field} has shape {list(scale.shape)}, need [] (one number)")
    if check_value and not (math.isfinite(float(scale)) and float(scale) > 0):
        raise ValueError(
            f"{name}: {field} is {float(scale)}, need a finite multiplier > 0; "
            "derive it with global_scale_from_amax"
        )


def _moved(scale: Tensor, device: torch.device) -> Tensor:
    """`scale` on `device`. Only a copy to the host must be waited for."""
    return scale.to(device, non_blocking=device.type != "cpu")


def _finite_amax(weight: Tensor, name: str) -> float:
    """Largest magnitude; refuses NaN and inf. Only here does quantising wait for the device."""
    low, high = torch.stack(torch.aminmax(weight)).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = torch.nonzero(~torch.isfinite(weight))
        raise ValueError(
            f"{name}: {bad.shape[0]} of {weight.numel()} weights are NaN or infinite, the first at "
            f"[row, column] {bad[0].tolist()}; need finite weights, check the source checkpoint"
        )
    return max(-low, high)
