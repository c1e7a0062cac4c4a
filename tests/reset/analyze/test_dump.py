"""Dump folders: what is written is read back, damage and foreign files are named."""

import json

import numpy as np
import pytest

from reset.analyze.dump import (
    ENTROPY_RULE,
    HEADER_FILE,
    Dump,
    open_with_answers,
    require_complete,
    step_indices,
)
from tests.reset.analyze.records import MADE_WITH, SETTINGS, answer, dump_of


def test_round_trip(tmp_path):
    sampled = {
        "sampler_entropy_nats": np.array([0.5, 1.5, 0.25], dtype=np.float32),
        "temperature": np.array([0.5, 1.0, 0.5], dtype=np.float32),
        "finish_reason": "stop",
    }
    written = [answer([0.5, 1.5, 0.25], [1], **sampled), answer([2.0])]
    dump_of(tmp_path / "d", written)
    opened = Dump.open(tmp_path / "d")
    assert opened.settings["model"] == "m"
    assert opened.total == 2
    for expected, got in zip(written, opened.answers(), strict=True):
        for name, value in vars(expected).items():
            np.testing.assert_array_equal(getattr(got, name), value, err_msg=name)
    names = sorted(path.name for path in (tmp_path / "d").iterdir())
    assert names == ["00000.safetensors", "00001.safetensors", HEADER_FILE]


def test_s2_the_token_that_completes_the_blank_line_belongs_to_the_old_step():
    assert step_indices(np.array([False, True, False, True, True])).tolist() == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"entropy_nats": np.array([0.1], dtype=np.float32)}, "entropy_nats has 1 entries, need 2"),
        ({"entropy_nats": np.array([0.1, -0.1], dtype=np.float32)}, "negative or not finite"),
        ({"entropy_nats": np.array([0.1, np.nan], dtype=np.float32)}, "negative or not finite"),
        ({"rank": np.zeros(2)}, "rank is .* float64, need one dimension of int32"),
        ({"step": np.array([0, 1], dtype=np.int32)}, "does not follow from ends_step"),
        ({"finish_reason": "tired"}, "finish_reason is 'tired'"),
    ],
)
def test_bad_records(change, message):
    with pytest.raises(ValueError, match=message):
        answer([0.1, 0.2], **change)


def test_an_empty_answer_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        answer([])


def start(folder, **settings):
    return Dump.start(folder, {**SETTINGS, "texts_sha256": ["a", "b"], **settings}, MADE_WITH)


def test_a_dump_goes_on_with_its_own_settings_only(tmp_path):
    start(tmp_path / "d", seed=1).write(0, answer([0.5]))
    assert start(tmp_path / "d", seed=1).done() == [0]
    with pytest.raises(ValueError, match=r"other settings \(dtype, seed\)"):
        start(tmp_path / "d", seed=2, dtype="bfloat16")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="neither empty nor a dump"):
        start(tmp_path / "other")
    with pytest.raises(ValueError, match="holds 1 of 2 answers"):
        require_complete(Dump.open(tmp_path / "d"))


def test_a_study_needs_an_answer(tmp_path):
    start(tmp_path / "d")
    with pytest.raises(ValueError, match="holds no answer yet"):
        open_with_answers([tmp_path / "d"])


@pytest.mark.parametrize("content", [b"", b"not a record", b"\x10\0\0\0\0\0\0\0{}"])
def test_a_damaged_answer_is_named(tmp_path, content):
    dump = dump_of(tmp_path / "d", [answer([0.5])])
    (tmp_path / "d" / "00000.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"00000\.safetensors: is no whole answer record"):
        list(dump.answers())


def test_a_folder_that_is_no_dump(tmp_path):
    with pytest.raises(ValueError, match=r"has no dump\.json"):
        Dump.open(tmp_path)
    (tmp_path / HEADER_FILE).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Dump.open(tmp_path)
    (tmp_path / HEADER_FILE).write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="is not of layout 1"):
        Dump.open(tmp_path)


@pytest.mark.parametrize("rule", ["top-20 logprobs, renormalised, nats", "scores at T = 0.6", None])
def test_c2_r4_entropies_of_other_origin_are_refused(tmp_path, rule):
    dump_of(tmp_path / "d", [answer([0.5])])
    header = json.loads((tmp_path / "d" / HEADER_FILE).read_text())
    assert header["entropy"] == ENTROPY_RULE
    (tmp_path / "d" / HEADER_FILE).write_text(json.dumps({**header, "entropy": rule}))
    with pytest.raises(ValueError, match="tempered scores or from top-k logprobs"):
        Dump.open(tmp_path / "d")
