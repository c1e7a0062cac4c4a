"""Ops whose kernel torch calls directly for one type of device; here that is the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nvfp4r import ops
from nvfp4r.custom_op import custom_op

TYPES = {"direct": "cpu", "by custom_op": "cuda"}
_callers: list[str] = []


def op_for(way: str):
    """An op in a namespace of its own; `_callers` has who called its function last."""
    name = way.replace(" ", "_")

    def scaled(x: Tensor, factor: int) -> Tensor:
        return doubled(x) * factor

    op = custom_op(f"nvfp4r_test_{name}::scaled", direct=TYPES[way])(scaled)
    op.register_fake(lambda x, factor: torch.empty_like(x))
    return op


def doubled(x: Tensor) -> Tensor:
    _callers.append("compiled" if torch.compiler.is_compiling() else "called")
    return x + x


OPS = {way: op_for(way) for way in TYPES}


@pytest.mark.parametrize("way", TYPES)
def test_an_op_is_the_same_on_either_way(way):
    op, x = OPS[way], torch.arange(3.0)
    assert torch.equal(op(x, 3), 6 * x)
    torch.library.opcheck(op._opoverload, (x, 3))
    with pytest.raises(RuntimeError, match=r"backward through .*scaled.*no autograd formula"):
        op(x.requires_grad_(), 3).sum().backward()


@pytest.mark.parametrize("way", TYPES)
def test_torch_compile_never_looks_into_an_op(way):
    """Neither in a graph nor between two, where it would trace whatever Python runs."""
    op, graphs = OPS[way], []

    def keep(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    def inside(x):
        return op(x.sin(), 3).cos()

    def between(x):
        with open("/dev/null") as file:  # a context that it does not know
            y = op(x, 3)
            file.read()
        return y

    x = torch.arange(3.0)
    for function in (inside, between):
        torch._dynamo.reset()
        _callers.clear()
        assert torch.equal(torch.compile(function, backend=keep)(x), function(x))
        assert set(_callers) == {"called"}
    assert not any("add" in target for graph in graphs for target in graph)


def test_a_direct_op_may_be_called_by_its_name_too():
    _callers.clear()
    y = torch.ops.nvfp4r_test_direct.scaled(torch.ones(2), factor=5)
    assert (y.tolist(), _callers) == ([10.0, 10.0], ["called"])


@pytest.mark.parametrize("op", [ops.linear, ops.gemv, ops.gemm, ops.quantize])
def test_the_ops_of_this_package_have_a_kernel_of_their_own_on_gpus(op):
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(op._qualname, "CUDA")
    assert not has_kernel(op._qualname, "CPU")
    assert has_kernel(op._qualname, "CompositeExplicitAutograd")
