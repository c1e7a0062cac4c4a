"""Servers: what is sent, what is read, faults that pass and faults that do not."""

from __future__ import annotations

import pytest

from reset.config import ReSETConfig
from reset.evaluate.engines import EngineStoppedError, Request
from reset.evaluate.engines.endpoint import KEY_VARIABLE, HttpEngine
from tests.reset.evaluate.scripted import FIXED
from tests.reset.evaluate.server import Script, chat_reply, serving

RESET = ReSETConfig(t_low=0.3, tau_0=0.6)


def request(number=0, config=FIXED, **changes):
    asked = (("user", f"question {number}"),)
    return Request(asked, seed=number, config=config, max_tokens=50, **changes)


def engine(script, **changes):
    settings = {"concurrency": 2, "retries": 3, "backoff_s": 0.001, "timeout_s": 20.0}
    return HttpEngine(script.url, "toy", **{**settings, **changes})


def echo(_, body):
    return chat_reply(f"reply to {body['messages'][-1]['content']}")


def answers(script, requests, **changes):
    return dict(engine(script, **changes).generate(requests))


def test_every_request_gets_its_own_answer():
    with serving(Script(echo)) as script:
        found = answers(script, [request(number) for number in range(12)])
    assert {position: answer.text for position, answer in found.items()} == {
        number: f"reply to question {number}" for number in range(12)
    }


def test_a_fixed_temperature_is_sent_as_such_and_switches_reset_off():
    with serving(Script(echo)) as script:
        answers(script, [request(7, top_p=0.9, min_p=0.05)], thinking=False)
    (body,) = script.bodies
    assert body == {
        "model": "toy",
        "messages": [{"role": "user", "content": "question 7"}],
        "max_tokens": 50,
        "seed": 7,
        "top_p": 0.9,
        "temperature": 0.6,
        "top_k": -1,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "vllm_xargs": {"reset": 0},
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_another_server_gets_nothing_that_it_may_not_know():
    with serving(Script(echo, owner="someone")) as script:
        answers(script, [request(1)])
    assert sorted(script.bodies[0]) == [
        *("max_tokens", "messages", "model", "seed", "temperature", "top_p")
    ]


def test_a_policy_is_sent_whole():
    with serving(Script(echo)) as script:
        answers(script, [request(0, RESET)])
    sent = script.bodies[0]["vllm_xargs"]
    assert sent == {"reset": 1, **RESET.to_dict()}
    assert script.bodies[0]["temperature"] == 1.0


@pytest.mark.parametrize("server", [{"counts_reset": False}, {"owner": "someone"}])
def test_a_server_that_ignores_the_policy_is_found_out(server):
    """Both answer as if all were well; a score of theirs would be called ReSET's and be another."""
    with (
        serving(Script(echo, **server)) as script,
        pytest.raises(ValueError, match="no request had ReSET on"),
    ):
        answers(script, [request(0, RESET)])


def test_thoughts_that_come_apart_are_part_of_the_answer():
    def reply(number, _):
        name = ("reasoning_content", "reasoning")[number]
        return chat_reply("so 7", **{name: "2 + 5"})

    with serving(Script(reply)) as script:
        found = answers(script, [request(0), request(1)], concurrency=1)
    assert {answer.text for answer in found.values()} == {"<think>\n2 + 5\n</think>\n\nso 7"}


def test_a_model_that_answers_nothing_gives_an_empty_text():
    with serving(Script(lambda *_: chat_reply(None, "length", 50))) as script:
        (answer,) = answers(script, [request()]).values()
    assert (answer.text, answer.finish_reason, answer.tokens) == ("", "length", 50)


@pytest.mark.parametrize("fault", [(500, {"error": "oops"}), (503, "busy"), (429, ""), (200, "{")])
def test_faults_that_pass_are_tried_again(fault):
    with serving(Script(lambda n, body: fault if n < 3 else echo(n, body))) as script:
        found = answers(script, [request()])
    assert found[0].text == "reply to question 0"
    assert len(script.bodies) == 4


def test_a_server_that_stays_broken_ends_the_run_after_what_was_there():
    def reply(number, body):
        return echo(number, body) if number < 3 else (500, {"error": "out of memory"})

    with serving(Script(reply)) as script:
        coming = engine(script, concurrency=1).generate([request(n) for n in range(9)])
        assert [next(coming)[0] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(EngineStoppedError, match=r"out of memory.*tried 4 times.*--resume"):
            next(coming)
        assert len(script.bodies) == 3 + 4  # the others were not asked for


def test_a_timeout_is_a_fault_that_passes():
    with (
        serving(Script(echo, delay_s=1.0)) as script,
        pytest.raises(EngineStoppedError, match=r"timed out.*tried 2 times"),
    ):
        answers(script, [request()], timeout_s=0.2, retries=1)


def test_a_request_that_is_refused_is_not_tried_again():
    with serving(Script(lambda *_: (400, {"error": "max_tokens is too large"}))) as script:
        with pytest.raises(ValueError, match=r"HTTP 400: .*max_tokens is too large"):
            answers(script, [request()])
        assert len(script.bodies) == 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (chat_reply("x", "content_filter"), "finish_reason 'content_filter'"),
        ((200, {"choices": []}), "as the OpenAI chat protocol asks"),
        ((200, [1]), "no JSON object"),
    ],
)
def test_replies_that_cannot_be_scored_are_refused(reply, message):
    with (
        serving(Script(lambda *_: reply)) as script,
        pytest.raises((EngineStoppedError, ValueError), match=message),
    ):
        answers(script, [request()])


def test_a_model_that_is_not_served_is_refused_with_those_that_are():
    with (
        serving(Script(echo)) as script,
        pytest.raises(ValueError, match="serves toy, not 'other'"),
    ):
        HttpEngine(script.url, "other")


def test_no_server_at_all():
    with pytest.raises(EngineStoppedError, match=r"tried 1 times"):
        HttpEngine("http://127.0.0.1:9/v1", "toy", retries=0)


def test_the_key_is_sent_and_not_told(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    with serving(Script(echo)) as script:
        served = engine(script)
        dict(served.generate([request()]))
    assert script.keys == ["Bearer sesame"]
    assert "sesame" not in str(served.describe())


def test_the_server_is_described_without_its_address():
    with serving(Script(echo)) as script:
        about = engine(script).describe()
    assert about["server"] == {"owned_by": "vllm", "root": "/models/toy", "version": "0.32.0"}
    assert "127.0.0.1" not in str(about)
