"""What a step-aware decode did, token by token: the record, its HTML page and its figure.

Knows nothing of models, tokenizers or tensors: an adapter fills the record with plain numbers.
The figure is `reset.trace.figure.write_figure`; it alone needs the `plot` extra.
"""

from reset.trace.page import render_page, write_page
from reset.trace.record import SCHEMA_VERSION, TokenTrace, Trace

__all__ = ["SCHEMA_VERSION", "TokenTrace", "Trace", "render_page", "write_page"]
