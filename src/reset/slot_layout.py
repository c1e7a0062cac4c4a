"""How `RequestTracker` lays out one request's record: offsets into a row of float64 values.

    parameters | first, pending | snapshot 0 | snapshot 1 | ... | snapshot max_rows | ring

`first` is the position of the first row of the last call and `pending` the number of its rows.
Snapshot 0 is the history before that call, snapshot k the history after its k-th row: whatever part
of the rows is kept, the history to go on from is one of them. The ring holds the last entropies,
that of the n-th token of the history in cell n % length. Knows no tensors.
"""

from __future__ import annotations

from reset.rule import HISTORY_COLUMNS, PARAM_COLUMNS

# Parameters: those of the rule, then
OWN_TEMPERATURE = PARAM_COLUMNS  # the request's own temperature, by which the engine will divide
ADMITTED = PARAM_COLUMNS + 1  # 1 if the slot holds a request, 0 if its rows are left alone
FIRST = PARAM_COLUMNS + 2
PENDING = PARAM_COLUMNS + 3
SNAPSHOTS = PARAM_COLUMNS + 4

# A snapshot: the history of the rule, then
AUTOMATON = HISTORY_COLUMNS  # state of the step detector
TOKENS = HISTORY_COLUMNS + 1  # these five are the summary
STEPS = HISTORY_COLUMNS + 2
HIGH = HISTORY_COLUMNS + 3
ENTROPY = HISTORY_COLUMNS + 4
LOST = HISTORY_COLUMNS + 5
SNAPSHOT_COLUMNS = HISTORY_COLUMNS + 6


def ring_start(max_rows: int) -> int:
    """Offset of the ring."""
    return SNAPSHOTS + (max_rows + 1) * SNAPSHOT_COLUMNS


def ring_length(max_window: int, max_rows: int) -> int:
    """Cells of the ring: entries of rows that are thrown away never hit one that is needed.

    The rows of a call that starts at the n-th token write up to the cell of token n + max_rows - 1;
    when they are repeated, the window reaches back to token n - max_window.
    """
    return max_window + max_rows


def record_length(max_window: int, max_rows: int) -> int:
    """float64 values of one slot."""
    return ring_start(max_rows) + ring_length(max_window, max_rows)
