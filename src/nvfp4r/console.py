"""What the commands share: consoles, the error boundary, progress, sizes.

Results go to standard output, everything else (progress, notes, errors) to standard error, so that
`--json` output can be piped. This module knows no command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

EXIT_PROBLEM = 1
"""The command ran and found something wrong."""

EXIT_REFUSED = 2
"""The command could not do what was asked: bad flags or bad input."""

TensorProgress = Callable[[str, int, int, int, int], None]
"""Called with name, tensors done, tensors in all, bytes done, bytes in all."""

StepProgress = Callable[[str, float, int], None]
"""Called with the name of the step at work, steps done (with its share) and steps in all."""

_DAY_SECONDS = 86400.0
_PIPE_WIDTH = 160  # columns where nothing tells the width of a terminal


def output() -> Console:
    """Standard output."""
    return _console(stderr=False)


def notes() -> Console:
    """Standard error."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


@contextmanager
def error_boundary(debug: bool = False) -> Iterator[None]:
    """Turns an error that a user can act on into one paragraph on standard error and exit code 2.

    Covers ValueError, TypeError, OSError and ImportError; anything else is a fault of the program
    and keeps its traceback.

    Args:
        debug: let the traceback through instead.

    Raises:
        typer.Exit: with code 2, if the block raised one of them.
    """
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        if debug:
            raise
        # Without a file name the number is noise: "[Errno 28] out: cannot write ..."
        own = isinstance(error, OSError) and error.filename is None and error.strerror
        message = " ".join(str(own or error).split()) or type(error).__name__
        text = Text.assemble(("Error: ", "bold red"), message)
        notes().print(text, soft_wrap=True)
        raise typer.Exit(EXIT_REFUSED) from error


@contextmanager
def tensor_progress(title: str) -> Iterator[TensorProgress]:
    """A progress bar over tensors on standard error, with bytes and the time left.

    Example:
        >>> with tensor_progress("reading") as advance:
        ...     advance("model.norm.weight", 1, 1, 4, 4)
    """
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[tensors]}"),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[name]}", table_column=Column(ratio=1, no_wrap=True)),
    )
    with Progress(*columns, console=notes(), expand=True) as progress:
        task = progress.add_task(title, total=None, tensors="", name="")

        def advance(name: str, done: int, total: int, bytes_done: int, bytes_total: int) -> None:
            progress.update(
                task,
                completed=bytes_done,
                total=bytes_total,
                tensors=f"{done:>{len(str(total))}}/{total} tensors",
                name="" if done == total else name,
            )

        yield advance


@contextmanager
def count_progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A progress bar over `total` things called `unit`; call it with how many are done."""
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=notes()) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def step_progress(title: str, unit: str) -> Iterator[StepProgress]:
    """A progress bar over a few long steps called `unit`, with the time left from all so far."""
    columns = (
        TextColumn("{task.description:<11}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("[dim]{task.fields[name]}", table_column=Column(ratio=1, no_wrap=True)),
    )
    with Progress(
        *columns, console=notes(), expand=True, speed_estimate_period=_DAY_SECONDS
    ) as progress:
        task = progress.add_task(title, total=None, name="")

        def advance(name: str, done: float, total: int) -> None:
            progress.update(task, completed=done, total=total, name="" if done == total else name)

        yield advance


def format_bytes(count: float) -> str:
    """Decimal units, three digits: 269 MB, 4.50 GB."""
    unit = 0
    while count >= 999.5 and unit < 4:
        count /= 1000
        unit += 1
    digits = 0 if unit == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"
