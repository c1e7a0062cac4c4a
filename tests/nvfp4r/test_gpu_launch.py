"""The JIT on a real GPU: loading, launching, graphs, clusters, programmatic dependent launch."""

import struct
import threading

import pytest
import torch

from nvfp4r.jit import (
    compile_cubin,
    load_cubin,
    load_module,
    resources,
    target_for,
    target_named,
)
from nvfp4r.jit.driver import check, cuda_driver
from tests.nvfp4r import jit_samples as samples
from tests.nvfp4r.launching import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = 0
SPIN_NS = 10_000_000  # far longer than it takes to launch a successor


@pytest.fixture(scope="module")
def target():
    return target_for(torch.cuda.get_device_capability(DEVICE))


@pytest.fixture(scope="module")
def cubin(target):
    return compile_cubin(target, samples.SOURCES, samples.ENTRY)


@pytest.fixture(scope="module")
def module(target, cubin):
    torch.cuda.set_device(DEVICE)
    return load_cubin(DEVICE, cubin.data, target)


@pytest.fixture
def cluster_module(module):
    if not module.target.has_cluster:
        pytest.skip(f"{module.target.sm} has no clusters")
    return module


@pytest.fixture
def pdl_module(module):
    if not module.target.has_pdl:
        pytest.skip(f"{module.target.sm} has no programmatic dependent launch")
    return module


def stream():
    return torch.cuda.current_stream().cuda_stream


def ramp(n, dtype=torch.float32):
    return torch.arange(n, dtype=dtype, device="cuda")


def scale(module, out, x, factor, **launch):
    argument = samples.scale_args(out.data_ptr(), x.data_ptr(), factor, x.numel())
    blocks = -(-x.numel() // 256)
    settings = {"grid": (blocks, 1, 1), "block": 256, "stream": stream(), **launch}
    launch(module.kernel("scale"), argument, **settings)


def test_a_kernel_writes_its_output_and_nothing_else(module):
    x, out = ramp(1000), torch.full((1002,), float("nan"), device="cuda")
    scale(module, out[1:-1], x, 3.0)
    assert torch.equal(out[1:-1], 3 * x)
    assert out[[0, -1]].isnan().all()


def test_the_matrix_instruction_sees_what_was_copied(module):
    # a[g, :] = g + 1 and b[:, n] = n, in the order of fragments: see the PTX manual, m16n8k16.
    lane = torch.arange(32)
    rows = torch.stack((lane // 4, lane // 4 + 8, lane // 4, lane // 4 + 8), 1) + 1
    a = rows.half().repeat_interleave(2, 1).contiguous().cuda()  # [32, 8] halves
    b = (lane // 4).half().view(32, 1).expand(32, 4).contiguous().cuda()
    d = torch.full((32, 4), float("nan"), device="cuda")
    argument = samples.tile_args(a.data_ptr(), b.data_ptr(), d.data_ptr())
    launch(module.kernel("tile"), argument, grid=(1, 1, 1), block=32, stream=stream())
    columns = torch.stack((lane % 4 * 2, lane % 4 * 2 + 1) * 2, 1)
    rows = torch.stack((lane // 4, lane // 4, lane // 4 + 8, lane // 4 + 8), 1) + 1
    assert torch.equal(d.cpu(), (16 * rows * columns).float())


def test_the_matrix_instruction_of_a_warpgroup_sees_registers_and_shared_memory(module):
    """The offsets of its descriptor are those of docs/layout.md, section 7."""
    if not module.target.has_wgmma:
        pytest.skip(f"{module.target.sm} has no matrix instruction of a warpgroup")
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (64, 16), generator=generator).half()
    b = torch.randint(-8, 9, (16, 16), generator=generator).half()  # [k, column]
    # Thread 32 w + 4 g + t holds rows 16 w + g and 8 further, columns 2 t .. and 8 further.
    registers = a.view(4, 2, 8, 2, 4, 2).permute(0, 2, 4, 3, 1, 5).contiguous().cuda()
    # [group of 8 columns][half of k][column][k], and what is not read until the next group.
    memory = torch.full((2, 8, 8, 8), float("nan")).half()
    memory[:, :2] = b.view(2, 8, 2, 8).permute(2, 0, 3, 1)
    memory = memory.cuda()
    d = torch.full((4, 8, 4, 2, 2, 2), float("nan"), device="cuda")
    argument = samples.tile_args(registers.data_ptr(), memory.data_ptr(), d.data_ptr())
    launch(module.kernel("group_tile"), argument, grid=(1, 1, 1), block=128, stream=stream())
    # [w, g, t, group, row 8 further, column] -> [w, row 8 further, g, group, t, column]
    product = d.permute(0, 4, 1, 3, 2, 5).reshape(64, 16).cpu()
    assert torch.equal(product, a.float() @ b.float())


def test_the_driver_agrees_with_the_compiler_report(module, cubin):
    driver = cuda_driver()
    kinds = driver.CUfunction_attribute
    report = resources(cubin)
    assert set(report) == set(module.names)
    for name, used in report.items():
        handle = module.kernel(name).handle
        told = [
            check(driver, driver.cuFuncGetAttribute(kind, handle))
            for kind in (
                kinds.CU_FUNC_ATTRIBUTE_NUM_REGS,
                kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                kinds.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            )
        ]
        assert told == [used.registers, used.static_shared_bytes, used.stack_bytes], name
        assert module.kernel(name).static_shared_bytes == used.static_shared_bytes


def test_the_table_of_targets_agrees_with_this_gpu(target):
    properties = torch.cuda.get_device_properties(DEVICE)
    assert target.shared_bytes_per_block == properties.shared_memory_per_block_optin
    assert target.shared_bytes_per_sm == properties.shared_memory_per_multiprocessor


def test_all_shared_memory_of_a_block_can_be_used(module, target):
    words = target.shared_bytes_per_block // 4
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    launch(
        module.kernel("last_word"),
        samples.last_word_args(out.data_ptr(), words),
        grid=(3, 1, 1),
        block=32,
        stream=stream(),
        shared_bytes=4 * words,
    )
    assert out.tolist() == [0, 1000, 2000]


def test_occupancy_follows_shared_memory(module, target):
    kernel = module.kernel("last_word")
    quarter = target.shared_bytes_per_sm // 4 - 1024
    assert kernel.blocks_per_sm(block=32, shared_bytes=quarter) == 4
    assert kernel.blocks_per_sm(block=32, shared_bytes=quarter + 1024) == 3


def test_graph_capture_and_replay(module):
    x, out = ramp(5000), torch.zeros(5000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale(module, out, x, 2.0)
        scale(module, out, out, 0.5)
        scale(module, out, out, 3.0)
    assert not out.any()  # captured, not run
    for factor in (1, 10, 100):
        x.copy_(factor * ramp(5000))
        graph.replay()
        assert torch.equal(out, 3 * x)


def test_nothing_is_loaded_during_a_capture(module, target, cubin):
    x = ramp(10)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(RuntimeError, match=r"is being captured; call nvfp4r\.jit\.load_mod"):
            load_cubin(DEVICE, cubin.data, target)
        x.add_(1)  # so that the graph is not empty


def test_work_stays_in_the_order_of_its_stream(module):
    side = torch.cuda.Stream()
    x, out = ramp(1 << 20), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        x.mul_(2)
        scale(module, out, x, 1.0)  # would see the old x on any other stream
    side.synchronize()
    assert torch.equal(out, 2 * ramp(1 << 20))


def test_a_thread_that_has_not_used_cuda_can_launch(module):
    x, out = ramp(1000), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    handle, failures = stream(), []

    def work():
        try:
            scale(module, out, x, 2.0, stream=handle)
        except (RuntimeError, ValueError) as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert torch.equal(out, 2 * x)


def test_blocks_of_a_cluster_read_each_other(cluster_module):
    kernel = cluster_module.kernel("exchange")
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    launch(
        kernel,
        samples.exchange_args(out.data_ptr()),
        grid=(64, 1, 1),
        block=64,
        stream=stream(),
        cluster=2,
    )
    block = torch.arange(64)
    assert out.cpu().tolist() == (100 + (block ^ 1)).tolist()
    assert kernel.max_active_clusters(block=64, cluster=2) > 1


def test_clusters_survive_capture(cluster_module):
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(
            cluster_module.kernel("exchange"),
            samples.exchange_args(out.data_ptr()),
            grid=(8, 1, 1),
            block=64,
            stream=stream(),
            cluster=2,
        )
    graph.replay()
    assert out.tolist() == [101, 100, 103, 102, 105, 104, 107, 106]


def test_bulk_copies_arrive(module):
    if not module.target.has_bulk_copy:
        pytest.skip(f"{module.target.sm} has no bulk copies")
    x, out = ramp(128, torch.int32), torch.zeros(128, dtype=torch.int32, device="cuda")
    launch(
        module.kernel("bulk"),
        samples.bulk_args(x.data_ptr(), out.data_ptr()),
        grid=(1, 1, 1),
        block=128,
        stream=stream(),
    )
    assert torch.equal(out, x)


def stamps(module, *, pdl):
    """Start and end, in ns, of a block that runs 10 ms, and of its successor on the stream."""
    times = torch.zeros(2, 2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for row, successor in ((0, False), (1, pdl)):
        launch(
            module.kernel("stamp"),
            samples.stamp_args(times[row].data_ptr(), SPIN_NS),
            grid=(1, 1, 1),
            block=32,
            stream=stream(),
            pdl=successor,
        )
    return times.tolist()


def test_pdl_lets_the_successor_start_early(pdl_module):
    (_, end), (start, _) = stamps(pdl_module, pdl=True)
    assert start < end
    (_, end), (start, _) = stamps(pdl_module, pdl=False)
    assert start >= end


@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_a_chain_with_pdl_keeps_its_order(pdl_module, captured):
    n, steps = 1000, 50
    buffers = torch.zeros(2, n, dtype=torch.int32, device="cuda")
    kernel = pdl_module.kernel("step")

    def chain():
        for index in range(steps):
            x, out = buffers[index % 2], buffers[1 - index % 2]
            launch(
                kernel,
                samples.step_args(x.data_ptr(), out.data_ptr(), n, 5000),
                grid=(-(-n // 128), 1, 1),
                block=128,
                stream=stream(),
                pdl=True,
            )

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        chain = graph.replay
    for repeat in range(1, 21):
        chain()
        assert (buffers[0] == steps * repeat).all()  # steps is even: the chain ends in buffer 0


def test_the_driver_refuses_what_the_gpu_cannot_do(module):
    # 1024 threads of a kernel that is bounded to 256 of them.
    x = ramp(10)
    with pytest.raises(RuntimeError, match=r"^kernel scale was not launched: CUDA_ERROR_.*sm_"):
        scale(module, x, x, 1.0, block=1024)
    torch.cuda.synchronize()  # the context is not harmed
    scale(module, x, x, 2.0)
    assert torch.equal(x, 2 * ramp(10))


def test_an_argument_of_another_layout_is_refused(module):
    x = ramp(10)
    argument = struct.pack("@PPf", x.data_ptr(), x.data_ptr(), 1.0)
    with pytest.raises(ValueError, match="kernel scale: got an argument of 20 bytes, need 24"):
        launch(module.kernel("scale"), argument, grid=(1, 1, 1), block=32, stream=stream())


def test_d1_code_for_another_gpu_is_refused(target):
    other = target_named("90a" if not target.name.startswith("90") else "100a")
    cubin = compile_cubin(other, samples.SOURCES, samples.ENTRY)
    with pytest.raises(RuntimeError, match=rf"the kernels for {other.sm} were not loaded on cuda"):
        load_cubin(DEVICE, cubin.data, other)


def test_the_kernels_of_the_package_load():
    loaded = load_module(DEVICE)
    assert loaded.names
    assert load_module(DEVICE) is loaded
