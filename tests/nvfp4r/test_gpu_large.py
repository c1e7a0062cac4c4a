"""On a CUDA GPU: products for more than 32 tokens against float64, and the bits of linear_large.

    make test-gpu

What goes through `linear` holds on every GPU; what asks for linear_large itself needs compute
capability 9.0. layer_truth.py says how far off a sum may be, and why that holds for `wgmma`.
"""

from __future__ import annotations

import pytest
import torch

from nvfp4r.launches import required_facts, run_plan, run_prologue
from nvfp4r.ops import gemm, linear
from nvfp4r.plan import choose_plan, plan_with
from nvfp4r.plan.large import LARGE_HELD, LargeSplit
from tests.nvfp4r.layer_truth import MODES, layer_truth, random_layer, random_x

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16]
TOKENS = [33, 64, 65, 66, 127, 128, 129, 200, 257, 384, 511, 1024, 1025, 4097]
TALL = (4299, 5120)  # more row tiles than two for every SM of an H200, the last with 11 rows
SHAPES = [(7, 16), (8, 80), (1001, 80), (1000, 3696), TALL]


@pytest.fixture
def facts():
    facts = required_facts(0)
    if not facts.has_wgmma:
        pytest.skip("linear_large is built for compute capability 9.0")
    return facts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("N", "K"), SHAPES)
def test_many_tokens(N, K, mode, dtype):
    """Within the bound, and the same bits again."""
    weight, layer = random_layer(N, K, dtype, mode)
    for M in TOKENS:
        x = random_x(M, K, dtype)
        y = linear(x, *layer)
        excess = layer_truth(x, weight, layer).excess(y)
        assert excess <= 1, f"{M} tokens: {excess:.2f} times the bound"
        assert torch.equal(linear(x, *layer), y), f"{M} tokens: other bits"


@pytest.mark.parametrize("mode", ["W4A16", "rotated W4A4"])
def test_a_large_shape(mode):
    weight, layer = random_layer(4096, 12288, torch.bfloat16, mode)
    for M in (33, 64, 128, 129, 1024):
        x = random_x(M, 12288, torch.bfloat16)
        assert layer_truth(x, weight, layer).excess(linear(x, *layer)) <= 1


def test_the_fused_matrices_of_a_large_model():
    """More parts than a GPU has SMs, so that every CTA takes several units after each other."""
    weight, layer = random_layer(34816, 1024, torch.bfloat16)
    for M in (64, 128, 300):
        x = random_x(M, 1024, torch.bfloat16)
        assert layer_truth(x, weight, layer).excess(linear(x, *layer)) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_unpacking_agrees_within_both_bounds(mode, dtype):
    weight, layer = random_layer(1000, 3696, dtype, mode)
    x = random_x(300, 3696, dtype)
    truth, one, other = layer_truth(x, weight, layer), linear(x, *layer), gemm(x, *layer)
    assert truth.excess(one) <= 1
    assert truth.excess(other) <= 1
    assert bool(((one.double() - other.double()).abs() <= 2 * truth.limit).all())


def ring(variant: tuple[int, int, int], shared_bytes: int) -> tuple[int, int] | None:
    """Stages of weights and of x that such a kernel has room for."""
    groups, held, cluster = variant
    for depth, x_depth in ((3, 6), (2, 5), (2, 4), (1, 4), (1, 3), (1, 2)):
        split = LargeSplit(groups, held, 1, cluster, 1, depth, x_depth)
        if split.shared_bytes <= shared_bytes:
            return depth, x_depth
    return None


SHARED_BYTES = 232_448  # of a CTA where linear_large is built
VARIANTS = [
    variant
    for groups, helds in LARGE_HELD.items()
    for held in helds
    for cluster in (1, 2, 4, 8)
    if ring(variant := (groups, held, cluster), SHARED_BYTES)
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_and_cluster(facts, variant, dtype):
    """63 row tiles, the last with an odd number of rows; 15 chunks of K, the last of them short; a
    unit of tokens that is not full, alone and after a full one. All kernels with so many CTAs in a
    cluster add in one order, whatever the units and whoever takes them."""
    N, K, tiles = 1001, 3696, 63
    groups, held, cluster = variant
    depth, x_depth = ring(variant, SHARED_BYTES)
    weight, layer = random_layer(N, K, dtype)
    fewest = -(-tiles // (8 * held))
    for M in (8 * groups - 3, 8 * groups + 9):
        x = random_x(M, K, dtype)
        simple = LargeSplit(8, 1, tiles, cluster, 8, 2, 4)
        expected = run_plan(planned(simple, M, layer, facts), x, layer)
        assert layer_truth(x, weight, layer).excess(expected) <= 1
        for units in (fewest, fewest + 5):
            for clusters in (1, 3, 40):  # fewer than units of work, and more
                split = LargeSplit(groups, held, units, cluster, clusters, depth, x_depth)
                y = run_plan(planned(split, M, layer, facts), x, layer)
                assert torch.equal(y, expected), f"{split}, {M} tokens"


def planned(split, M, layer, facts):
    return plan_with(split, M, layer.N, layer.K, layer.order, facts, layer.prepares, reason="")


@pytest.mark.parametrize("depths", [(1, 2), (1, 4), (2, 5), (3, 3)])
@pytest.mark.parametrize(("groups", "held"), [(8, 2), (16, 1), (32, 1)])
def test_rings_of_any_depth_give_the_same_bits(facts, groups, held, depths):
    """58 stages of x and three units after each other."""
    _, layer = random_layer(1001, 3696, torch.bfloat16)
    for M in (3, 8 * groups):
        x = random_x(M, 3696, torch.bfloat16)
        expected = run_plan(planned(LargeSplit(8, 1, 63, 1, 8, 2, 4), M, layer, facts), x, layer)
        split = LargeSplit(groups, held, 9, 1, 3, *depths)
        plan = planned(split, M, layer, facts)
        for _ in range(20):
            assert torch.equal(run_plan(plan, x, layer), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [16, 64, 256, 272])
@pytest.mark.parametrize(
    "split",
    [
        LargeSplit(8, 1, 2, 8, 1, 2, 4),
        LargeSplit(16, 1, 2, 8, 1, 1, 4),
    ],
    ids=["8", "16"],
)
def test_blocks_without_a_part_of_k(facts, split, K, dtype):
    """Eight CTAs share what is enough for one or two."""
    weight, layer = random_layer(40, K, dtype)
    for M in (1, 9, 50):
        x = random_x(M, K, dtype)
        y = run_plan(planned(split, M, layer, facts), x, layer)
        assert layer_truth(x, weight, layer).excess(y) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["W4A4", "rotated", "rotated W4A4"])
@pytest.mark.parametrize("M", [33, 65, 257])
@pytest.mark.parametrize(("N", "K"), [(1001, 208), TALL])
def test_x_prepared_on_its_way_is_x_prepared_before_bit_for_bit(facts, N, K, M, mode, dtype):
    _, layer = random_layer(N, K, dtype, mode)
    x = random_x(M, K, dtype)
    plan = choose_plan(M, N, K, layer.order, facts, quantised=True)
    before = run_prologue(x, layer.input_scale, facts, rotation=layer.rotation)
    assert torch.equal(run_plan(plan, x, layer), run_plan(plan, before, layer, prepared=True))


SMALL, WIDE = (1000, 3696), (5136, 8464)  # the second has linear_large from 33 tokens on
RANGES = [
    (SMALL, (33, 34, 40, 48)),
    (SMALL, (49, 50, 56, 64)),
    (SMALL, (65, 66, 96, 127, 128)),
    (SMALL, (129, 192, 193, 256)),
    (SMALL, (257, 384, 385, 1000, 1025, 4097)),
    (WIDE, (33, 34, 48, 49, 63, 64)),
    (WIDE, (65, 66, 96, 127, 128)),
    (WIDE, (129, 192, 193, 256)),
    (WIDE, (257, 384, 385, 1000, 1025)),
    (TALL, (33, 34, 48, 49, 63, 64)),
    (TALL, (65, 66, 96, 127, 128)),
    (TALL, (129, 192, 193, 256)),
]


@pytest.mark.parametrize("mode", ["W4A16", "rotated W4A4"])
@pytest.mark.parametrize(("shape", "tokens"), RANGES)
def test_k7_a_row_does_not_depend_on_its_neighbours(facts, shape, tokens, mode):
    """Within a range of tokens; all above 256 are one."""
    N, K = shape
    _, layer = random_layer(N, K, torch.bfloat16, mode)
    x = random_x(tokens[-1], K, torch.bfloat16)
    together = linear(x, *layer)
    for M in tokens[:-1]:
        assert torch.equal(linear(x[:M], *layer), together[:M]), M
        assert torch.equal(linear(x[-M:], *layer), together[-M:]), M


@pytest.mark.parametrize("mode", ["W4A16", "W4A4"])
@pytest.mark.parametrize("M", [33, 65, 129, 200, 257, 1025])
@pytest.mark.parametrize(("N", "K"), [(7, 16), (8, 16), (1001, 80), (1000, 192), TALL])
def test_every_output_is_written_and_nothing_beside_it(facts, N, K, M, mode):
    """Guard rows around y, and NaN in y before."""
    _, layer = random_layer(N, K, torch.bfloat16, mode)
    x = random_x(M, K, torch.bfloat16)
    buffer = torch.full((M + 4, N), float("nan"), dtype=torch.bfloat16, device="cuda")
    plan = choose_plan(M, N, K, "bf16", facts, layer.prepares)
    run_plan(plan, x, layer, out=buffer[2:-2])
    written = ~buffer.isnan()
    assert bool(written[2:-2].all())
    assert not bool(written[:2].any() or written[-2:].any())


@pytest.mark.parametrize("M", [33, 65, 129, 300])
def test_rows_beyond_n_do_not_matter(M):
    """Codes and scales where a tile has rows that the matrix does not have."""
    _, full = random_layer(1008, 208, torch.bfloat16)
    fewer = full._replace(alpha=full.alpha[:1001].clone(), bias=full.bias[:1001].clone(), N=1001)
    x = random_x(M, 208, torch.bfloat16)
    assert torch.equal(linear(x, *fewer), linear(x, *full)[:, :1001])


@pytest.mark.parametrize("M", [33, 65, 129, 300, 1025])
@pytest.mark.parametrize(("N", "K"), [(24, 48), TALL])
def test_a7_nothing_is_read_from_padding(N, K, M):
    """Memory that held NaN before: the arranged x, y, and shared memory of a kernel before."""
    weight, layer = random_layer(N, K, torch.bfloat16)
    x = random_x(M, K, torch.bfloat16)
    nan = torch.full((M, K), float("nan"), dtype=torch.bfloat16, device="cuda")
    linear(nan, *layer)
    poison = torch.full((1 << 22,), float("nan"), device="cuda")
    del nan, poison
    assert layer_truth(x, weight, layer).excess(linear(x, *layer)) <= 1


@pytest.mark.parametrize("M", [40, 100, 300])
@pytest.mark.parametrize(("N", "K"), [(1001, 208), TALL])
def test_a_bad_row_stays_alone(N, K, M):
    _, layer = random_layer(N, K, torch.bfloat16)
    x = random_x(M, K, torch.bfloat16)
    expected = linear(x, *layer)
    x[5, 17], x[M - 1, 200] = float("nan"), float("nan")
    y = linear(x, *layer)
    bad = torch.zeros(M, dtype=torch.bool, device="cuda")
    bad[[5, M - 1]] = True
    assert bool(y[bad].isnan().all())
    assert torch.equal(y[~bad], expected[~bad])


@pytest.mark.parametrize("mode", ["W4A16", "rotated W4A4"])
def test_more_tokens_than_a_launch_takes(facts, mode):
    N, K, M = 40, 80, 8200
    weight, layer = random_layer(N, K, torch.bfloat16, mode)
    x = random_x(M, K, torch.bfloat16)
    assert choose_plan(M, N, K, "bf16", facts, layer.prepares).passes == 2
    y = linear(x, *layer)
    assert layer_truth(x, weight, layer).excess(y) <= 1
    assert torch.equal(y, torch.cat([linear(part, *layer) for part in x.split(1000)]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("M", "N", "K"), [(64, 1000, 3696), (512, 1000, 3696), (64, *TALL)])
def test_graph_replay_sees_new_activations(M, N, K, mode):
    """The arranged x is a buffer of the graph; every replay fills it anew."""
    _, layer = random_layer(N, K, torch.bfloat16, mode)
    first, second = random_x(M, K, torch.bfloat16), random_x(M, K, torch.bfloat16).flip(0)
    expected = [linear(x, *layer) for x in (first, second)]
    x = first.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, *layer)
        again = linear(x, *layer)  # starts its prologue while the one before still runs
    for _ in range(50):
        for source, wanted in zip((first, second), expected, strict=True):
            x.copy_(source)
            graph.replay()
            assert torch.equal(y, wanted)
            assert torch.equal(again, wanted)


@pytest.mark.parametrize(("N", "K"), [(40, 80), TALL])
def test_x_that_starts_between_16_bytes(N, K):
    weight, layer = random_layer(N, K, torch.bfloat16)
    x = random_x(101, K, torch.bfloat16)
    shifted = torch.zeros(101 * K + 1, dtype=x.dtype, device="cuda")[1:].view(101, K).copy_(x)
    assert torch.equal(linear(shifted, *layer), linear(x, *layer))
    assert layer_truth(x, weight, layer).excess(linear(shifted, *layer)) <= 1


def test_packing_in_place_is_seen_by_a_graph():
    """Weights are read ahead of the kernel before; a copy into them has to be over by then."""
    _, layer = random_layer(1000, 1024, torch.bfloat16)
    x = random_x(300, 1024, torch.bfloat16)
    other = layer.tiles.flip(0).contiguous()
    expected = [linear(x, *layer), linear(x, *layer._replace(tiles=other))]
    tiles = layer.tiles.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x, *layer._replace(tiles=tiles))
    for _ in range(20):
        for source, wanted in zip((layer.tiles, other), expected, strict=True):
            tiles.copy_(source)
            graph.replay()
            assert torch.equal(y, wanted)
