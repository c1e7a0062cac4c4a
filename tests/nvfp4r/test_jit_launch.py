"""Launching without a GPU: what reaches the driver, and what is refused before.

The driver's functions are recorded; its structures and error codes are the real ones.
"""

import ctypes
import struct
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as cuda

from nvfp4r.jit import Module, UnsupportedGPUError, load_cubin, module, target_named
from nvfp4r.jit.driver import _WHAT_TO_CHECK, check, cuda_driver, what_to_check
from nvfp4r.jit.launch import Kernel
from nvfp4r.jit.module import ModuleStore
from tests.nvfp4r.fake_driver import CONTEXT, DYNAMIC, OK, Driver
from tests.nvfp4r.jit_samples import scale_args
from tests.nvfp4r.launching import launch

HOPPER, AMPERE = target_named("90a"), target_named("80")
CLUSTER = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PDL = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CARVEOUT = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


def kernel(driver, target=HOPPER):
    return Kernel(driver, cuda.CUfunction(0x3000), context=CONTEXT, target=target, device_index=1)


ARGUMENT = scale_args(0x1111, 0x2222, 1.5, 7)
LAUNCH = {"grid": (4, 2, 1), "block": 128, "stream": 0x77}


class ScaleArgs(ctypes.Structure):
    _fields_ = (
        ("out", ctypes.c_void_p),
        ("input", ctypes.c_void_p),
        ("factor", ctypes.c_float),
        ("n", ctypes.c_int),
    )


@pytest.mark.parametrize(
    "argument", [ARGUMENT, ScaleArgs(0x1111, 0x2222, 1.5, 7)], ids=["bytes", "structure"]
)
def test_the_argument_reaches_the_driver(argument):
    driver = Driver()
    launch(kernel(driver), argument, **LAUNCH)
    ((_, received),) = driver.launches
    assert struct.unpack("@PPfi", received) == (0x1111, 0x2222, 1.5, 7)


def test_the_configuration_reaches_the_driver():
    driver = Driver()
    launch(kernel(driver), ARGUMENT, **LAUNCH, shared_bytes=1000)
    ((seen, _),) = driver.launches
    assert (seen.gridDimX, seen.gridDimY, seen.gridDimZ) == (4, 2, 1)
    assert (seen.blockDimX, seen.blockDimY, seen.blockDimZ) == (128, 1, 1)
    assert seen.sharedMemBytes == 1000
    assert int(seen.hStream) == 0x77
    assert seen.numAttrs == 0
    assert driver.prepared == []  # fits without asking


@pytest.mark.parametrize(
    ("cluster", "pdl", "expected"),
    [(1, False, []), (2, False, [CLUSTER]), (1, True, [PDL]), (4, True, [CLUSTER, PDL])],
)
def test_cluster_and_pdl_become_attributes(cluster, pdl, expected):
    driver = Driver()
    launch(kernel(driver), ARGUMENT, **LAUNCH, cluster=cluster, pdl=pdl)
    ((seen, _),) = driver.launches
    assert seen.numAttrs == len(expected)
    values = {attribute.id: attribute.value for attribute in seen.attrs}
    assert list(values) == expected
    if CLUSTER in values:
        size = values[CLUSTER].clusterDim
        assert (size.x, size.y, size.z) == (cluster, 1, 1)
    if PDL in values:
        assert values[PDL].programmaticStreamSerializationAllowed == 1


def test_configurations_are_built_once_for_each_set_of_values():
    driver = Driver()
    launched = kernel(driver)
    others = [
        {},
        {"grid": (8, 2, 1)},
        {"block": 64},
        {"stream": 0x78},
        {"shared_bytes": 64},
        {"cluster": 2},
        {"pdl": True},
    ]
    for _ in range(2):
        for other in others:
            launch(launched, ARGUMENT, **{**LAUNCH, **other})
    configurations = [id(configuration) for configuration, _ in driver.launches]
    assert configurations[: len(others)] == configurations[len(others) :]
    assert len(set(configurations)) == len(others)


def test_large_shared_memory_is_asked_for_once_and_never_lowered():
    driver = Driver()
    launched = kernel(driver)
    for shared_bytes in (100_000, 100_000, 60_000, 120_000):
        launch(launched, ARGUMENT, **LAUNCH, shared_bytes=shared_bytes)
    launched.prepare(200_000, carveout_percent=100)
    assert driver.prepared == [
        (DYNAMIC, 100_000),
        (DYNAMIC, 120_000),
        (DYNAMIC, 200_000),
        (CARVEOUT, 100),
    ]


REFUSED = [
    ({"grid": (0, 1, 1)}, HOPPER, r"grid is \(0, 1, 1\), need three sizes of 1 or more"),
    ({"grid": (4, 1)}, HOPPER, r"grid is \(4, 1\), need three sizes"),
    ({"block": 0}, HOPPER, r"block is 0, need 1\.\.1024 threads"),
    ({"block": 1025}, HOPPER, r"block is 1025, need 1\.\.1024 threads"),
    ({"cluster": 0}, HOPPER, r"cluster is 0, need 1\.\.8 blocks"),
    ({"cluster": 16, "grid": (16, 1, 1)}, HOPPER, r"cluster is 16, need 1\.\.8"),
    ({"cluster": 3}, HOPPER, r"grid is \(4, 2, 1\), need a multiple of the cluster, 3, in x"),
    ({"cluster": 2}, AMPERE, r"cluster is 2, but sm_80 has no clusters"),
    ({"pdl": True}, AMPERE, r"pdl is on, but sm_80 has no programmatic dependent launch"),
    ({"shared_bytes": -1}, HOPPER, r"got -1 dynamic and 16 static bytes"),
    ({"shared_bytes": 227 * 1024 - 15}, HOPPER, r"at most 232448 together on sm_90a"),
    ({"shared_bytes": 163 * 1024}, AMPERE, r"at most 166912 together on sm_80"),
]


@pytest.mark.parametrize(("change", "target", "message"), REFUSED)
def test_impossible_launches_are_refused_before_the_driver(change, target, message):
    driver = Driver()
    with pytest.raises(ValueError, match=f"^kernel kernel_0: .*{message}"):
        launch(kernel(driver, target), ARGUMENT, **{**LAUNCH, **change})
    assert driver.launches == []


@pytest.mark.parametrize("argument", [ARGUMENT[:-1], ARGUMENT + b"\0", b""])
def test_an_argument_of_another_size_is_refused(argument):
    driver = Driver()
    with pytest.raises(ValueError, match=rf"argument of {len(argument)} bytes, need 24; the str"):
        launch(kernel(driver), argument, **LAUNCH)
    assert driver.launches == []


@pytest.mark.parametrize("parameters", [(), (8, 8)])
def test_kernels_have_one_parameter(parameters):
    with pytest.raises(ValueError, match="kernel kernel_0: need exactly one parameter"):
        kernel(Driver(parameters=parameters))


def test_a_refusal_of_the_driver_names_the_launch_and_what_to_check():
    driver = Driver(statuses=[cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES])
    with pytest.raises(RuntimeError) as caught:
        launch(kernel(driver), ARGUMENT, **LAUNCH, shared_bytes=1000, cluster=2, pdl=True)
    assert str(caught.value) == (
        "kernel kernel_0 was not launched: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (grid (4, 2, 1), "
        "block 128, shared bytes 1000 + 16 static, cluster 2, pdl on, stream 0x77, cuda:1, "
        "sm_90a); a block needs more registers or shared memory than an SM has; use fewer threads "
        "or less shared memory"
    )
    assert len(driver.launches) == 1


def test_a_thread_without_a_context_gets_ours_for_the_launch():
    invalid = cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT
    driver = Driver(statuses=[invalid, OK], current=0)
    launch(kernel(driver), ARGUMENT, **LAUNCH)
    assert len(driver.launches) == 2
    assert driver.contexts == [0]  # torch still chooses the device of this thread


def test_another_current_context_is_an_error():
    driver = Driver(statuses=[cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT], current=0x9999)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_CONTEXT.*torch\.cuda\.device"):
        launch(kernel(driver), ARGUMENT, **LAUNCH)
    assert len(driver.launches) == 1


def test_occupancy_is_asked_for_the_configuration():
    driver = Driver()
    assert kernel(driver).blocks_per_sm(block=96, shared_bytes=100_000) == 96
    assert kernel(driver).max_active_clusters(block=96, cluster=4) == 4
    assert driver.prepared == [(DYNAMIC, 100_000)]


@pytest.fixture
def machine(monkeypatch):
    """A machine whose driver is recorded."""
    driver = Driver()
    monkeypatch.setattr(module, "cuda_driver", lambda: driver)
    monkeypatch.setattr(module.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda index: "Some GPU")
    return driver


def test_all_kernels_are_loaded_with_the_module(machine):
    loaded = load_cubin(0, b"\x7fELF", HOPPER)
    assert loaded.names == ("kernel_0", "kernel_1")
    assert loaded.kernel("kernel_1").name == "kernel_1"
    assert (loaded.device_index, loaded.target) == (0, HOPPER)
    context = int(CONTEXT)
    assert machine.calls == [
        ("load", b"\x7fELF", context),
        ("loaded", 0x3000, context),
        ("loaded", 0x3001, context),
    ]
    assert machine.contexts == [1]
    with pytest.raises(ValueError, match=r"kernel: got 'other', need one of kernel_0, kernel_1"):
        loaded.kernel("other")


def test_d1_code_for_another_gpu_is_told(machine):
    machine.statuses = [cuda.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU]
    with pytest.raises(RuntimeError) as caught:
        load_cubin(3, b"", HOPPER)
    assert str(caught.value) == (
        "the kernels for sm_90a were not loaded on cuda:3 (Some GPU): "
        "CUDA_ERROR_NO_BINARY_FOR_GPU; the code is built for another GPU (the driver is one for "
        "CUDA 12.8)"
    )
    assert machine.contexts == [1]


def test_nothing_is_loaded_during_a_capture(machine, monkeypatch):
    monkeypatch.setattr(module.torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"is being captured; call nvfp4r\.jit\.load_module"):
        load_cubin(0, b"\x7fELF", HOPPER)
    assert machine.calls == []


def test_each_device_gets_the_code_of_its_family(machine, monkeypatch):
    monkeypatch.setattr(module, "cubin_for", lambda target, options: target.sm.encode())
    capabilities = {0: (12, 1), 1: (8, 6), 2: (11, 0)}
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", capabilities.get)
    store = ModuleStore(module._load_package_kernels)
    assert store.get(0).target.name == "121a"
    assert store.get(1).target.name == "86"
    assert [call[1] for call in machine.calls if call[0] == "load"] == [b"sm_121a", b"sm_86"]
    with pytest.raises(UnsupportedGPUError, match=r"capability 11\.0"):
        store.get(2)


@pytest.mark.parametrize(
    ("config", "variable", "late"),
    [
        (None, None, False),
        (None, "0", False),
        (None, "1", True),
        (SimpleNamespace(triton=SimpleNamespace(enable_pdl=True)), "0", True),
        (SimpleNamespace(triton=SimpleNamespace(enable_pdl=False)), "1", False),
        (SimpleNamespace(triton=SimpleNamespace()), "1", False),  # a torch that cannot
    ],
)
def test_the_trigger_is_late_where_inductor_starts_kernels_early(
    machine, monkeypatch, config, variable, late
):
    monkeypatch.delenv("TORCHINDUCTOR_ENABLE_PDL", raising=False)
    if variable is not None:
        monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", variable)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    if config is not None:
        monkeypatch.setitem(sys.modules, "torch._inductor.config", config)
    given = []
    monkeypatch.setattr(module, "cubin_for", lambda target, options: given.append(options) or b"")
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert module._load_package_kernels(0).late_trigger == late
    assert given == [(module.LATE_TRIGGER,) if late else ()]


def test_threads_share_one_module_per_device():
    loads = []
    start = threading.Barrier(8)

    def load(device_index):
        loads.append(device_index)
        time.sleep(0.05)  # long enough for the others to come
        return Module(device_index, HOPPER, {})

    store, seen = ModuleStore(load), []

    def ask(index):
        start.wait()
        seen.append(store.get(index % 2))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(loads) == [0, 1]
    assert {id(found) for found in seen} == {id(store.get(0)), id(store.get(1))}


def test_a_failed_load_is_tried_again():
    answers = [RuntimeError("no memory"), Module(0, HOPPER, {})]

    def load(device_index):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    store = ModuleStore(load)
    with pytest.raises(RuntimeError, match="no memory"):
        store.get(0)
    assert store.get(0).target == HOPPER


def test_errors_of_the_driver_are_named():
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS; an earlier kernel .*fail"):
        check(cuda, (cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,))
    assert check(cuda, (OK,)) is None
    assert check(cuda, (OK, 5)) == 5
    assert set(_WHAT_TO_CHECK) <= {result.name for result in cuda.CUresult}
    assert what_to_check("CUDA_ERROR_UNKNOWN").startswith("see CUresult")


def test_a_missing_driver_is_told(monkeypatch):
    def no_library(flags):
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(cuda, "cuInit", no_library)
    with pytest.raises(ImportError, match=r"libcuda.*reset-decoding\[gpu\].*nvidia-smi"):
        cuda_driver()
