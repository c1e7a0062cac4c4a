"""Code: which block is the solution, and whether it passes."""

from __future__ import annotations

import json
import sys

import pytest

from reset.evaluate.graders.code import extract_code, grade_code, same_lines, same_value
from reset.evaluate.graders.hidden_tests import encode_hidden
from reset.evaluate.graders.sandbox import Limits, SandboxError
from reset.evaluate.problems import Answer, Problem

ADD = "```python\nclass Solution:\n    def add(self, a, b):\n        return a + b\n```"
SMALL = Limits(cpu_seconds=1, wall_seconds=60.0, output_bytes=1 << 20)


def problem(cases, function=None):
    """`cases` are (input, output); the first is public, the others are hidden."""
    kind = "stdin" if function is None else "functional"
    records = [{"input": text, "output": output, "testtype": kind} for text, output in cases]
    fields = {
        "public_test_cases": json.dumps(records[:1]),
        "private_test_cases": encode_hidden(json.dumps(records[1:])),
        "metadata": json.dumps({} if function is None else {"func_name": function}),
    }
    return Problem("lcb-3", "Add.", "code", "", tests=json.dumps(fields))


def grade(text, cases, function=None, finish_reason="stop"):
    return grade_code(Answer(text, finish_reason, 9), problem(cases, function), SMALL)


# ---- which block ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\nIt prints:\n```\n1\n```",
        "```python print(1)```\n\n```\n1\n```",
        "```python3\nprint(1)\n```\n```\nnote: fast\n```",
        "```py\nprint(1)\n```\n```text\n1\n```",
        "```Python\nprint(1)\n```\n```bash\npython x.py\n```",
        "```{.python .numberLines}\nprint(1)\n```",
        "~~~python\nprint(1)\n~~~",
        "````python\nprint(1)\n````\n```\n1\n```",
        "1. So:\n   ```python\n   print(1)\n   ```",
        "```\nprint(1)\n```\n```\n1\n```\n```\n3 4\n```",
        "```python\nprint(0)\n```\nNo:\n```python\nprint(1)\n```",
        "```python\nprint(0)\n\nOops.\n```python\nprint(1)\n```",
        "```python\nprint(0)\n```</think>\n```python\nprint(1)\n```",
        "```python\nprint(1)\n```</think>\nDone.",
        "```python\nprint(1)",
    ],
)
def test_h8_the_solution_is_the_last_python_block(text):
    assert extract_code(text) == "print(1)"


@pytest.mark.parametrize(
    "text", ["", "print(1)", "```cpp\nint main() {}\n```", "```\n1 2 3\n```", "```python\n\n```"]
)
def test_h8_no_solution(text):
    assert extract_code(text) is None
    verdict = grade(text, [("", "1")])
    assert (verdict.correct, verdict.extracted) == (False, None)


def test_a_block_that_was_cut_off_is_no_solution():
    text = "```python\nprint(1)\n```\nBetter:\n```python\nprint("
    assert extract_code(text, is_complete=False) == "print(1)"
    verdict = grade("```python\nprint(1)", [("", "1")], finish_reason="length")
    assert verdict.extracted is None


# ---- whether it passes ---------------------------------------------------------------------------


def test_r1_hidden_tests_count():
    text = "```python\nprint(3)\n```"
    verdict = grade(text, [("1\n2", "3"), ("3\n4", "7")])
    assert (verdict.correct, verdict.detail) == (False, "test 2 of 2: wrong output")


def test_r2_a_class_of_several_lines_passes():
    verdict = grade(ADD, [("1\n2", "3"), ("-1\n1", "0")], function="add")
    assert (verdict.correct, verdict.detail) == (True, "passes 2 tests")


@pytest.mark.parametrize(
    "code",
    [
        "class Solution:\n  def add(self, a, b): return a + b",
        "def add(a, b):\n    return a + b",
        "from operator import add",
        "class Solution:\n    def add(self, a: List[int], b: Optional[int]):\n        return a + b",
        "class Solution:\n    add = lambda self, a, b: a + b\nif __name__ == '__main__': input()",
        "import numpy as np\ndef add(a, b): return np.int64(a) + b",
    ],
)
def test_r2_ways_to_write_a_function(code):
    assert grade(f"```python\n{code}\n```", [("1\n2", "3")], function="add").correct


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("def add(a, b): return a - b", "wrong value"),
        ("def add(a, b): print(3)", "wrong value"),
        ("def add(a, b): return {3}", "TypeError: returned a set"),
        ("def sub(a, b): return 3", "KeyError: 'add'"),  # not operator.add of the prelude
        ("class Solution:\n    def sub(self): pass", "AttributeError: "),
        ("def add(a, b): exit()", "returned nothing that can be read"),
        ("def add(a, b): return 10 ** 10_000", "returned nothing that can be read"),
    ],
)
def test_functions_that_fail(code, detail):
    verdict = grade(f"```python\n{code}\n```", [("1\n2", "3")], function="add")
    assert not verdict.correct
    assert verdict.detail.startswith(f"test 1 of 1: {detail}")


def test_a_program_passes():
    code = "def main():\n    a, b = int(input()), int(input())\n    print(a + b)\n"
    text = f"```python\n{code}if __name__ == '__main__':\n    main()\n```"
    assert grade(text, [("1\n2", "3"), ("5\n6\n", "11\n")]).correct


@pytest.mark.parametrize(
    ("code", "detail"),
    [
        ("import os\nwhile True: os.fork()", "PermissionError: the sandbox does not allow os.fork"),
        ("x = bytearray(4 << 30)", "asked for more than"),
        ("while True: pass", "used its 1 s of CPU"),
        ("for _ in range(1024): print('x' * (1 << 20))", "printed more than"),
        ("import sys\nsys.stdin.read()\nprint(int(input()))", "EOFError"),
        ("import sys\nprint(3)\nsys.exit(1)", "exit code 1"),
        ("print(3", "SyntaxError"),
    ],
)
def test_bad_programs_fail_with_their_reason(code, detail):
    verdict = grade(f"```python\n{code}\n```", [("1\n2", "3")])
    assert not verdict.correct
    assert verdict.detail.startswith(f"test 1 of 1: {detail}")


def test_a_missing_sandbox_is_never_a_grade(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError):
        grade(ADD, [("1\n2", "3")], function="add")


# ---- what equals what ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [
        ("3\n", "3", True),
        (" 1 2 \n3\n\n", "1 2\n3", True),
        ("1.0 2", "1 2.00", True),
        ("1e3", "1000", True),
        ("0.1", "0.10000001", False),
        ("1 2", "1  2", True),
        ("a b", "a  b", False),
        ("YES", "yes", False),
        ("1\n2", "1 2", False),
        ("1\n\n2", "1\n2", False),
        ("", "1", False),
        ("", "", True),
        ("1_000", "1000", False),
        ("nan", "NaN", False),
        ("1e99999999", "1", False),
    ],
)
def test_printed_lines(given, right, same):
    assert same_lines(given, right) is same


@pytest.mark.parametrize(
    ("given", "right", "same"),
    [
        ("[1, [2, 3]]", "[1,[2,3]]", True),
        ("1.0", "1", True),
        ("true", "true", True),
        ('"1"', "1", False),
        ("[1, 2]", "[2, 1]", False),
        ("null", "0", False),
        ("NaN", "1", False),
        ("[" * 100_000, "1", False),
    ],
)
def test_returned_values(given, right, same):
    assert same_value(given, right) is same
