"""Kernels and the dense path on a GPU against float64 (nvfp4r.reference), from one token on.

test_gpu_large.py has more of more tokens.

Bound: products are exact, so the error of a sum is that of K float32 additions, truncated rather
than rounded in the tensor core: at most K * 2^-23 of sum |terms|, in practice far less; then one
rounding to the output dtype, 2^-8 (bfloat16) or 2^-11 (float16) relative, and alpha's product in
float32. Checked per element against 2^-8 |y| + K 2^-23 sum |terms| (2^-11 for float16).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nvfp4r import quantize
from nvfp4r.format import NVFP4Tensor
from nvfp4r.launches import Layer, device_facts, run_plan
from nvfp4r.ops import linear
from nvfp4r.packed import pack, pack_
from nvfp4r.plan import choose_plan
from nvfp4r.quantize import quantize_activations
from nvfp4r.reference import dequantize

pytestmark = pytest.mark.gpu
ORDERS = {"bf16": torch.bfloat16, "f16": torch.float16}
SHAPES = [
    (8, 16),
    (24, 48),
    (1000, 64),
    (1024, 192),
    (8, 448),
    (24, 3696),
    (4096, 256),
    (1024, 5120),
]


def random_weight(N: int, K: int, seed: int = 0) -> NVFP4Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    scale_bytes = torch.randint(1, 127, (N, K // 16), generator=generator, dtype=torch.uint8)
    alpha = torch.rand(N, generator=generator) * 1e-3 + 1e-4
    return NVFP4Tensor(codes, scale_bytes.view(torch.float8_e4m3fn), alpha)


def scaled(weight: NVFP4Tensor, factor: torch.Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(weight.codes, weight.block_scale, weight.global_scale * factor)


def rough(M: int, K: int) -> torch.Tensor:
    """Blocks of very different size, and zero blocks."""
    generator = torch.Generator().manual_seed(M + K)
    x = torch.randn(M, K // 16, 16, generator=generator)
    x *= 10.0 ** torch.randint(-3, 2, (M, K // 16, 1), generator=generator)
    x[:, ::5] *= (torch.rand(M, 1, 1, generator=generator) < 0.5).float()
    return x.view(M, K)


def run(weight: NVFP4Tensor, x: torch.Tensor, bias=None, input_scale=None) -> torch.Tensor:
    order = "bf16" if x.dtype == torch.bfloat16 else "f16"
    packed = pack(weight.to("cuda"), order)
    move = lambda t: None if t is None else t.cuda()  # noqa: E731
    args = (packed.tiles, packed.alpha, move(bias), move(input_scale), packed.N, packed.K, order)
    return linear(x.cuda(), *args)


def assert_close(y: torch.Tensor, x: torch.Tensor, weight: NVFP4Tensor, bias=None) -> None:
    w, x64 = dequantize(weight), x.double().cpu()
    truth, magnitude = x64 @ w.T, x64.abs() @ w.abs().T
    if bias is not None:
        truth = truth + bias.double()
        magnitude = magnitude + bias.double().abs()
    rounding = 2**-8 if x.dtype == torch.bfloat16 else 2**-11
    limit = rounding * truth.abs() + x.shape[-1] * 2**-23 * magnitude + 2**-24
    error = (y.double().cpu() - truth).abs()
    assert bool((error <= limit).all()), f"worst excess {(error / limit).max().item():.2f}"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_k9_shapes_and_every_m(order, N, K):
    weight = random_weight(N, K)
    generator = torch.Generator().manual_seed(1)
    for M in (*range(1, 18), 32, 33, 48, 49, 64, 65, 200):
        x = torch.randn(M, K, generator=generator).to(ORDERS[order])
        assert_close(run(weight, x), x, weight)


@pytest.mark.parametrize("K", [4096, 12288, 17408, 25600])
def test_k9_long_rows(K):
    weight = random_weight(256, K)
    for M in (1, 8, 16, 32, 64):
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()
        assert_close(run(weight, x), x, weight)


def extreme_weight(kind: str, N: int, K: int) -> NVFP4Tensor:
    """Matrices at the ends of the format: 2^-9 must not vanish, 6 * 448 not overflow."""
    codes = random_weight(N, K).codes
    scale_bytes = torch.full((N, K // 16), 0x38, dtype=torch.uint8)  # 1.0
    if kind == "all 6 under 448":
        codes, scale_bytes = torch.full_like(codes, 0x77), torch.full_like(scale_bytes, 0x7E)
    elif kind == "scales of 2^-9":
        scale_bytes = torch.full_like(scale_bytes, 0x01)
    elif kind == "zero blocks":
        codes.view(N, K // 16, 8)[:, ::2] = 0
        scale_bytes[:, ::4] = 0  # of them
    return NVFP4Tensor(codes, scale_bytes.view(torch.float8_e4m3fn), torch.tensor(1e-3))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["all 6 under 448", "scales of 2^-9", "zero blocks"])
def test_k3_k8_the_ends_of_the_format(kind, order):
    weight = extreme_weight(kind, 40, 448)
    generator = torch.Generator().manual_seed(0)
    for M in (1, 8, 9, 32, 64, 65, 129):
        x = torch.randn(M, 448, generator=generator)
        x[0] = 0
        x = x.to(ORDERS[order])
        y = run(weight, x)
        assert_close(y, x, weight)
        assert bool((y[0] == 0).all())


@pytest.mark.parametrize("order", ORDERS)
def test_one_hot_rows_read_columns_out_exactly(order):
    """All codes times all scales: column k of the matrix is the output, exactly representable."""
    scales = torch.arange(1, 127, dtype=torch.uint8).repeat(2)[:128, None].expand(128, 16)
    codes = (torch.arange(16, dtype=torch.uint8) * 17).repeat_interleave(8).expand(128, 128)
    scale = scales.contiguous().view(torch.float8_e4m3fn)
    weight = NVFP4Tensor(codes.contiguous(), scale, torch.tensor(1.0))
    one_hot = torch.eye(256)[::17].to(ORDERS[order])  # 16 rows, one in each block of 16
    expected = dequantize(weight)[:, ::17].T
    for repeats in (1, 2, 4, 5, 9, 20):  # 16, 32, 64, 80, 144 and 320 tokens: every path
        x = one_hot.repeat(repeats, 1)
        assert torch.equal(run(weight, x).double().cpu(), expected.repeat(repeats, 1))
    for row in range(0, 16, 8):
        y = run(weight, one_hot[row : row + 8]).double().cpu()
        assert torch.equal(y, expected[row : row + 8])


@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e4, 1e6])
def test_bf16_range(magnitude):
    weight = quantize(torch.randn(64, 512, generator=torch.Generator().manual_seed(0)))
    for M in (4, 12, 40, 70, 200):
        generator = torch.Generator().manual_seed(1)
        x = (torch.randn(M, 512, generator=generator) * magnitude).bfloat16()
        x[1, 77] *= 1e4  # an outlier channel
        x[2] = 0
        y = run(weight, x)
        assert_close(y, x, weight)
        assert bool((y[2] == 0).all())


def test_a2_rows_keep_their_own_global_scale():
    base = quantize(torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))
    gate = NVFP4Tensor(base.codes, base.block_scale, torch.tensor(3.85e-5))
    up = NVFP4Tensor(base.codes, base.block_scale, torch.tensor(4.83e-5))
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = run(NVFP4Tensor.fuse([gate, up]), x).double().cpu()[0]
    assert ((y[16:] / y[:16]).median() - 1.2545).abs() < 2**-7  # two bf16 roundings


def test_a7_nothing_is_read_from_padding():
    """K = 48: ones everywhere give 48.0 for every M, whatever memory held before."""
    ones = NVFP4Tensor(
        torch.full((8, 24), 0x22, dtype=torch.uint8),
        torch.full((8, 3), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.tensor(1.0),
    )
    for M in (*range(1, 18), 33, 64, 65, 129, 300):
        poison = torch.full((1 << 20,), float("nan"), device="cuda")
        del poison
        assert bool((run(ones, torch.ones(M, 48).bfloat16()) == 48.0).all())


def test_a11_bias_in_every_path():
    weight = random_weight(40, 64)
    bias = torch.arange(1, 41).bfloat16()
    for M in (1, 8, 9, 64, 65, 129):
        assert torch.equal(
            run(weight, torch.zeros(M, 64).bfloat16(), bias).cpu(), bias.expand(M, -1)
        )


def test_k4_alpha_comes_before_the_cast():
    codes = torch.full((16, 2048), 0x77, dtype=torch.uint8)
    scale = torch.full((16, 256), 0x58, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 16
    weight = NVFP4Tensor(codes, scale, torch.tensor(1e-3))
    y = run(weight, torch.full((1, 4096), 96.0).half())
    assert y[0].tolist() == pytest.approx([37748.7] * 16, rel=5e-3)


@pytest.mark.parametrize(("first", "last"), [(1, 2), (3, 8)])
def test_k7_a_row_does_not_depend_on_its_neighbours(first, last):
    """Nor on how many there are, of those that share a plan."""
    weight = random_weight(1024, 5120)
    x = torch.randn(last, 5120, generator=torch.Generator().manual_seed(0)).bfloat16()
    together = run(weight, x)
    for M in range(first, last):
        assert torch.equal(run(weight, x[:M]), together[:M])
        assert torch.equal(run(weight, x[-M:]), together[-M:])


@pytest.mark.parametrize("largest", [16, 32, 48, 64])
def test_k7_within_a_plan_for_more_tokens(largest):
    weight = random_weight(1024, 5120)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(largest, 5120, generator=generator).bfloat16()
    together = run(weight, x)
    for M in (largest - 7, largest - 1):
        assert torch.equal(run(weight, x[-M:]), together[-M:])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("K", [16, 208, 4096])
@pytest.mark.parametrize("M", [1, 3, 8, 9, 16, 40, 64, 100])
def test_w4a4_is_the_product_with_quantised_activations_bit_for_bit(M, K, order):
    """By the kernel or by one before; then the same numbers are added in the same order."""
    weight = random_weight(264, K)
    x = rough(M, K).to(ORDERS[order])
    scale = (x.float().abs().max() / 2688).float()
    values, _ = quantize_activations(x, scale)
    y = run(weight, x, input_scale=scale)
    assert_close(y, values.to(x.dtype), scaled(weight, scale))
    same_order = run(scaled(weight, scale), values.to(x.dtype))
    # alpha * scale is rounded before it meets the sum in one and after in the other.
    assert_close(same_order, values.to(x.dtype), scaled(weight, scale))
    one = NVFP4Tensor(weight.codes, weight.block_scale, torch.tensor(1.0))
    half = torch.tensor(0.5)  # a power of two: no rounding at all
    exact, _ = quantize_activations(x, half)
    y = run(one, x, input_scale=half)
    packed = pack(scaled(one, half).to("cuda"), order)
    layer = Layer(packed.tiles, packed.alpha, None, None, 264, K, order)
    # The plan of the op above; what it would prepare is prepared already.
    plan = choose_plan(M, 264, K, order, device_facts(0), quantised=True)
    assert torch.equal(y, run_plan(plan, exact.to(x.dtype).cuda(), layer))


def test_quantised_activations_with_bad_values_become_nan():
    x = torch.ones(12, 64).bfloat16()
    x[3, 20], x[9, 40] = float("nan"), float("inf")
    for M in (4, 12):
        y = run(random_weight(40, 64), x[:M], input_scale=torch.tensor(0.01))
        assert y.isnan().any(dim=1).nonzero().flatten().tolist() == [3, 9][: 1 + (M > 9)]


@pytest.mark.parametrize("order", ORDERS)
def test_every_plan_for_a_shape_gives_the_same_within_the_bound(order):
    """Shapes whose plans share K over 1, 2, 4 and 8 CTAs, with uneven shares and row tiles."""
    for N, K in ((5136, 8464), (10248, 1552), (40, 8464)):
        weight = random_weight(N, K)
        for M in (16, 32, 64):
            x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(ORDERS[order])
            assert_close(run(weight, x), x, weight)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("M", [33, 40, 48, 49, 64, 65, 130, 192])
@pytest.mark.parametrize(("N", "K"), [(8, 16), (24, 3696), (1000, 64), (5136, 1552)])
def test_more_than_32_tokens_without_the_kernel_for_them(N, K, M, order):
    """linear_medium, in passes above 64: what GPUs take that have no wgmma."""
    weight = random_weight(N, K)
    packed = pack(weight.to("cuda"), order)
    layer = Layer(packed.tiles, packed.alpha, None, None, N, K, order)
    plan = choose_plan(M, N, K, order, replace(device_facts(0), has_wgmma=False))
    assert (plan.path, plan.passes) == ("medium", -(-M // 64))
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).to(ORDERS[order])
    assert_close(run_plan(plan, x.cuda(), layer), x, weight)


@pytest.mark.parametrize("M", [1, 8, 9, 16, 33, 64])
@pytest.mark.parametrize(("N", "K"), [(8, 16), (24, 48), (1000, 192)])
def test_every_output_is_written_and_nothing_beside_it(M, N, K):
    """Guard rows around y, and NaN in y before."""
    packed = pack(random_weight(N, K).to("cuda"), "bf16")
    layer = Layer(packed.tiles, packed.alpha, None, None, N, K, "bf16")
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    buffer = torch.full((M + 2, N), float("nan"), dtype=torch.bfloat16, device="cuda")
    run_plan(choose_plan(M, N, K, "bf16", device_facts(0)), x, layer, out=buffer[1:-1])
    written = ~buffer.isnan()
    assert bool(written[1:-1].all())
    assert not bool(written[0].any() or written[-1].any())


@pytest.mark.parametrize("M", [1, 12, 64, 512])
def test_a12_reload_in_place_and_graph_replay_under_pdl(M):
    """1,000 replays of a chain that reuses its buffers are bitwise equal; new weights are seen."""
    first, second = random_weight(4096, 4096, 1), random_weight(4096, 4096, 2)
    packed = pack(first.to("cuda"), "bf16")
    x = torch.randn(M, 4096, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    args = (None, None, 4096, 4096, "bf16")

    def chain() -> torch.Tensor:
        y = linear(x, packed.tiles, packed.alpha, *args)
        return linear(y * 1e-2, packed.tiles, packed.alpha, *args)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    graph.replay()
    expected = captured.clone()
    for _ in range(1000):
        graph.replay()
        assert torch.equal(captured, expected)
    pack_(packed, second.to("cuda"))
    graph.replay()
    fresh = pack(second.to("cuda"), "bf16")
    y = linear(x, fresh.tiles, fresh.alpha, *args)
    assert torch.equal(captured, linear(y * 1e-2, fresh.tiles, fresh.alpha, *args))


def test_a_second_stream_and_torch_compile():
    weight = random_weight(256, 512)
    packed = pack(weight.to("cuda"), "bf16")
    x = torch.randn(2, 512, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    args = (packed.tiles, packed.alpha, None, None, 256, 512, "bf16")
    expected = linear(x, *args)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        other = linear(x, *args)
    stream.synchronize()
    assert torch.equal(other, expected)
    compiled = torch.compile(lambda t: linear(t, *args), fullgraph=True)
    assert torch.equal(compiled(x), expected)
    wide = torch.randn(100, 512, device="cuda").bfloat16()
    assert torch.equal(compiled(wide), linear(wide, *args))  # D6: the branch is inside the op
