"""Dumps of a toy model: decoded and given sequences agree, and an interruption leaves no trace."""

import json
import os

import numpy as np
import pytest
import torch

from reset.analyze.collect import (
    Sampling,
    dump_answers,
    dump_given,
    sequences_of_dump,
    sequences_of_texts,
)
from reset.analyze.dump import HEADER_FILE, Dump
from reset.config import ReSETConfig
from reset.engine import load_engine
from tests.reset.toy_model import save_toy

PROBLEMS = ["a b", "what is this?", "one\ntwo"]
POLICY = ReSETConfig(t_low=0.3, tau_0=2.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return load_engine(str(save_toy(tmp_path_factory.mktemp("toy"))))


def free(engine, folder, policy=POLICY, batch_size=1, advance=lambda done: None, **changes):
    values = {"max_tokens": 40, "top_p": 0.9, "seed": 5, "batch_size": batch_size, **changes}
    sampling = Sampling(policy, **values)
    return dump_answers(engine, folder, PROBLEMS, sampling, data="p.txt", advance=advance)


@pytest.fixture(scope="module")
def decoded(engine, tmp_path_factory):
    return free(engine, tmp_path_factory.mktemp("dumps") / "free")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("policy", [POLICY, ReSETConfig(policy="fixed", base_temp=0.3)])
def test_c1_r4_entropies_are_raw_whatever_the_sampling(engine, tmp_path, policy):
    """A temperature of 0.3 and top-p 0.5 leave no mark on the record."""
    dump = free(engine, tmp_path / "free", policy, top_p=0.5)
    with torch.no_grad():
        for answer in dump.answers():
            sequence = [*answer.prompt_ids.tolist(), *answer.token_id.tolist()]
            logits = engine.model(torch.tensor([sequence])).logits[0].double()
            logits = logits[len(answer.prompt_ids) - 1 : -1]
            raw, tempered = (
                torch.distributions.Categorical(logits=z).entropy().numpy()
                for z in (logits, logits / 0.3)
            )
            # float32 sums of a two-layer model, in another order
            assert answer.entropy_nats == pytest.approx(raw, abs=1e-3)
            assert answer.sampler_entropy_nats == pytest.approx(raw, abs=1e-3)
            assert np.abs(tempered - raw).max() > 0.1


def test_the_record_says_what_was_drawn(engine, decoded):
    for answer in decoded.answers():
        assert 1 <= len(answer) <= 40
        assert set(answer.temperature) <= {np.float32(0.3), np.float32(1.0)}
        below = answer.temperature < 1
        assert below.any()
        stopped = answer.token_id[-1] in engine.eos_token_ids
        assert answer.finish_reason == ("stop" if stopped else "length")
    assert decoded.settings["policy"] == POLICY.to_dict()
    assert decoded.settings["mode"] == "free"
    assert len(decoded.settings["model_sha256"]) == 64


def test_teacher_forcing_the_own_answers_gives_the_same_records(engine, decoded, tmp_path):
    given = sequences_of_dump(engine, decoded.folder, None)
    seen = []
    forced = dump_given(engine, tmp_path / "forced", given, None, advance=seen.append)
    assert seen == [1, 2, 3]
    for old, new in zip(decoded.answers(), forced.answers(), strict=True):
        assert new.finish_reason == "given"
        assert new.temperature is None
        names = ("prompt_ids", "token_id", "entropy_nats", "logprob_nats", "rank", "step")
        for name in names:
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name), err_msg=name)


class KilledError(Exception):
    """What stands for a kill."""


@pytest.mark.parametrize("batch_size", [1, 2])
def test_an_interrupted_dump_ends_as_an_undisturbed_one(engine, tmp_path, batch_size):
    whole = contents(free(engine, tmp_path / "whole", batch_size=batch_size).folder)

    def interrupt(done):
        raise KilledError

    for _ in range(2):  # each time one answer is added; an unfinished batch is done again
        with pytest.raises(KilledError):
            free(engine, tmp_path / "cut", batch_size=batch_size, advance=interrupt)
    (tmp_path / "cut" / f".00002.safetensors.{os.getpid()}.partial").write_bytes(b"torn")
    added = []
    free(engine, tmp_path / "cut", batch_size=batch_size, advance=added.append)
    assert contents(tmp_path / "cut") == whole
    assert added
    added.clear()
    free(engine, tmp_path / "cut", batch_size=batch_size, advance=added.append)
    assert added == []  # nothing is done twice


def test_other_settings_do_not_mix(engine, decoded):
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
        free(engine, decoded.folder, seed=6)
    with pytest.raises(ValueError, match=r"other settings \(policy\)"):
        free(engine, decoded.folder, ReSETConfig(t_low=0.3, tau_0=1.0))


def test_texts_are_scored_from_their_second_token_on(engine, tmp_path):
    text = "one two.\n\nthree\n\nfour"
    source = tmp_path / "texts.jsonl"
    source.write_text(json.dumps({"text": text}) + "\n")
    given = sequences_of_texts(engine, str(source), 5)
    dump = dump_given(engine, tmp_path / "d", given, None, advance=lambda done: None)
    (answer,) = dump.answers()
    ids = engine.tokenizer(text)["input_ids"]
    assert [*answer.prompt_ids, *answer.token_id] == ids
    pieces = [engine.tokenizer.decode([token]) for token in answer.token_id]
    steps = ["".join(p for p, s in zip(pieces, answer.step, strict=True) if s == n) for n in (0, 1)]
    assert steps == ["ne two.\n\n", "three\n\n"]
    assert answer.step.max() == 2


def test_max_tokens_cuts_given_sequences(engine, decoded, tmp_path):
    given = sequences_of_dump(engine, decoded.folder, 2)
    dump = dump_given(engine, tmp_path / "d", given, 3, advance=lambda done: None)
    whole = [len(answer) for answer in decoded.answers()][:2]
    assert [len(answer) for answer in dump.answers()] == [min(length, 3) for length in whole]
    assert max(whole) > 3


def test_a_source_of_another_vocabulary_is_refused(engine, decoded, tmp_path):
    header = json.loads((decoded.folder / HEADER_FILE).read_text())
    header["settings"]["vocabulary_sha256"] = "1" * 64
    (tmp_path / HEADER_FILE).write_text(json.dumps(header))
    for name, content in contents(decoded.folder).items():
        if name != HEADER_FILE:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="made with another vocabulary"):
        sequences_of_dump(engine, tmp_path, None)


def test_bad_sources(engine, decoded, tmp_path):
    with pytest.raises(ValueError, match="holds 3 sequences, but 4 were asked for"):
        sequences_of_dump(engine, decoded.folder, 4)
    short = tmp_path / "short.txt"
    short.write_text("a\n")
    with pytest.raises(ValueError, match="text 0 has 1 tokens, need at least 2"):
        sequences_of_texts(engine, str(short), 1)
    Dump.start(tmp_path / "part", dict(decoded.settings), {})
    with pytest.raises(ValueError, match="holds 0 of 3 answers"):
        sequences_of_dump(engine, tmp_path / "part", None)


def test_the_problem_with_bad_logits_is_named(engine, tmp_path):
    source = tmp_path / "texts.txt"
    source.write_text("abc\n\nxyz\n")
    given = sequences_of_texts(engine, str(source), 2)
    weight = engine.model.get_input_embeddings().weight
    token = engine.tokenizer("y")["input_ids"][0]
    kept = weight[token].clone()
    with torch.no_grad():
        weight[token] = torch.nan
        try:
            with pytest.raises(ValueError, match="sequence 1: the logits at output position 0 "):
                dump_given(engine, tmp_path / "d", given, None, advance=lambda done: None)
        finally:
            weight[token] = kept
    assert Dump.open(tmp_path / "d").done() == [0]
