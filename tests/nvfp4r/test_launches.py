"""A whole call on GPUs that are not there: what reaches the driver, and what is found only once."""

from __future__ import annotations

import threading

import pytest
import torch

from nvfp4r import launches
from nvfp4r.launches import Layer
from nvfp4r.ops import multiply
from nvfp4r.plan import choose_plan, even_shared_bytes
from tests.nvfp4r.fake_gpu import H200, fake_gpus, on_gpu

N, K = 40, 144  # 3 x 2 tiles


@pytest.fixture
def gpus(monkeypatch):
    with fake_gpus(monkeypatch) as found:
        yield found


def layer_on(index: int, bias: bool = False, scale: bool = False) -> Layer:
    tiles = on_gpu(torch.zeros(3, 2, 1152, dtype=torch.uint8), index)
    alpha = on_gpu(torch.ones(N), index)
    return Layer(
        tiles,
        alpha,
        on_gpu(torch.zeros(N).bfloat16(), index) if bias else None,
        on_gpu(torch.tensor(0.01), index) if scale else None,
        *(N, K, "bf16"),
    )


def tokens(M: int, index: int = 0) -> torch.Tensor:
    return on_gpu(torch.zeros(M, K).bfloat16(), index)


@pytest.mark.parametrize(("bias", "scale"), [(False, False), (True, True)])
def test_linear_large_is_given_all_addresses_and_sizes(gpus, bias, scale):
    layer, x = layer_on(0, bias, scale), tokens(300)
    y, path = multiply(x, layer)
    plan = choose_plan(300, N, K, "bf16", H200, scale)
    assert (path, y.shape, y.dtype) == ("large", (300, N), torch.bfloat16)
    assert gpus.kernels == [plan.kernel, "arrange_bf16"]
    (_, first, of_arrange), (_, second, of_product) = gpus.launched
    scale_at = layer.input_scale.data_ptr() if scale else 0
    x_at, arranged_at, *others = launches._ARRANGE.unpack(of_arrange)
    assert (x_at, *others) == (x.data_ptr(), scale_at, 300, K, 2 * scale)
    assert launches._LARGE.unpack(of_product) == (
        layer.tiles.data_ptr(),
        arranged_at,
        y.data_ptr(),
        layer.alpha.data_ptr(),
        layer.bias.data_ptr() if bias else 0,
        scale_at,
        *(300, N, K, 3, 2, plan.depth, plan.x_depth, plan.split.row_units),
    )
    assert (first.gridDimX, first.blockDimX, first.numAttrs) == (15, 256, 1)  # 3 * 38 * 32 threads
    assert (second.gridDimX, second.blockDimX) == (plan.grid, plan.threads)
    assert second.sharedMemBytes == plan.shared_bytes
    assert {int(seen.hStream) for _, seen, _ in gpus.launched} == {0x70}


@pytest.mark.parametrize(("M", "path"), [(1, "small"), (40, "medium")])
def test_the_other_kernels_are_given_all_addresses_and_sizes(gpus, M, path):
    layer, x = layer_on(0, bias=True), tokens(M)
    y, taken = multiply(x, layer)
    plan = choose_plan(M, N, K, "bf16", H200)
    assert taken == plan.path == path
    ((_, _, argument),) = gpus.launched
    assert launches._LINEAR.unpack(argument) == (
        *(layer.tiles.data_ptr(), x.data_ptr(), y.data_ptr()),
        *(layer.alpha.data_ptr(), layer.bias.data_ptr(), 0),
        *(M, N, K, 3, 2, plan.depth, plan.x_depth, 0),
    )


@pytest.mark.parametrize("late", [False, True])
def test_only_a_kernel_that_starts_among_others_is_spread_evenly(gpus, late):
    gpus.late_trigger = late
    multiply(tokens(1), layer_on(0))
    plan = choose_plan(1, N, K, "bf16", H200)
    even = even_shared_bytes(plan, H200)
    assert even > plan.shared_bytes
    assert gpus.launched[0][1].sharedMemBytes == (even if late else plan.shared_bytes)


def test_what_depends_on_sizes_alone_is_found_once(gpus):
    for layer in (layer_on(0), layer_on(0, bias=True)):  # two layers of one shape
        for M in (300, 400, 300):
            multiply(tokens(M), layer)
    configurations = [id(seen) for _, seen, _ in gpus.launched]
    assert len(configurations) == 12
    assert configurations[:2] == configurations[4:6] == configurations[6:8]
    assert len(gpus.kernels) == 2 * 2  # for 300 and for 400
    ms = [launches._LARGE.unpack(argument)[6] for *_, argument in gpus.launched[1::2]]
    assert ms == [300, 400, 300] * 2


def test_a_plan_that_prepares_x_is_not_taken_for_one_that_does_not(gpus):
    """Same kernel, grid and sizes; only what is done to x differs."""
    for scale in (False, True, False):
        multiply(tokens(300), layer_on(0, scale=scale))
    left = [launches._ARRANGE.unpack(argument)[-1] for *_, argument in gpus.launched[::2]]
    assert left == [0, 2, 0]


def test_each_device_gets_its_own_kernels_and_is_made_current(gpus):
    for index in (0, 1, 0):
        multiply(tokens(300, index), layer_on(index))
    assert [device for device, *_ in gpus.launched] == [0, 0, 1, 1, 0, 0]
    streams = [int(seen.hStream) for _, seen, _ in gpus.launched]
    assert streams == [0x70, 0x70, 0x71, 0x71, 0x70, 0x70]
    assert gpus.current_device() == 0


def test_threads_keep_their_streams_and_arguments(gpus):
    """Every launch is on the stream of the thread whose x it reads."""
    layer, calls, start = layer_on(0), 200, threading.Barrier(4)

    def work(stream: int) -> None:
        gpus.thread.stream = stream
        x = kept[stream]
        start.wait()
        for _ in range(calls):
            multiply(x, layer)

    kept = {stream: tokens(300) for stream in (0x10, 0x20, 0x30, 0x40)}
    stream_of = {x.data_ptr(): stream for stream, x in kept.items()}
    threads = [threading.Thread(target=work, args=(stream,)) for stream in kept]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    arrangements = [seen for seen in gpus.launched if len(seen[2]) == launches._ARRANGE.size]
    assert len(arrangements) == len(gpus.launched) / 2 == 4 * calls
    for _, configuration, argument in arrangements:
        assert stream_of[launches._ARRANGE.unpack(argument)[0]] == int(configuration.hStream)
    streams = [int(seen.hStream) for _, seen, _ in gpus.launched]
    assert {stream: streams.count(stream) for stream in kept} == dict.fromkeys(kept, 2 * calls)
