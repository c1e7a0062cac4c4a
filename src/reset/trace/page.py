"""The trace as one HTML file that needs no network: coloured text, chart, numbers per token.

Puts a `Trace`, page.css and page.js into the template page.html. All text of the trace travels as
JSON in a data block and enters the document as text nodes, never as markup; page.js draws it.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path

from reset.files import written_aside
from reset.trace.record import Trace


def render_page(trace: Trace) -> str:
    """The page of `trace` as text, complete and self-contained.

    The script sets `document.body.dataset.ready` to "1" once everything is drawn. The fragment
    `#t=17` selects output position 17.
    """
    data = {
        "trace": trace.to_dict(),
        "summary": trace.summary(),
        "step_means_nats": trace.step_means_nats(),
        "at_t_high": [trace.is_at_t_high(token) for token in trace.tokens],
    }
    # "<" can stand only inside JSON strings; escaped, no text can close the data block.
    block = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    # The data goes in last: text of the trace that looks like a slot is left alone.
    page = _part("page.html")
    for slot, content in (
        ("@style@", _part("page.css")),
        ("@script@", _part("page.js")),
        ("@trace-data@", block),
    ):
        page = page.replace(slot, content)
    return page


def _part(name: str) -> str:
    return resources.files("reset.trace").joinpath(name).read_text(encoding="utf-8")


def write_page(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write the page of `trace` to `path`, which appears only when whole; an old file is replaced.

    Returns:
        `path`.

    Raises:
        ValueError: the folder of `path` does not exist, or `path` is a folder.
        OSError: the file could not be written; an old file at `path` is as it was.
    """
    page = render_page(trace)
    with written_aside(path) as partial:
        partial.write_text(page, encoding="utf-8")
    return Path(path)
