"""Every fault that the project promises not to have is a test that carries its code in its name.

The codes stand for public reports of what went wrong for others: A loading and scales, Q the
quantiser, K kernel numerics, E entropy and temperature, S steps, C and R calibration.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CODES = (
    *("a1", "a2", "a3", "a4", "a5", "a6", "a8", "a9", "a10", "a13"),
    *("q1", "q2", "q3", "q4", "q5", "q6", "k1", "k2", "k3"),
    *("e1", "e2", "e3", "e4", "e5", "e6", "e7", "s1", "s2", "s3", "s4", "c1", "c2", "c3"),
    *("r4", "r7"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "h7", "h8", "h9", "h10", "r1", "r2", "r3"),
    *("l1", "l2", "l3", "l4", "l5", "l6", "l7", "l8", "l9", "l10"),
)


def names_of_tests() -> set[str]:
    functions = (
        node
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


NAMES = names_of_tests()


@pytest.mark.parametrize("code", CODES)
def test_each_code_has_a_test(code):
    carrying = re.compile(rf"test_([a-z]\d+_)*{code}_")
    assert any(carrying.match(name) for name in NAMES)
