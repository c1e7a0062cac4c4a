"""Triton kernels of the sampler: entropy, detector, policy and scaling in two launches.

First launch, one program per tile of a row: the tile's largest logit, its sum of e^(z - largest)
and of e^(z - largest) (z - largest). Every program then takes a ticket of its slot; the one that
draws the last knows that all partial results of the slot's rows are written. It alone combines
them, in the order of the tiles, rolls the policy over the rows and writes the new history. So
nobody reads a history that another program writes, no second buffer is needed, and which program
comes last changes nothing in the result. It sets the ticket counter back to 0, so that a CUDA graph
can be replayed. Second launch, again one program per tile: scale.

A tile is the same whatever the batch: a row's entropy does not depend on its neighbours. The maths
per logit is float32, what is done once per row float64, without fused multiply-adds: the policy's
arithmetic is that of `reset.rule`, bit for bit. It is in `reset._triton_rule`, the host's side in
`reset._triton_launch`.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl

from reset import rule, slot_layout
from reset._triton_rule import decide
from reset.config import GREEDY_TEMPERATURE

# What a kernel reads from outside must be a constexpr.
_WINDOW, _PARAMS = tl.constexpr(rule.WINDOW), tl.constexpr(rule.PARAM_COLUMNS)
_RUN_SUM, _WINDOW_SUM = tl.constexpr(rule.RUN_SUM), tl.constexpr(rule.WINDOW_SUM)
_STEP_SUM, _EMA = tl.constexpr(rule.STEP_SUM), tl.constexpr(rule.EMA)
_COUNT, _STEP_COUNT = tl.constexpr(rule.COUNT), tl.constexpr(rule.STEP_COUNT)
_HISTORY = tl.constexpr(rule.HISTORY_COLUMNS)

_OWN, _ADMITTED = tl.constexpr(slot_layout.OWN_TEMPERATURE), tl.constexpr(slot_layout.ADMITTED)
_FIRST, _PENDING = tl.constexpr(slot_layout.FIRST), tl.constexpr(slot_layout.PENDING)
_SNAPSHOTS = tl.constexpr(slot_layout.SNAPSHOTS)
_SNAPSHOT = tl.constexpr(slot_layout.SNAPSHOT_COLUMNS)
_AUTOMATON, _TOKENS = tl.constexpr(slot_layout.AUTOMATON), tl.constexpr(slot_layout.TOKENS)
_STEPS, _HIGH = tl.constexpr(slot_layout.STEPS), tl.constexpr(slot_layout.HIGH)
_ENTROPY, _LOST = tl.constexpr(slot_layout.ENTROPY), tl.constexpr(slot_layout.LOST)
_GREEDY_TEMPERATURE = tl.constexpr(GREEDY_TEMPERATURE)

# facts[row]: what the second launch does with a row, the divisor, the largest logit.
_ALONE, _SCALE, _GREEDY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FACTS = 4  # 16 bytes a row
_FACTS = tl.constexpr(FACTS)
PARTIALS = 3  # largest, sum of weights, weighted sum
_PARTIALS = tl.constexpr(PARTIALS)
FIELDS = 4  # float64 fields of a Decision


@triton.jit
def _reduce_tile(logits, stride, partials, row, tile, wanted, V, TILE, TILES_PAD):
    """Partial results of one tile of one row."""
    column = tile * TILE + tl.arange(0, TILE)
    at = logits + row.to(tl.int64) * stride + column
    z = tl.load(at, mask=column < tl.where(wanted, V, 0), other=-float("inf"))
    z = z.to(tl.float32)
    top = tl.max(z, 0)
    shifted = z - tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp(shifted)
    # 0 * -inf is NaN where an entry is masked: such a term is 0 by definition.
    weighted = tl.where(shifted == -float("inf"), 0.0, weight * shifted)
    at = partials + row * (_PARTIALS * TILES_PAD) + tile
    tl.store(at, top)
    tl.store(at + TILES_PAD, tl.sum(weight, 0))
    tl.store(at + 2 * TILES_PAD, tl.sum(weighted, 0))


@triton.jit
def _take_ticket(tickets, first):
    """This program's number among those of the slot, from 0.

    The barrier puts the partial results of the whole program before the release of the ticket; the
    acquire puts those of every program that drew earlier before what the last one reads.
    """
    tl.debug_barrier()
    ticket = tl.atomic_add(tickets + first, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return ticket


@triton.jit
def _combine(partials, first, rows, ROWS_PAD, TILES, TILES_PAD):
    """(largest logit [ROWS_PAD] float32, H [ROWS_PAD] float64, a float32 value) of `rows` rows."""
    row = tl.arange(0, ROWS_PAD)[:, None]
    tile = tl.arange(0, TILES_PAD)[None, :]
    inside = tile < tl.where(row < rows, TILES, 0)
    at = partials + (first + row) * (_PARTIALS * TILES_PAD) + tile
    # .cg: from L2, where other multiprocessors' stores are
    tops = tl.load(at, mask=inside, other=-float("inf"), cache_modifier=".cg")
    totals = tl.load(at + TILES_PAD, mask=inside, other=0.0, cache_modifier=".cg")
    weighted = tl.load(at + 2 * TILES_PAD, mask=inside, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, 1)
    below = tl.where(tops == -float("inf"), 0.0, tops.to(tl.float64) - top.to(tl.float64)[:, None])
    share = tl.exp(below)
    totals = totals.to(tl.float64)
    total = tl.sum(share * totals, 1)
    weighted = tl.sum(share * (weighted.to(tl.float64) + totals * below), 1)
    entropy = tl.log(total) - weighted / total
    entropy = tl.where(entropy < 0.0, 0.0, entropy)  # rounding; NaN stays
    entropy = tl.where(total == 0.0, 0.0, entropy)  # everything masked
    return top, entropy.to(tl.float32).to(tl.float64)


@triton.jit
def _write_facts(facts, row, temperature, own_temperature, top):
    greedy = temperature <= _GREEDY_TEMPERATURE
    divisor = tl.div_rn(temperature, own_temperature)
    tl.store(facts + row * _FACTS, tl.where(greedy, _GREEDY, _SCALE).to(tl.float32))
    tl.store(facts + row * _FACTS + 1, divisor)
    tl.store(facts + row * _FACTS + 2, top)


@triton.jit
def _write_decision(
    temperatures, fields, row, rows_total, temperature, threshold, entropy, step_entropy, mean
):
    tl.store(temperatures + row, temperature)
    tl.store(fields + row, threshold)
    tl.store(fields + rows_total + row, entropy)
    tl.store(fields + 2 * rows_total + row, step_entropy)
    tl.store(fields + 3 * rows_total + row, mean)


@triton.jit
def _slot_of(slots, position, row, inside, SLOTS):
    """Slot of a row; -1 where it is left alone, -2 where it names a slot that does not exist."""
    slot = tl.load(slots + row, mask=inside, other=-1).to(tl.int32)
    at = tl.load(position + row, mask=inside, other=-1)
    slot = tl.where((slot < 0) | (at < 0), -1, slot)
    return tl.where(slot >= SLOTS, -2, slot)


@triton.jit(do_not_specialize_on_alignment=["slots", "token", "position"])
def track_kernel(
    logits,
    stride,
    slots,
    token,
    position,
    records,
    table,
    partials,
    tickets,
    facts,
    temperatures,
    fields,
    V: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS_PAD: tl.constexpr,  # power of two >= MAX_ROWS
    RECORD: tl.constexpr,
    RING_START: tl.constexpr,
    RING: tl.constexpr,
    IDS: tl.constexpr,
    STATES: tl.constexpr,
):
    """First launch of `RequestTracker.scale`; grid (TILES, rows)."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    rows_total = tl.num_programs(1)
    slot = _slot_of(slots, position, row, row < rows_total, SLOTS)
    _reduce_tile(logits, stride, partials, row, tile, slot >= 0, V, TILE, TILES_PAD)
    # The record after the last slot is empty and stays so.
    record = records + tl.where(slot >= 0, slot, SLOTS).to(tl.int64) * RECORD
    admitted = tl.load(record + _ADMITTED) > 0.0

    order = 0  # of this row among those of its slot
    rows = 1
    if MAX_ROWS > 1:
        step = tl.arange(0, 2 * ROWS_PAD)  # beyond MAX_ROWS, so that a row too many shows
        behind = _slot_of(slots, position, row - step, row >= step, SLOTS)
        ahead = _slot_of(slots, position, row + step, row + step < rows_total, SLOTS)
        order = tl.min(tl.where(behind != slot, step, 2 * ROWS_PAD), 0) - 1
        after = tl.min(tl.where(ahead != slot, step, 2 * ROWS_PAD), 0) - 1
        rows = tl.minimum(order + 1 + after, MAX_ROWS)
    elif row > 0:
        order = (_slot_of(slots, position, row - 1, True, SLOTS) == slot).to(tl.int32)

    bad = (slot == -2) | (admitted & (order >= MAX_ROWS))
    if admitted & (order < MAX_ROWS):
        first = row - order
        if _take_ticket(tickets, first) == rows * TILES - 1:
            tl.store(tickets + first, 0)
            _roll(
                position, token, record, table, partials, facts, temperatures, fields,
                first, rows, rows_total,
                TILES, TILES_PAD, ROWS_PAD, RING_START, RING, IDS, STATES,
            )  # fmt: skip
    elif tile == 0:
        nothing = float("nan")
        tl.store(facts + row * _FACTS, tl.where(bad, _SCALE, _ALONE).to(tl.float32))
        tl.store(facts + row * _FACTS + 1, nothing)
        tl.store(facts + row * _FACTS + 2, nothing)
        _write_decision(
            temperatures, fields, row, rows_total, nothing, nothing, nothing, nothing, nothing
        )


@triton.jit
def _roll(
    position, token, record, table, partials, facts, temperatures, fields,
    first, rows, rows_total,
    TILES, TILES_PAD, ROWS_PAD, RING_START, RING, IDS, STATES,
):  # fmt: skip
    """`RequestTracker._roll` for the rows of one slot."""
    tops, entropies = _combine(partials, first, rows, ROWS_PAD, TILES, TILES_PAD)
    index = tl.arange(0, ROWS_PAD)
    start = tl.load(position + first).to(tl.float64)
    kept = start - tl.load(record + _FIRST)
    fits = (kept >= 0.0) & (kept <= tl.load(record + _PENDING))
    history = record + _SNAPSHOTS + tl.where(fits, kept, 0.0).to(tl.int32) * _SNAPSHOT
    run_sum = tl.where(fits, tl.load(history + _RUN_SUM), 0.0)
    window_sum = tl.where(fits, tl.load(history + _WINDOW_SUM), 0.0)
    step_sum = tl.where(fits, tl.load(history + _STEP_SUM), 0.0)
    ema = tl.where(fits, tl.load(history + _EMA), 0.0)
    count = tl.where(fits, tl.load(history + _COUNT), 0.0)
    step_count = tl.where(fits, tl.load(history + _STEP_COUNT), 0.0)
    state = tl.where(fits, tl.load(history + _AUTOMATON), 0.0).to(tl.int32)
    tokens = tl.load(history + _TOKENS)
    steps = tl.load(history + _STEPS)
    high = tl.load(history + _HIGH)
    entropy_sum = tl.load(history + _ENTROPY)
    lost = tl.load(history + _LOST) + tl.where(fits, 0.0, 1.0)
    window = tl.load(record + _WINDOW)
    own_temperature = tl.load(record + _OWN).to(tl.float32)
    # Every thread has read the old history before one of them writes.
    tl.debug_barrier()
    tl.store(record + _FIRST, start)
    tl.store(record + _PENDING, rows.to(tl.float64))
    snapshot = record + _SNAPSHOTS
    _write_snapshot(
        snapshot, run_sum, window_sum, step_sum, ema, count, step_count,
        state, tokens, steps, high, entropy_sum, lost,
    )  # fmt: skip

    k = 0
    while k < rows:
        row = first + k
        fed = tl.load(position + row) > 0
        fed_token = tl.load(token + row).to(tl.int64)
        known = (fed_token >= 0) & (fed_token < IDS)
        walked = fed & known
        entry = tl.load(table + tl.where(walked, fed_token, 0) * STATES + state).to(tl.int32)
        state = tl.where(walked, entry & 127, state)
        ended = walked & (entry > 127)
        step_sum = tl.where(ended, 0.0, step_sum)
        step_count = tl.where(ended, 0.0, step_count)
        entropy = tl.sum(tl.where(index == k, entropies, 0.0), 0)
        entropy = tl.where(fed & (known == 0), float("nan"), entropy)

        # What leaves the window is in the ring, or an earlier row of this very call.
        age = count.to(tl.int64)
        reach = age - window.to(tl.int64)
        here = k - window.to(tl.int32)
        in_ring = (reach >= 0) & (here < 0)
        leaving = tl.load(record + RING_START + tl.where(in_ring, reach % RING, 0))
        leaving = tl.where(in_ring, leaving, 0.0)
        leaving += tl.sum(tl.where(index == here, entropies, 0.0), 0)

        temperature, threshold, step_entropy, mean_entropy, run_sum, window_sum, ema = decide(
            record, run_sum, window_sum, step_sum, ema, count, step_count, entropy, leaving
        )
        step_sum += entropy
        count += 1.0
        step_count += 1.0
        tokens += 1.0
        steps += ended.to(tl.float64)
        is_high = (entropy >= threshold) & (temperature == temperature)
        high += is_high.to(tl.float64)
        entropy_sum += entropy
        tl.store(record + RING_START + age % RING, entropy)
        snapshot += _SNAPSHOT
        _write_snapshot(
            snapshot, run_sum, window_sum, step_sum, ema, count, step_count,
            state, tokens, steps, high, entropy_sum, lost,
        )  # fmt: skip
        top = tl.max(tl.where(index == k, tops, -float("inf")), 0)
        _write_facts(facts, row, temperature, own_temperature, top)
        _write_decision(
            temperatures, fields, row, rows_total,
            temperature, threshold, entropy, step_entropy, mean_entropy,
        )  # fmt: skip
        k += 1


@triton.jit
def _write_snapshot(
    at, run_sum, window_sum, step_sum, ema, count, step_count,
    state, tokens, steps, high, entropy_sum, lost,
):  # fmt: skip
    tl.store(at + _RUN_SUM, run_sum)
    tl.store(at + _WINDOW_SUM, window_sum)
    tl.store(at + _STEP_SUM, step_sum)
    tl.store(at + _EMA, ema)
    tl.store(at + _COUNT, count)
    tl.store(at + _STEP_COUNT, step_count)
    tl.store(at + _AUTOMATON, state.to(tl.float64))
    tl.store(at + _TOKENS, tokens)
    tl.store(at + _STEPS, steps)
    tl.store(at + _HIGH, high)
    tl.store(at + _ENTROPY, entropy_sum)
    tl.store(at + _LOST, lost)


@triton.jit(do_not_specialize_on_alignment=["slots", "new_step"])
def policy_kernel(
    logits,
    stride,
    slots,  # None: row i is slot i
    new_step,
    parameters,  # not `params`: Triton's launcher has a local variable of that name
    history,
    ring,
    partials,
    tickets,
    facts,
    temperatures,
    fields,
    V: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    SLOTS: tl.constexpr,
    RING: tl.constexpr,
):
    """First launch of `scale_logits`; grid (TILES, rows)."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    _reduce_tile(logits, stride, partials, row, tile, True, V, TILE, TILES_PAD)
    if _take_ticket(tickets, row) == TILES - 1:
        tl.store(tickets + row, 0)
        tops, entropies = _combine(partials, row, 1, 1, TILES, TILES_PAD)
        slot = row.to(tl.int64)
        if slots is not None:
            slot = tl.load(slots + row)
        exists = (slot >= 0) & (slot < SLOTS)
        slot = tl.where(exists, slot, 0)
        entropy = tl.where(exists, tl.sum(entropies, 0), float("nan"))
        at = history + slot * _HISTORY
        ended = tl.load(new_step + row) != 0
        run_sum = tl.load(at + _RUN_SUM)
        window_sum = tl.load(at + _WINDOW_SUM)
        step_sum = tl.where(ended, 0.0, tl.load(at + _STEP_SUM))
        ema = tl.load(at + _EMA)
        count = tl.load(at + _COUNT)
        step_count = tl.where(ended, 0.0, tl.load(at + _STEP_COUNT))
        age = count.to(tl.int64)
        reach = age - tl.load(parameters + slot * _PARAMS + _WINDOW).to(tl.int64)
        cell = ring + slot * RING + tl.where(reach >= 0, reach % RING, 0)
        leaving = tl.load(cell, mask=reach >= 0, other=0.0).to(tl.float64)
        temperature, threshold, step_entropy, mean_entropy, run_sum, window_sum, ema = decide(
            parameters + slot * _PARAMS,
            run_sum, window_sum, step_sum, ema, count, step_count, entropy, leaving,
        )  # fmt: skip
        # Every thread has read the old history before one of them writes.
        tl.debug_barrier()
        if exists:
            tl.store(at + _RUN_SUM, run_sum)
            tl.store(at + _WINDOW_SUM, window_sum)
            tl.store(at + _STEP_SUM, step_sum + entropy)
            tl.store(at + _EMA, ema)
            tl.store(at + _COUNT, count + 1.0)
            tl.store(at + _STEP_COUNT, step_count + 1.0)
            tl.store(ring + slot * RING + age % RING, entropy.to(tl.float32))
        _write_facts(facts, row, temperature, 1.0, tl.max(tops, 0))
        _write_decision(
            temperatures, fields, row, tl.num_programs(1),
            temperature, threshold, entropy, step_entropy, mean_entropy,
        )  # fmt: skip


@triton.jit
def scale_kernel(
    logits,
    stride,
    partials,
    facts,
    V: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    TILES_PAD: tl.constexpr,
    LOWEST: tl.constexpr,  # of a 16-bit format; 0 for float32
):
    """Second launch: what `reset.sampler.apply_temperature` does; grid (TILES, rows)."""
    # Backwards: what the first launch read last may still be in L2.
    tile = TILES - 1 - tl.program_id(0)
    row = tl.num_programs(1) - 1 - tl.program_id(1)
    kind = tl.load(facts + row * _FACTS).to(tl.int32)
    divisor = tl.load(facts + row * _FACTS + 1)
    top = tl.load(facts + row * _FACTS + 2)
    if kind != _ALONE:
        column = tile * TILE + tl.arange(0, TILE)
        at = logits + row.to(tl.int64) * stride + column
        z = tl.load(at, mask=column < V, other=0.0)
        wide = z.to(tl.float32)
        if kind == _GREEDY:
            block = tl.arange(0, TILES_PAD)
            tops = tl.load(
                partials + row * (_PARTIALS * TILES_PAD) + block,
                mask=block < TILES,
                other=float("inf"),
            )
            home = tl.min(tl.where(tops == top, block, TILES_PAD), 0)
            hit = (wide == top) & (column < V)
            best = tl.min(tl.where(hit, column, V), 0)
            best = tl.where(home == tile, best, -1)
            wide = tl.where(column == best, wide, -float("inf"))
        elif LOWEST == 0.0:
            wide = tl.div_rn(wide, divisor)
        else:
            scaled = tl.div_rn(wide - tl.where(top == -float("inf"), 0.0, top), divisor)
            scaled = tl.where(scaled < LOWEST, LOWEST, scaled)  # NaN stays
            wide = tl.where(wide == -float("inf"), wide, scaled)
        tl.store(at, wide.to(z.dtype), mask=column < V)
