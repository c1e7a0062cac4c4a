"""The result of a study: figures with their names, tables of rows, and what they came from.

Writes JSON and CSV; draws nothing and knows no study.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reset.files import check_file_target, written_aside

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Study:
    """What a study found.

    Args:
        name: of the study, e.g. "shift".
        rules: how the numbers are defined, in words, by topic.
        settings: thresholds and the like.
        sources: provenance of what was analysed, one entry each.
        summary: single figures; units in their names.
        tables: by name, rows with the same keys each.
    """

    name: str
    rules: Mapping[str, str]
    settings: Mapping[str, Any]
    sources: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]
    tables: Mapping[str, Sequence[Row]]

    def to_json(self) -> str:
        """Everything, as strict JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"

    def files(self, prefix: Path) -> dict[str, Path]:
        """Where `write` and the figure go: "json", "png", "svg" and a CSV by name of table.

        Raises:
            ValueError: the folder does not exist, or `prefix` is a folder.
        """
        return output_files(prefix, list(self.tables))

    def write(self, prefix: Path) -> list[Path]:
        """Write PREFIX.json and PREFIX.TABLE.csv.

        Raises:
            ValueError: as `files`.
            OSError: a file cannot be written.
        """
        files = self.files(prefix)
        with written_aside(files["json"]) as partial:
            partial.write_text(self.to_json(), encoding="utf-8")
        for name, rows in self.tables.items():
            with written_aside(files[name]) as partial, partial.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]) if rows else [])
                writer.writeheader()
                writer.writerows(rows)
        return [files["json"], *(files[name] for name in self.tables)]


def output_files(prefix: Path, tables: Sequence[str] = ()) -> dict[str, Path]:
    """The files of a study under `prefix`, by kind or name of table.

    Raises:
        ValueError: the folder does not exist, or `prefix` is a folder.
    """
    check_file_target(prefix)
    kinds = {kind: kind for kind in ("json", "png", "svg")}
    kinds |= {table: f"{table}.csv" for table in tables}
    # Not with_suffix: a prefix such as "Qwen2.5" has a dot of its own.
    files = {kind: prefix.with_name(f"{prefix.name}.{end}") for kind, end in kinds.items()}
    for file in files.values():
        check_file_target(file)
    return files


def rounded(value: float) -> float:
    """Six significant digits: what float32 entropies carry."""
    return float(f"{value:.6g}")
