"""What is recorded, how it is told, and the op that records it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from nvfp4r import quantize, status
from nvfp4r.ops import linear
from nvfp4r.packed import pack
from nvfp4r.plan import DeviceFacts
from nvfp4r.vllm.op import vllm_linear
from nvfp4r.vllm.record import LayerEntry, LayerShape, path_for, paths, record
from nvfp4r.vllm.settings import NO_LIMIT

H200 = DeviceFacts(132, 232_448, has_pdl=True, has_cluster=True, has_wgmma=True)
B200 = DeviceFacts(148, 232_448, has_pdl=True, has_cluster=True)
N, K = 24, 48


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    record.cache_clear()
    for name in ("NVFP4R", "NVFP4R_GEMV_MAX_M", "NVFP4R_ACTIVATIONS"):
        monkeypatch.delenv(name, raising=False)
    yield
    record.cache_clear()


@pytest.fixture
def layer():
    """(tiles, alpha, input scale) of a random matrix."""
    generator = torch.Generator().manual_seed(0)
    packed = pack(quantize(torch.randn(N, K, generator=generator)), "bf16")
    return packed.tiles, packed.alpha, torch.tensor(2.0**-6)


def activations(M: int) -> torch.Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()


@pytest.mark.parametrize("M", [1, 3, 8, 64, 65, 200])
@pytest.mark.parametrize("gemv_max_m", [0, 4, 64, NO_LIMIT])
@pytest.mark.parametrize("rounds", [False, True])
def test_the_op_computes_what_the_linear_op_does(layer, M, gemv_max_m, rounds):
    tiles, alpha, scale = layer
    scale = scale if rounds else None
    bias = torch.arange(N).bfloat16()
    x = activations(M)
    expected = linear(x, tiles, alpha, bias, scale, N, K, "bf16")
    found = vllm_linear(x, tiles, alpha, bias, scale, N, K, "bf16", gemv_max_m)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("M", [1, 8, 64, 100])
def test_a11_no_input_gives_the_bias_on_every_path(layer, M):
    tiles, alpha, _ = layer
    bias = torch.arange(1, N + 1).bfloat16()
    y = vllm_linear(torch.zeros(M, K).bfloat16(), tiles, alpha, bias, None, N, K, "bf16", 8)
    assert torch.equal(y, bias.expand(M, N))


def test_d6_the_choice_is_inside_the_op_whatever_m_it_was_traced_with(layer):
    tiles, alpha, _ = layer
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    @torch.compile(backend=keep, dynamic=True, fullgraph=True)
    def run(x):
        return vllm_linear(x, tiles, alpha, None, None, N, K, "bf16", 4) * 2

    run(activations(512))
    record().reset_counts()
    for M in (1 + 1, 8):  # 1 is always traced anew
        expected = 2 * linear(activations(M), tiles, alpha, None, None, N, K, "bf16")
        assert torch.equal(run(activations(M)), expected)
    assert len(graphs) == 1
    (seen,) = record().counts.values()
    assert (seen.calls, seen.smallest_m, seen.largest_m) == (2, 2, 8)


def test_no_tokens_give_no_rows_and_no_count(layer):
    tiles, alpha, _ = layer
    y = vllm_linear(activations(0), tiles, alpha, None, None, N, K, "bf16", 64)
    assert y.shape == (0, N)
    assert not record().counts


def ranges_of(shape: LayerShape, facts: DeviceFacts | None) -> list[tuple[int, int | None, str]]:
    return [(part.first, part.last, part.path) for part in paths(shape, facts)]


FEW = [(1, 8, "small"), (9, 32, "medium")]


@pytest.mark.parametrize(
    ("gpu", "gemv_max_m", "ranges"),
    [
        (H200, NO_LIMIT, [*FEW, (33, None, "large")]),
        (H200, 10**6, [*FEW, (33, 10**6, "large"), (10**6 + 1, None, "unpack")]),
        (H200, 193, [*FEW, (33, 193, "large"), (194, None, "unpack")]),
        (H200, 192, [*FEW, (33, 192, "large"), (193, None, "unpack")]),
        (H200, 64, [*FEW, (33, 64, "large"), (65, None, "unpack")]),
        (H200, 32, [*FEW, (33, None, "unpack")]),
        (H200, 20, [(1, 8, "small"), (9, 20, "medium"), (21, None, "unpack")]),
        (H200, 8, [(1, 8, "small"), (9, None, "unpack")]),
        (H200, 3, [(1, 3, "small"), (4, None, "unpack")]),
        (H200, 0, [(1, None, "unpack")]),
        (B200, NO_LIMIT, [(1, 8, "small"), (9, 192, "medium"), (193, None, "unpack")]),
        (B200, 1000, [(1, 8, "small"), (9, 192, "medium"), (193, None, "unpack")]),
        (B200, 64, [(1, 8, "small"), (9, 64, "medium"), (65, None, "unpack")]),
        (None, 64, [(1, None, "reference")]),
    ],
)
def test_d6_gemv_max_m_limits_what_the_kernels_serve(gpu, gemv_max_m, ranges):
    assert ranges_of(LayerShape(6144, 4096, "bf16", False, gemv_max_m), gpu) == ranges


def test_a_matrix_of_few_tiles_stays_with_linear_medium_up_to_64():
    ranges = [(1, 8, "small"), (9, 64, "medium"), (65, None, "large")]
    assert ranges_of(LayerShape(4096, 4096, "bf16", False, NO_LIMIT), H200) == ranges


@pytest.mark.parametrize("gpu", [H200, B200])
@pytest.mark.parametrize("gemv_max_m", [0, 12, 192, 5000, NO_LIMIT])
@pytest.mark.parametrize(("N", "K"), [(24, 48), (4096, 12288), (151_936, 5120)])
def test_the_ranges_are_the_paths_of_every_m(gpu, gemv_max_m, N, K):
    shape = LayerShape(N, K, "bf16", False, gemv_max_m)
    ranges = ranges_of(shape, gpu)
    for M in (*range(1, 260), 4999, 5000, 5001, 8192, 8193, 100_000, 1 << 24):
        (path,) = (p for first, last, p in ranges if first <= M <= (M if last is None else last))
        assert path == path_for(M, shape, gpu)[0], M


def entry(name: str, quantised: bool = False, global_scales: int = 1) -> LayerEntry:
    return LayerEntry(
        name=name,
        shape=LayerShape(6144, 4096, "bf16", quantised, NO_LIMIT if quantised else 64),
        dialect="modelopt",
        stored_activations="nvfp4",
        reason="because",
        architecture="sm_90a",
        facts=H200,
        global_scales=global_scales,
    )


def test_d4_status_tells_each_group_of_layers_with_paths_reasons_and_counts():
    layers = [nn.Module() for _ in range(4)]
    record().layers[layers[0]] = entry("model.layers.0.o_proj")
    record().layers[layers[1]] = entry("model.layers.1.o_proj", global_scales=3)
    record().layers[layers[2]] = entry("lm_head", quantised=True)
    record().declined[layers[3]] = "--linear-backend is marlin"
    record().count(entry("").shape, "small", 1)
    record().count(entry("").shape, "small", 8)

    found = status()
    plain, rounding = sorted(found.groups, key=lambda group: group.activations)
    assert plain.layers == ("model.layers.*.o_proj x 2",)
    assert (plain.N, plain.K, plain.dialect, plain.architecture) == (
        *(6144, 4096),
        *("modelopt", "sm_90a"),
    )
    assert (plain.activations, plain.activations_reason) == ("none", "because")
    assert plain.unequal_scales == 1
    assert [part.path for part in plain.paths] == ["small", "medium", "large", "unpack"]
    assert (plain.gemv_max_m, rounding.gemv_max_m) == (64, None)
    assert all(part.reason for part in plain.paths)
    assert (plain.calls["small"].calls, plain.calls["small"].largest_m) == (2, 8)
    assert (rounding.layers, rounding.activations, rounding.calls) == (("lm_head",), "nvfp4", {})
    assert found.calls == {"small": 2}
    assert found.declined == {"--linear-backend is marlin": 1}
    text = str(found)
    for part in (
        *("M 1-8 small, M 9-32 medium, M 33-64 large, M 65+ unpack;", "M 33+ large;"),
        *("gemv_max_m=None", "o_proj x 2", "--linear-backend is marlin"),
    ):
        assert part in text
    assert json.loads(json.dumps(found.as_dict()))["groups"][0]["N"] == 6144


def test_layers_leave_the_record_with_their_model():
    layer = nn.Module()
    record().layers[layer] = entry("a")
    assert len(status().groups) == 1
    del layer
    assert not status().groups


def test_counts_can_be_started_anew():
    record().count(entry("").shape, "small", 1)
    assert status(reset_counts=True).calls == {"small": 1}
    assert status().calls == {}


def test_status_says_that_there_is_nothing():
    assert "no NVFP4 layer has been built in this process" in str(status())
