"""The tests of a LiveCodeBench problem, public and hidden.

Hidden tests are base64 over zlib over a pickle of a JSON text. Unpickling can run anything, so only
a string is let through. Tests that cannot be read are an error: a problem without its hidden tests
would be scored too kindly. Runs no code.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from dataclasses import dataclass
from typing import Any, Literal

from reset.evaluate.problems import Problem

_LARGEST = 1 << 30  # bytes of tests of one problem; the largest known are about a tenth of it


@dataclass(frozen=True)
class Case:
    """One test: "stdin" texts are read and printed, "functional" ones are JSON, one a line."""

    kind: Literal["stdin", "functional"]
    input: str
    output: str


@dataclass(frozen=True)
class Suite:
    """All tests of a problem, the public ones first, of one kind.

    `function` is the name to call, None for programs that read standard input.
    """

    cases: tuple[Case, ...]
    function: str | None


class _StringUnpickler(pickle.Unpickler):
    """Resolves no name, so that nothing can be called."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(
            f"it names {module_name}.{global_name}; only a text is allowed"
        )


def load_tests(problem: Problem) -> Suite:
    """Every test of `problem.tests`.

    Raises:
        ValueError: no tests, tests that cannot be decoded, or functional ones without the name of
            the function. Names the problem and the field.
    """
    where = f"problem {problem.id}"
    fields = _json(problem.tests, f"{where}: tests", dict)
    cases = [
        _case(record, f"{where}: {name}")
        for name in ("public_test_cases", "private_test_cases")
        for record in _records(fields.get(name) or "[]", f"{where}: {name}")
    ]
    if not cases:
        raise ValueError(f"{where}: has no tests; need at least one to judge code by")
    metadata = _json(fields.get("metadata") or "{}", f"{where}: metadata", dict)
    kinds = {case.kind for case in cases}
    if len(kinds) > 1:
        raise ValueError(f"{where}: has stdin and functional tests; need one kind of test")
    if kinds == {"stdin"}:
        return Suite(tuple(cases), None)
    function = metadata.get("func_name")
    if not isinstance(function, str) or not function:
        raise ValueError(f"{where}: metadata has no func_name, as functional tests need")
    return Suite(tuple(cases), function)


def encode_hidden(cases: str) -> str:
    """The JSON text of hidden tests as LiveCodeBench stores it; the inverse of decoding."""
    return base64.b64encode(zlib.compress(pickle.dumps(cases))).decode("ascii")


def _records(text: Any, where: str) -> list[Any]:
    if not isinstance(text, str):
        raise ValueError(f"{where}: is a {type(text).__name__}, need a text")
    if not text.lstrip().startswith("["):
        text = _decode(text, where)
    records: list[Any] = _json(text, where, list)
    return records


def _decode(text: str, where: str) -> str:
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), _LARGEST)
        if not stream.eof:
            raise ValueError(f"it is cut off, or above {_LARGEST} bytes")
        value = _StringUnpickler(io.BytesIO(data)).load()
    except (
        *(binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError),
        *(IndexError, KeyError, AttributeError, TypeError),  # pickle's, on bytes that are no pickle
    ) as error:
        raise ValueError(
            f"{where}: cannot be decoded ({error}); need JSON, or base64 of zlib of a pickled JSON "
            "text. Fetch the data set again"
        ) from error
    if not isinstance(value, str):
        raise ValueError(f"{where}: holds a {type(value).__name__}, need a pickled text")
    return value


def _json(text: Any, where: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: is not JSON ({error})") from error
    if not isinstance(value, kind):
        raise ValueError(f"{where}: is a {type(value).__name__} in JSON, need a {kind.__name__}")
    return value


def _case(record: Any, where: str) -> Case:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a test is a {type(record).__name__}, need an object")
    kind = record.get("testtype", "stdin")
    if kind not in ("stdin", "functional"):
        raise ValueError(f'{where}: testtype is {kind!r}, need "stdin" or "functional"')
    texts = record.get("input"), record.get("output")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where}: a test needs the texts input and output")
    return Case(kind, str(texts[0]), str(texts[1]))
