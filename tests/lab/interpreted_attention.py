"""The attention kernel on a CPU. Run by test_attention.py in a process of its own, since the
interpreter is chosen, for every kernel of a process, when Triton is imported:

    TRITON_INTERPRET=1 python -m pytest tests/lab/interpreted_attention.py
"""

from __future__ import annotations

import pytest
import torch
from lab.pocket_reasoner.attention_kernel import BLOCK, attend_seen

from tests.lab.attention_cases import DTYPES, Case, check, make_case

LENGTH = 2 * BLOCK + 5
BORDERS = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, LENGTH - 1]


def on_gpu(case: Case) -> Case:
    """Keys as `new_cells` lays them on a GPU."""
    case.keys = case.keys.mT.contiguous().mT
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 16), (2, 64), (3, 32), (2, 24)])
def test_positions_at_the_borders_of_blocks(group, head_dim, dtype):
    case = on_gpu(make_case(BORDERS, LENGTH, group=group, head_dim=head_dim, dtype=dtype))
    case.poison(torch.nan)
    check(attend_seen(*case.inputs), case, rounds=False, store=1.0)


def test_every_position_of_a_small_cache():
    length = BLOCK + 2
    case = on_gpu(make_case(list(range(length)), length, kv_heads=1))
    case.poison(torch.nan)
    check(attend_seen(*case.inputs), case, rounds=False)


def test_scores_far_beyond_the_range_of_exp():
    case = on_gpu(make_case(BORDERS, LENGTH))
    case.q *= 100
    check(attend_seen(*case.inputs), case, rounds=False)


def test_a_result_does_not_depend_on_other_rows():
    case = on_gpu(make_case(BORDERS, LENGTH))
    together = attend_seen(*case.inputs)
    for row in range(len(BORDERS)):
        one = slice(row, row + 1)
        alone = Case(case.q[one], case.keys[one], case.values[one], case.position[one])
        assert torch.equal(attend_seen(*alone.inputs), together[one])


def test_bad_numbers_are_not_hidden():
    case = on_gpu(make_case([0, 40], 64))
    case.q[:, 0, 0] = torch.nan
    found = attend_seen(*case.inputs)
    assert found[:, 0].isnan().all()
    assert found[:, 1:].isfinite().all()


def test_keys_as_they_lie_on_a_cpu_are_refused():
    with pytest.raises(ValueError, match="make both with new_cells"):
        attend_seen(*make_case([3], 8).inputs)
