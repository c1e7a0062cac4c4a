"""The op of vLLM's layers on a GPU: paths, counts, CUDA graphs, torch.compile."""

from __future__ import annotations

import threading

import pytest
import torch

from nvfp4r import quantize
from nvfp4r.launches import required_facts
from nvfp4r.ops import linear
from nvfp4r.packed import pack
from nvfp4r.vllm.op import vllm_linear
from nvfp4r.vllm.record import record
from nvfp4r.vllm.settings import NO_LIMIT

pytestmark = pytest.mark.gpu

N, K = 384, 256
ABOVE_192 = "as the GPU has it above 192 tokens"


@pytest.fixture(autouse=True)
def fresh():
    record.cache_clear()
    yield
    record.cache_clear()


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    packed = pack(quantize(torch.randn(N, K, device="cuda")), "bf16")
    return packed.tiles, packed.alpha


def tokens(M: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(M)
    return torch.randn(M, K, device="cuda", generator=generator).bfloat16()


def run(layer, x: torch.Tensor, gemv_max_m: int = NO_LIMIT) -> torch.Tensor:
    return vllm_linear(x, *layer, None, None, N, K, "bf16", gemv_max_m)


@pytest.mark.parametrize(
    ("gemv_max_m", "counts"),
    [
        (NO_LIMIT, {"small": 2, "medium": 1, ABOVE_192: 1}),
        (64, {"small": 2, "medium": 1, "unpack": 1}),
        (8, {"small": 2, "unpack": 2}),
        (0, {"unpack": 4}),
    ],
)
def test_d6_traced_with_512_tokens_the_kernels_still_serve_few(layer, gemv_max_m, counts):
    compiled = torch.compile(lambda x: run(layer, x, gemv_max_m), fullgraph=True, dynamic=True)
    compiled(tokens(512))
    record().reset_counts()
    for M in (1, 8, 20, 200):
        assert torch.equal(compiled(tokens(M)), run(layer, tokens(M), gemv_max_m))
    seen = record().calls_by_path()
    above = "large" if required_facts(0).has_wgmma else "unpack"
    counts = {above if path == ABOVE_192 else path: count for path, count in counts.items()}
    assert seen == {path: 2 * count for path, count in counts.items()}  # compiled and not


@pytest.mark.parametrize("M", [1, 8, 40, 100, 300])
def test_a12_a_captured_graph_follows_the_weights(layer, M):
    tiles, alpha = (part.clone() for part in layer)
    x = tokens(M)
    run((tiles, alpha), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run((tiles, alpha), x)
    alpha.mul_(2)
    before = sum(record().calls_by_path().values())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * linear(x, *layer, None, None, N, K, "bf16"))
    assert sum(record().calls_by_path().values()) == before  # replays make no calls


def test_a_captured_graph_keeps_its_addresses_whatever_is_launched_after(layer):
    """Calls of the same sizes share all but the argument, which the driver copies."""
    x = tokens(300)
    expected = run(layer, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(layer, x)
    for _ in range(3):
        assert torch.equal(run(layer, 2 * x), 2 * expected)
    y.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


def test_threads_keep_to_their_streams_and_inputs(layer):
    expected = run(layer, tokens(300))
    inputs = {factor: factor * tokens(300) for factor in (1, 2, 4, 8)}
    torch.cuda.synchronize()
    right = []

    def work(factor: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [run(layer, inputs[factor]) for _ in range(50)]
            right.extend(torch.equal(y, factor * expected) for y in results)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 200
