"""The table of rounded and rotated activations."""

from __future__ import annotations

from table_prologue import prologue_table


def line(impl: str, us: float, plan: str, kind: str = "quantise") -> dict:
    facts = {"date": "d", "gpu": "g", "driver": "1", "torch": "2", "git": "a", "command": "c"}
    return {
        **facts,
        "impl": impl,
        "shape": "o",
        "M": 4,
        "kind": kind,
        "median_us": us,
        "plan": plan,
    }


def cells(plan: str) -> list[str]:
    """Of the row for rounded activations."""
    lines = [
        line("none", 10.0, "k", kind="none"),
        line("alone", 2.0, plan),
        line("apart", 13.0, plan),
        line("fused", 11.0, plan),
    ]
    row = next(row for row in prologue_table(lines).splitlines() if "| rounded |" in row)
    return [cell.strip() for cell in row.strip("|").split("|")][2:]


def test_what_is_done_on_the_way_stands_beside_a_kernel_before():
    assert [cell.split(" (")[0] for cell in cells("k")] == ["2.0 us", "3.0 us", "1.0 us"]


def test_an_op_that_has_a_kernel_before_does_nothing_on_the_way():
    assert cells("k, apart")[2] == "-"
