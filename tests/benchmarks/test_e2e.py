"""What benchmarks/e2e.py plans and divides; engines are not started here."""

from __future__ import annotations

import argparse
import json

import pytest

import e2e
import harness
import random_model

SIX = ["bf16", "stock", "nvfp4r", "stock+reset", "nvfp4r+reset", "nvfp4r+head"]


@pytest.mark.parametrize(
    ("batches", "prompts", "limit", "sizes"),
    [
        ([1, 8], [512, 2048], 512, [1, 2, 4, 8, 16, 512]),  # 8 prompts of 512 are above it
        ([3], [512], 512, [1, 2, 4]),
        ([1, 12], [30, 257], 512, [1, 2, 4, 8, 16, 24, 32, 272, 368]),
        ([1, 8], [512], 500, [1, 2, 4, 8, 16]),
        ([1, 2], [498], 500, [1, 2, 4]),
        ([1, 8], [5, 512], 0, [1, 2, 4, 8, 16]),
        ([1, 8], [600], 608, [1, 2, 4, 8, 16, 608]),
    ],
)
def test_prompts_have_the_graphs_of_a_server_with_more_requests(batches, prompts, limit, sizes):
    given = arguments(batches=batches, prompts=prompts, graphs_up_to=limit)
    assert e2e.graph_sizes(given) == sizes


def arguments(**given):
    usual = {
        "impl": list(e2e.IMPLS),
        "batches": [1, 2, 4, 8],
        "prompts": [512],
        "tokens": 160,
        "repeats": 3,
        "temperature": 0.0,
        "activations": "auto",
        "quantised_head": False,
        "reset": None,
        "reset_impl": ["stock", "nvfp4r"],
    }
    return argparse.Namespace(**{**usual, **given})


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, SIX[:3]),
        ({"reset": "folder", "quantised_head": True}, SIX),
        ({"reset": "folder", "impl": ["bf16", "nvfp4r"]}, ["bf16", "nvfp4r", "nvfp4r+reset"]),
        ({"quantised_head": True, "impl": ["stock"]}, ["stock"]),
    ],
)
def test_engines_asked_for(given, names):
    assert e2e.engine_names(arguments(**given)) == names


def test_what_fits_runs_at_once():
    assert e2e.waves(SIX, dict.fromkeys(SIX, 10), 60) == [SIX]


def test_what_does_not_fit_runs_later_beside_what_it_is_compared_with():
    sizes = {name: 68 if name == "bf16" else 26 for name in SIX}
    first, second = e2e.waves(SIX, sizes, 135)
    assert first == ["bf16", "stock", "nvfp4r"]
    assert sorted(second) == sorted(SIX[1:])
    assert sum(sizes[name] for name in second) <= 135


def test_an_engine_that_never_fits_is_refused_by_name():
    gib = 2**30
    with pytest.raises(
        ValueError, match=r"^bf16 needs about 68 GiB, there are 60 GiB; leave it out"
    ):
        e2e.waves(["bf16", "stock"], {"bf16": 68 * gib, "stock": gib}, 60 * gib)


def test_the_32b_models_fit_into_an_h200_as_planned():
    asked = arguments(reset="folder", quantised_head=True, prompts=[512, 2048, 8192])
    sizes = {name: e2e.size("qwen3-32b", name, asked) for name in SIX}
    assert [len(wave) for wave in e2e.waves(SIX, sizes, int(139 * 2**30 * e2e.IN_USE))] == [3, 5]


@pytest.mark.parametrize(
    ("shape", "nvfp4", "head", "billions"),
    [
        # By hand for 8B: 36 (4096 x 128 x 80 + 3 x 4096 x 12288) = 6.946e9 weights in linear
        # layers, and 151936 x 4096 = 0.622e9 in the embedding and again in lm_head.
        ("qwen3-8b", False, False, 2 * 6.946 + 4 * 0.6223),
        ("qwen3-8b", True, False, 9 / 16 * 6.946 + 4 * 0.6223),
        ("qwen3-8b", True, True, 9 / 16 * (6.946 + 0.6223) + 2 * 0.6223),
        ("qwen3-32b", False, False, 65.52),  # 32.76e9 parameters by the model's card
    ],
)
def test_weights_by_the_shape(shape, nvfp4, head, billions):
    found = random_model.weight_bytes(shape, nvfp4=nvfp4, quantised_head=head)
    assert found / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_kv_cache_holds_every_request_in_whole_pages():
    token = 2 * 2 * 36 * 8 * 128  # bytes: keys and values, bf16, layers, heads, dimension
    assert random_model.kv_bytes("qwen3-8b", 8, 688) == int(1.2 * token * (8 * 3 + 1) * 256)
    assert random_model.kv_bytes("qwen3-8b", 1, 256) == int(1.2 * token * 2 * 256)


def test_limits_follow_the_prompts():
    limits = e2e.lengths(arguments(prompts=[512, 2048, 8192]))
    assert limits["max_model_len"] == 8192 + e2e.WARM + 16
    assert limits["max_num_batched_tokens"] == 8192
    assert e2e.lengths(arguments()) == {
        "max_model_len": 512 + 160 + 16,
        "max_num_batched_tokens": 8 * 512,
        "max_num_seqs": 8,
    }
    assert e2e.cases(arguments(batches=[1, 8], prompts=[512, 2048])) == [
        (1, 512),
        (8, 512),
        (1, 2048),
    ]


@pytest.fixture
def fake_engines(monkeypatch, tmp_path):
    """Engines whose tokens take 1 ms, and what is done with them, in order."""
    done: list[tuple[str, ...]] = []

    class FakeEngines:
        def __init__(self, *_):
            self.running: list[str] = []

        def __enter__(self):
            return self

        def __exit__(self, *_):
            done.append(("end", *self.running))

        def start(self, programs):
            done.append(("start", *programs))
            self.running += programs
            return {name: {"layers": 1, "load": {"load_s": 1.0}} for name in programs}

        def stop(self, *names):
            done.append(("stop", *names))
            self.running = [name for name in self.running if name not in names]

        def ask(self, name, question):
            assert name in self.running
            return {"tpot_ms": 1.0, "ttft_ms": 1.0}

    monkeypatch.setattr(e2e, "Engines", FakeEngines)
    monkeypatch.setattr(e2e, "size", lambda shape, name, _: 3 if name == "bf16" else 1)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    return done


def test_what_starts_later_finds_its_plain_engine_running(
    fake_engines, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(e2e, "free_bytes", lambda: int(5 / e2e.IN_USE + 1))
    given = {"batches": [1], "reset": "folder", "quantised_head": True}
    asked = arguments(**given, profile=None, logs=None, start_timeout=1.0)
    e2e.compare("tiny", e2e.plan("tiny", asked), asked)
    later = ("stock+reset", "nvfp4r+reset", "nvfp4r+head")
    assert [call for call in fake_engines if len(call) > 1] == [
        ("start", "bf16", "stock", "nvfp4r"),
        ("stop", "bf16"),
        ("start", *later),
        ("end", "stock", "nvfp4r", *later),
    ]
    assert "bf16, stock, nvfp4r; then stock, stock+reset, nvfp4r" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "e2e.jsonl").read_text().splitlines()]
    assert [line["impl"] for line in lines] == SIX, "each is recorded once"
    assert all(line["over_plain"] == 1.0 for line in lines[3:])


class Asked:
    """Stands for Engines: an engine's n-th answer to a question is its base plus n."""

    def __init__(self, **bases: float) -> None:
        self.bases, self.order = bases, []

    def ask(self, name, question):
        on = ("on",) if question["reset"] else ()
        self.order.append((name, question["batch"], question["prompt"], question["tokens"], *on))
        value = self.bases[name] + self.order.count(self.order[-1])
        if name.endswith("+reset") and not on:
            value -= 2
        figures = {"ttft_ms": 10 * value}
        return figures | ({"tpot_ms": value} if question["tokens"] > 1 else {})


def test_engines_take_turns_and_ratios_are_of_one_round(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    asked = arguments(batches=[1], prompts=[512, 2048], repeats=2, reset="folder")
    names = ["bf16", "stock", "nvfp4r", "nvfp4r+reset"]
    engines = Asked(**dict(zip(names, (29, 19, 9, 10), strict=True)))
    facts = {"layers": 7, "load": {"load_s": 2.0, "start_s": 50.0, "peak_gb": 9.0}}
    for case in e2e.cases(asked):
        times = e2e.measure(engines, names, case, asked)
        for name in names:
            e2e.report("qwen3-8b", name, case, facts, times, asked)
    # The engine with ReSET decodes with it off, too.
    turns = [*((name, 1, 512, 160) for name in names), ("nvfp4r+reset", 1, 512, 160, "on")]
    assert engines.order[:10] == [*turns, *reversed(turns)]
    firsts = [(name, 1, 2048, 1) for name in names[:3]] + [("nvfp4r+reset", 1, 2048, 1, "on")]
    assert engines.order[10:14] == firsts

    lines = [json.loads(line) for line in (tmp_path / "e2e.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * len(names)
    found = {(line["impl"], line["prompt"]): line for line in lines}
    ours = found["nvfp4r", 512]
    # Rounds: bf16 30, 31; stock 20, 21; ours 10, 11; with ReSET 11, 12, and 9, 10 with it off.
    assert ours["over_bf16"] == pytest.approx((10 / 30 + 11 / 31) / 2, rel=1e-3)
    assert ours["over_stock"] == pytest.approx((10 / 20 + 11 / 21) / 2, rel=1e-3)
    assert ours["ttft_over_stock"] == ours["over_stock"]
    assert "over_plain" not in ours
    assert found["nvfp4r+reset", 512]["over_plain"] == pytest.approx((1.1 + 12 / 11) / 2, rel=1e-3)
    assert found["nvfp4r+reset", 512]["over_off"] == pytest.approx((11 / 9 + 12 / 10) / 2, rel=1e-3)
    assert found["nvfp4r+reset", 512]["tpot_ms"] == 11.5
    assert found["nvfp4r+reset", 512]["off_tpot_ms"] == 9.5
    assert "over_off" not in ours
    assert "over_off" not in found["nvfp4r+reset", 2048]
    assert (ours["tpot_ms"], ours["lowest_tpot_ms"], ours["highest_tpot_ms"]) == (10.5, 10, 11)
    assert (ours["ttft_ms"], ours["load_s"], ours["peak_gb"]) == (105.0, 2.0, 9.0)
    assert "tpot_ms" not in found["nvfp4r", 2048]
    assert found["nvfp4r+reset", 512]["temperature"] == 1.0
    assert "over_bf16" not in found["bf16", 512]
