"""Every example in a docstring of the packages runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest
import torch

import nvfp4r
import reset
from tests.reset.toy_model import toy_llama, toy_tokenizer

NEEDS_VLLM = (  # imported by the tests of make test-vllm
    "reset.vllm.processor",
    *(f"nvfp4r.vllm.{name}" for name in ("configs", "kernel", "methods")),
)
NAMES = sorted(
    info.name
    for package in (reset, nvfp4r)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not info.name.endswith("__main__") and info.name not in NEEDS_VLLM
)


@pytest.fixture(scope="module")
def given() -> dict[str, object]:
    """Names that examples use without making them: a model, its tokenizer, its inputs."""
    tokenizer = toy_tokenizer()
    return {
        "torch": torch,
        "nn": torch.nn,
        "tokenizer": tokenizer,
        "model": toy_llama(len(tokenizer)),
        "inputs": tokenizer("a", return_tensors="pt"),
    }


def examples(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name, given):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples(module):
        test.globs = {**vars(module), **given}
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_there_are_examples():
    assert sum(len(examples(importlib.import_module(name))) for name in NAMES) > 12
