"""Text that falls apart at its end, and text that only looks odd."""

from __future__ import annotations

import json
import random

import pytest
from typer.testing import CliRunner

from reset.cli import run as run_command
from reset.evaluate.problems import Answer
from reset.evaluate.soundness import last_third, odd_word_share, soundness
from tests.reset.evaluate.server import Script, chat_reply, serving

SENTENCE = (
    "we add the two numbers then divide by their sum so that every side of this triangle is known "
    "because parallel lines keep angles and the remaining area follows from similar figures"
)


def prose(seed: int, count: int) -> str:
    """Words in an order that does not repeat."""
    return " ".join(random.Random(seed).choices(SENTENCE.split(), k=count))


def said(text: str) -> Answer:
    return Answer(text, "length", len(text.split()))


GOOD = prose(1, 800)
ENDS = {
    "a loop": "wait let me check this again please " * 60,
    "one token": "! " * 400,
    "words that are none": "thе prгblem ntrwkdx qqzzrtl of xkcdqwrt \ufffd\ufffd and " * 50,
}


@pytest.mark.parametrize("end", ENDS)
def test_e5_a_collapse_after_a_long_good_start_is_a_fault(end):
    """What 16 greedy tokens, or the mean over the whole text, would not show."""
    text = f"{GOOD} {ENDS[end]}"
    assert soundness([said(GOOD)] * 4).faults == ()
    assert soundness([said(" ".join(text.split()[:16]))] * 4).faults == ()
    found = soundness([said(text)] * 2 + [said(GOOD)] * 2)
    assert found.faults, found
    assert found.is_long


def test_e5_the_faults_are_told_apart():
    kinds = {
        "a loop": "100% of the answers are caught in a loop",
        "one token": "100% of the answers are blank or one token",
        "words that are none": "of the words at the end are no words",
    }
    for end, message in kinds.items():
        faults = soundness([said(f"{prose(2, 300)} {ENDS[end]}")]).faults
        assert any(message in fault for fault in faults), (end, faults)


def test_a_loop_of_long_rounds_is_seen_in_the_whole():
    round_of_400 = prose(3, 400)
    found = soundness([said(f"{round_of_400} " * 3)])
    assert found.repetition_rate < 0.5 < found.looping


def test_a_loop_is_no_fault_of_a_greedy_arm():
    looping = [said(f"{prose(2, 300)} {ENDS['a loop']}")]
    found = soundness(looping, is_greedy=True)
    assert (found.looping, found.faults) == (1.0, ())
    assert soundness([said(ENDS["one token"])], is_greedy=True).faults


def test_answers_that_are_short_or_blank():
    assert not soundness([said("It is 7.")]).is_long
    assert soundness([said("It is 7.")]).faults == ()
    assert soundness([said("")]).faults
    with pytest.raises(ValueError, match="no answers"):
        soundness([])


def test_the_last_third():
    assert last_third("a b c d e f") == "e f"
    assert last_third("a b\n\nc") == "c"
    assert last_third("a b") == "a b"
    assert last_third("") == ""


@pytest.mark.parametrize(
    "text",
    [
        r"Let $\mathbb{R}^{n}$, $\frac{1}{2}$, $\lfloor x \rfloor$ and $\angle ABC$; lcm, gcd.",
        "def __init__(self, n_lines): return [str(x) for x in range(n_lines)]",
        "设函数f的定义域为R，则f(x)=2x。従ってαはxより大きい。그래서 x는 정수이다.",
        "Пусть x и y — целые числа. Größe, naïve, Łódź, rhythm, Αθήνα, αx.",
        "Llanfairpwllgwyngyll",
        "HTTP XML SQL 1e-5 0x7F",
        "",
    ],
)
def test_words_of_many_kinds_are_words(text):
    assert odd_word_share(text) == 0


@pytest.mark.parametrize("word", ["thе", "rstvwxz", "\ufffd", "a" * 41, "Ñňččřž"])
def test_words_that_are_none(word):
    assert odd_word_share(f"well {word} well") == pytest.approx(1 / 3)


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "q.txt"
    path.write_text("Tell a story.\n\nTell another.\n")
    return path


def check(data, script, *more, code=0):
    arguments = ("--model", "toy", "--engine", script.url, "--data", data, "--num-problems", "2")
    result = CliRunner().invoke(run_command.app, ["check", *map(str, (*arguments, *more))])
    assert result.exit_code == code, result.output
    return result


def test_e5_the_check_samples_long_texts_at_several_temperatures(data):
    """The model of the report: fluent when greedy, falling apart when sampled."""

    def reply(_, body):
        end = "" if body["temperature"] == 0 else " ntrwkdx qqzzrtl" * 100
        return chat_reply(f"{prose(body['seed'], 600)}{end}", "length", 1200)

    with serving(Script(reply)) as script:
        result = check(data, script, code=1)
        temperatures = sorted(body["temperature"] for body in script.bodies)
        assert temperatures == [0, 0, 0.7, 0.7, 1.0, 1.0]
        assert {body["max_tokens"] for body in script.bodies} == {1200}
        numbers = json.loads(check(data, script, "--json", code=1).stdout)
    assert "sound" in result.stdout
    assert "no words" in result.stdout
    assert {name: bool(arm["faults"]) for name, arm in numbers.items()} == {
        **{"greedy": False, "fixed-0.7": True, "fixed-1": True},
    }
    assert len(numbers["greedy"]["texts"]) == 2


def test_a_sound_model_passes_and_short_answers_are_remarked(data, tmp_path):
    preset = tmp_path / "p.json"
    preset.write_text('{"presets": {"m": {"config": {"t_low": 0.1, "tau_0": 0.5}}}}')
    with serving(Script(lambda _, body: chat_reply(prose(body["seed"], 30), tokens=30))) as script:
        result = check(data, script, "--preset", f"{preset}:m")
        assert len(script.bodies) == 8
        assert sum(bool(body.get("vllm_xargs", {}).get("reset")) for body in script.bodies) == 2
        assert "shorter than 400 tokens" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--max-tokens", "0"), "--max-tokens is 0"),
        (("--top-p", "2"), "--top-p is 2"),
        (("--seed", "-1"), "--seed is -1"),
        (("--num-problems", "3"), "holds 2 problems, but 3"),
        (("--preset", "unheard-of"), "no preset is named 'unheard-of'"),
    ],
)
def test_bad_flags_are_one_sentence_before_anything_is_asked(data, arguments, message):
    with serving(Script(lambda *_: chat_reply("x"))) as script:
        result = check(data, script, *arguments, code=2)
        assert not script.bodies
    assert message in " ".join(result.stderr.split())
