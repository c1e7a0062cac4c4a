"""How `reset-analyze` shows and writes a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nvfp4r.console import notes, output
from reset.analyze.study import Row, Study, output_files

Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Prefix of the files: PREFIX.png, PREFIX.svg, PREFIX.json, PREFIX.TABLE.csv.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the numbers as JSON, not as tables.")]


def check_output(prefix: Path | None) -> None:
    """Refuses what cannot be written before the work is done."""
    if prefix is not None:
        from reset.analyze.figures import check_matplotlib

        check_matplotlib()
        output_files(prefix)


def report(
    study: Study, tables: Mapping[str, Sequence[str]], prefix: Path | None, as_json: bool
) -> None:
    """Print and write a study; `tables`: which of them to print, and which columns (all if ())."""
    if as_json:
        print(study.to_json(), end="")
    else:
        for name, columns in tables.items():
            rows = study.tables[name]
            print_rows(name, [{key: row[key] for key in columns or row} for row in rows])
        print_rows("summary", [study.summary])
    if prefix is not None:
        from reset.analyze.figures import write_figures

        for path in [*study.write(prefix), *write_figures(study, prefix)]:
            notes().print(f"written: {path}")


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """A table with a column for every key of the rows."""
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title or None)
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    output().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(_shown(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
