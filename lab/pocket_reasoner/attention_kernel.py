"""A Triton kernel for `attention.attend`; importing this needs Triton.

One program per row and key-value head. It walks over the row's cells, a block at a time, and stops
at the row's own position: what lies behind it is not read. Each lane of the block (cells
lane, lane + BLOCK, ...) keeps a softmax of its own, online as in Milakov and Gimelshein
(arXiv:1805.02867), so that threads meet only once, after the last block, when the lanes are merged.
A program writes its own result alone and in a fixed order of additions: the same every time,
whatever the other rows are.

Products are plain multiplications: 2 x d numbers are read per cell for a few queries, which would
leave most of a tensor core's tile empty.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

# For groups of two with d = 64: a thread keeps 64 sums, in 168 registers on sm_90, so that six
# programs fit a multiprocessor; three blocks of each are on their way from memory meanwhile.
BLOCK = 32  # cells
WARPS = 2
STAGES = 4
_LOG2_E = 1.4426950408889634


@triton.jit
def attend_kernel(
    q,  # [B, KV, GROUP, D]
    keys,  # [B, KV, length, D]
    values,  # [B, KV, length, D]
    position,  # [B]
    y,  # [B, KV, GROUP, D]
    length,
    scale,  # of the scores, times log2(e)
    KV: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # power of two >= GROUP
    D: tl.constexpr,
    D_PAD: tl.constexpr,  # power of two >= D
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (B * KV)."""
    program = tl.program_id(0)
    last = tl.load(position + program // KV).to(tl.int32)
    member = tl.arange(0, GROUP_PAD)[:, None]
    channel = tl.arange(0, D_PAD)[None, :]
    query_at = program * (GROUP * D) + member * D + channel
    real = (member < GROUP) & (channel < D)
    # Two dimensions here, so that the layout of the blocks below comes from reading them alone.
    query = tl.load(q + query_at, mask=real, other=0.0).to(tl.float32) * scale
    query = query[:, None, :]
    lane = tl.arange(0, BLOCK)[None, :, None]
    channel = tl.arange(0, D_PAD)[None, None, :]
    first = program.to(tl.int64) * length * D
    cell_at = lane * D + channel  # [1, BLOCK, D_PAD]

    # Of each lane: largest score, sum of weights relative to it, sum of weighted values.
    top = tl.full((GROUP_PAD, BLOCK, 1), -float("inf"), tl.float32)
    total = tl.zeros((GROUP_PAD, BLOCK, 1), tl.float32)
    weighted = tl.zeros((GROUP_PAD, BLOCK, D_PAD), tl.float32)
    for start in tl.range(0, last + 1, BLOCK, num_stages=STAGES):
        seen = start + lane <= last
        inside = seen & (channel < D)
        at = first + start * D + cell_at
        key = tl.load(keys + at, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(query * key, 2, keep_dims=True)  # [GROUP_PAD, BLOCK, 1]
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(top, score)
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that saw no cell yet
        kept = tl.exp2(top - base)
        weight = tl.exp2(score - base)
        total = total * kept + weight
        weighted = weighted * kept + weight * value
        top = higher

    share = tl.exp2(top - tl.max(top, 1, keep_dims=True))
    result = tl.sum(weighted * share, 1) / tl.sum(total * share, 1)  # [GROUP_PAD, D_PAD]
    tl.store(y + query_at, result.to(y.dtype.element_ty), mask=real)


def attend_seen(
    q: Tensor, keys: Tensor, values: Tensor, position: Tensor, scaling: float
) -> Tensor:
    """`attention.attend` by the kernel. Float32 all the way; only the result is rounded.

    Raises:
        ValueError: the cells do not lie as `attention.new_cells` makes them on a GPU.
    """
    rows, kv_heads, length, head_dim = values.shape
    if not (keys.mT.is_contiguous() and values.is_contiguous()):
        raise ValueError(
            f"keys have strides {keys.stride()}, values {values.stride()}; the kernel needs each "
            "cell's numbers side by side, cells one after another: make both with new_cells"
        )
    group = q.shape[1] // kv_heads
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    arguments = (
        *(q.contiguous(), keys, values, position.contiguous(), y),
        *(length, scaling * _LOG2_E),
        *(kv_heads, group, triton.next_power_of_2(group)),
        *(head_dim, triton.next_power_of_2(head_dim), BLOCK, STAGES),
    )
    grid = (rows * kv_heads,)
    options = {"num_warps": WARPS, "enable_fp_fusion": True}
    if q.device.type == "cuda" and torch.cuda.current_device() != q.device.index:
        with torch.cuda.device(q.device):  # Triton launches on the current device
            attend_kernel[grid](*arguments, **options)
    else:
        attend_kernel[grid](*arguments, **options)
    return y
