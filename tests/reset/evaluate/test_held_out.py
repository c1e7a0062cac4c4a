"""Problems of a calibration: those that can be graded, each once, apart from others."""

from __future__ import annotations

import json

import pytest

from reset.calibrate import text_sha256
from reset.evaluate import held_out
from reset.evaluate.held_out import held_out_task, text_hashes


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def data(tmp_path):
    rows = [{"id": "same", "problem": f"What is {n} + 1?", "answer": n + 1} for n in (0, 1, 1, 2)]
    return write(tmp_path / "data.jsonl", rows)


def questions(task):
    return [problem.question for problem in task.problems]


def test_each_problem_counts_once_in_the_order_of_the_file(data):
    task = held_out_task(str(data), 3, max_tokens=9)
    assert questions(task) == [f"What is {n} + 1?" for n in range(3)]
    assert [problem.answer for problem in task.problems] == ["1", "2", "3"]
    assert len({problem.id for problem in task.problems}) == 3
    assert (task.name, task.max_tokens, task.sources) == ("calibration", 9, (str(data),))


def test_problems_that_belong_elsewhere_are_left_out(data):
    apart = {text_sha256("  What is 1 + 1?\n")}  # white space at the ends is no other problem
    task = held_out_task(str(data), 2, max_tokens=9, apart_from=apart)
    assert questions(task) == ["What is 0 + 1?", "What is 2 + 1?"]
    with pytest.raises(ValueError, match="holds 2 problems with answers besides those left out"):
        held_out_task(str(data), 3, max_tokens=9, apart_from=apart)


def test_every_text_of_an_evaluation_counts_whatever_its_field(tmp_path):
    rows = [{"Question": "Which?", "Correct Answer": "this"}, {"question_content": "Sort!", "n": 3}]
    found = text_hashes([write(tmp_path / "test.jsonl", rows)])
    assert {text_sha256("Which?"), text_sha256("Sort!")} <= found


def test_other_tasks_read_their_own_records(tmp_path):
    path = write(tmp_path / "g.jsonl", [{"question": "q", "answer": "so #### 1,200"}])
    assert held_out_task(str(path), 1, max_tokens=9, task="gsm8k").problems[0].answer == "1200"
    with pytest.raises(ValueError, match="task is 'maths'"):
        held_out_task(str(path), 1, max_tokens=9, task="maths")


def test_a_line_without_an_answer_is_named(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"problem": "p", "answer": "1"}, {"problem": "q"}])
    with pytest.raises(ValueError, match=r'd.jsonl, line 2: has no "answer"'):
        held_out_task(str(path), 2, max_tokens=9)


@pytest.mark.parametrize("name", ["problems.txt", "problems.csv"])
def test_files_without_answers_are_refused(tmp_path, name):
    (tmp_path / name).write_text("What is 1 + 1?\n")
    with pytest.raises(ValueError, match=r"need a \.jsonl file with problems and answers"):
        held_out_task(str(tmp_path / name), 1, max_tokens=9)


def test_rows_of_a_hub_set_without_a_number_are_passed_over(monkeypatch):
    """Those of NuminaMath have proofs, letters and sets as answers too."""
    rows = [
        {"problem": "Prove it.", "answer": "proof"},
        {"problem": "Which?", "answer": "B"},
        {"problem": "How many?", "answer": "033"},
        {"problem": "How much?", "answer": r"\frac{1}{2}"},
        {"problem": "None.", "answer": None},
        {"problem": "How far?", "answer": "-2.5"},
    ]
    monkeypatch.setattr(
        held_out, "hub_rows", lambda name: ((row, f"{name}, record") for row in rows)
    )
    task = held_out_task("owner/name", 2, max_tokens=9)
    assert questions(task) == ["How many?", "How far?"]
    assert task.sources == ("owner/name",)
