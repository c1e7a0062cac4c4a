"""How this package registers its ops with torch.

`torch.library.custom_op` calls a kernel through three functions of its own, which look for results
that share memory with arguments. On a GPU they take about as long as the launch of a kernel, so
there the dispatcher is given the function itself; everywhere else, and for schema, fake kernel and
autograd, an op is what `custom_op` makes it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.library import CustomOpDef


def custom_op(name: str, *, direct: str = "cuda") -> Callable[[Callable[..., object]], CustomOpDef]:
    """A decorator: `torch.library.custom_op` for a function that changes none of its arguments.

    Args:
        name: "<namespace>::<op>".
        direct: type of the devices whose tensors reach the function on the short way. It must
            return new tensors; nothing checks that there.
    """

    def register(function: Callable[..., object]) -> CustomOpDef:
        op = torch.library.custom_op(name, function, mutates_args=())
        # As custom_op does: torch.compile must not trace an op that it meets between two graphs.
        # torch.compiler.disable is the same, but imports all of the compiler at once.
        torch.library.impl(name, direct, torch._disable_dynamo(function))
        return op

    return register
