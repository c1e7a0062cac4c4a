"""Code: which block of an answer is the solution, and whether it passes every test.

Follows LiveCodeBench's judge: printed lines are compared without outer blanks, and numbers by
value; what a function returns is compared with the right value, a tuple being a list. Programs run
in sandbox.py and never see what is right.
"""

from __future__ import annotations

import ast
import json
import re
from decimal import Decimal

from reset.evaluate.graders.boxes import after_thinking
from reset.evaluate.graders.hidden_tests import Case, load_tests
from reset.evaluate.graders.sandbox import Limits, Run, Sandbox
from reset.evaluate.graders.verdict import UNPARSED, Grade
from reset.evaluate.problems import Answer, Problem

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<mark>`{3,20}|~{3,20})(?P<tag>[^`]{0,200})")
_ONE_LINE = re.compile(r"\s*```(?P<tag>[A-Za-z0-9]{1,20})[ \t]{1,8}(?P<code>[^`]+)```\s*")
_PYTHON = ("python", "python3", "py", "py3")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def grade_code(answer: Answer, problem: Problem, limits: Limits | None = None) -> Grade:
    """Whether the code of `answer` passes all tests of `problem`; stops at the first that fails.

    Raises:
        ValueError: the tests cannot be read.
        SandboxError: there is no sandbox here, so nothing was judged.
    """
    tests = load_tests(problem)
    code = extract_code(answer.text, is_complete=answer.finish_reason == "stop")
    if code is None:
        return UNPARSED
    # A problem's tests are all of one kind, so one sandbox serves them.
    with Sandbox(code, function=tests.function, limits=limits) as sandbox:
        for number, case in enumerate(tests.cases, start=1):
            fault = _fault(sandbox.run(case.input), case)
            if fault is not None:
                return Grade(False, code, f"test {number} of {len(tests.cases)}: {fault}")
    return Grade(True, code, f"passes {len(tests.cases)} tests")


def extract_code(text: str, *, is_complete: bool = True) -> str | None:
    """The last block that is tagged as Python, else the last untagged one that is a program.

    Blocks of other languages, and untagged ones that are prose or a bare value, are examples, not
    solutions. What stands behind `</think>` goes first. `is_complete` says that the text was not
    cut off: a last block that is still open then counts.
    """
    for part in (after_thinking(text), text.replace("</think>", "\n")):
        blocks = _blocks(part, is_complete)
        tagged = [code for tag, code in blocks if tag in _PYTHON]
        plain = [code for tag, code in blocks if tag == "" and _is_program(code)]
        if tagged or plain:
            return (tagged or plain)[-1]
    return None


def _blocks(text: str, is_complete: bool) -> list[tuple[str, str]]:
    """(tag in small letters, content) of each fenced block that is not blank."""
    blocks: list[tuple[str, str]] = []
    mark, tag, indent = "", "", 0  # of the block that is open; "" if none is
    lines: list[str] = []
    for line in text.splitlines():
        fence, whole = _FENCE.fullmatch(line), _ONE_LINE.fullmatch(line)
        if not mark and whole:
            blocks.append((whole["tag"].lower(), whole["code"].rstrip()))
        elif mark and fence and fence["mark"].startswith(mark) and not fence["tag"].strip():
            blocks.append((tag, "\n".join(lines)))
            mark = ""
        elif fence and (not mark or fence["tag"].strip()):  # the last one was never closed
            mark, tag, indent = fence["mark"], _language(fence["tag"]), len(fence["indent"])
            lines = []
        elif mark:
            lines.append(line[:indent].lstrip() + line[indent:])
    if mark and is_complete:
        blocks.append((tag, "\n".join(lines)))
    return [(tag, code) for tag, code in blocks if code.strip()]


def _language(tag: str) -> str:
    """The first word of "python title=x" or "{.python .numberLines}"."""
    words = re.findall(r"[a-z0-9+#]+", tag.lower())
    return words[0] if words else ""


def _is_program(code: str) -> bool:
    """Whether it is Python that does something, not a value that merely reads as Python."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    does = [node for node in body if not isinstance(node, ast.Expr) or _calls(node.value)]
    return bool(does)


def _calls(node: ast.expr) -> bool:
    return any(isinstance(part, (ast.Call, ast.Await)) for part in ast.walk(node))


def _fault(ended: Run, case: Case) -> str | None:
    """What is wrong with how a test ended; None if it passed."""
    if ended.status != "done":
        return ended.detail
    if case.kind == "stdin":
        return None if same_lines(ended.stdout, case.output) else "wrong output"
    if ended.value is None:
        return "returned nothing that can be read"
    return None if same_value(ended.value, case.output) else "wrong value"


def same_lines(given: str, right: str) -> bool:
    """Line by line, without outer blanks; a line that differs as text may agree in its numbers."""
    lines = [[line.strip() for line in text.strip().split("\n")] for text in (given, right)]
    return len(lines[0]) == len(lines[1]) and all(map(_same_line, *lines))


def same_value(given: str, right: str) -> bool:
    """Two JSON texts of equal value.

    Raises:
        ValueError: `right` is not JSON.
    """
    expected = json.loads(right)
    try:
        return bool(json.loads(given) == expected)
    except (ValueError, RecursionError):
        return False  # an integer too long, or lists too deep, to be read


def _same_line(given: str, right: str) -> bool:
    if given == right:
        return True
    words = given.split(), right.split()
    return len(words[0]) == len(words[1]) and all(map(_same_number, *words))


def _same_number(given: str, right: str) -> bool:
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(right)):
        return False
    return Decimal(given) == Decimal(right)
