"""Tasks from files and from the hub: what a record means, and which ones are refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from reset.evaluate.graders import Grader
from reset.evaluate.graders.hidden_tests import encode_hidden, load_tests
from reset.evaluate.problems import Answer
from reset.evaluate.runner import graded
from reset.evaluate.tasks import TASKS, load_task


def write(folder, *records, name="t.jsonl"):
    path = folder / name
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def hub_of(*records):
    return lambda source: [(record, f"{source}, row {n}") for n, record in enumerate(records)]


def gpqa(number):
    wrong = {f"Incorrect Answer {k}": f"wrong {number} {k}" for k in (1, 2, 3)}
    return {"Question": f"Question {number}?", "Correct Answer": f"right {number}", **wrong}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("204", "204"),
        ("033", "33"),
        ("000", "0"),
        (r"336^\circ", "336"),
        ("080 or 081 (both were accepted)", "80 or 81"),
        (7, "7"),
    ],
)
def test_h3_aime_answers_are_integers_however_they_are_written(tmp_path, text, answer):
    path = write(tmp_path, {"id": "x", "problem": "Find n.", "answer": text})
    (problem,) = load_task("aime25", [path]).problems
    assert (problem.kind, problem.answer) == ("integer", answer)


def test_h3_the_checksum_changes_with_one_answer_and_not_with_the_place(tmp_path):
    records = [{"problem": f"Problem {n}", "answer": str(n)} for n in range(3)]
    one = load_task("aime25", [write(tmp_path, *records)])
    moved = load_task("aime25", [write(tmp_path, "", *records, name="other.jsonl")])
    records[2]["answer"] = "385"
    changed = load_task("aime25", [write(tmp_path, *records)])
    assert one.sha256 == moved.sha256 != changed.sha256


def test_aime_from_several_files_whose_ids_repeat(tmp_path):
    first = write(tmp_path, *({"id": "I", "problem": f"A{n}", "answer": "1"} for n in range(3)))
    second = write(tmp_path, {"id": "I", "problem": "B", "answer": "2"}, name="b.jsonl")
    task = load_task("aime120", [first, second])
    assert len({problem.id for problem in task.problems}) == 4
    assert task.expected == 120
    assert task.sources == (str(first), str(second))
    alone = load_task("aime90", [second]).problems[0]
    assert alone.id == task.problems[3].id


def test_h5_each_letter_is_right_about_equally_often_and_always_the_same():
    rows = [gpqa(number) for number in range(198)]
    task = load_task("gpqa_diamond", hub=hub_of(*rows))
    counts = Counter(problem.answer for problem in task.problems)
    assert sorted(counts) == list("ABCD")
    assert all(30 <= count <= 70 for count in counts.values())
    again = load_task("gpqa_diamond", hub=hub_of(*reversed(rows)))
    by_id = {problem.id: problem for problem in again.problems}
    for problem, row in zip(task.problems, rows, strict=True):
        assert problem.choices["ABCD".index(problem.answer)] == row["Correct Answer"]
        assert replace(by_id[problem.id], source="") == replace(problem, source="")


def test_gsm8k_takes_the_number_behind_the_marks():
    rows = [
        {"question": "How many?", "answer": "He has 2 <<1+1=2>>.\n#### 1,450,000"},
        {"question": "How cold?", "answer": "#### -10"},
    ]
    problems = load_task("gsm8k", hub=hub_of(*rows)).problems
    assert [problem.answer for problem in problems] == ["1450000", "-10"]


def lcb_row(hidden):
    cases = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    return {
        "question_id": "3510",
        "question_content": "Add two numbers.",
        "starter_code": "class Solution:\n    def add(self, a, b):",
        "public_test_cases": json.dumps(cases),
        "private_test_cases": hidden,
        "metadata": json.dumps({"func_name": "add"}),
    }


def test_r1_hidden_tests_are_part_of_a_livecodebench_problem():
    case = {"input": "2\n2", "output": "4", "testtype": "functional"}
    row = lcb_row(encode_hidden(json.dumps([case, case])))
    (problem,) = load_task("livecodebench", hub=hub_of(row)).problems
    assert len(load_tests(problem).cases) == 3
    assert problem.id == "3510"


@pytest.mark.parametrize("hidden", ["", "bm90IHpsaWI="])
def test_r1_a_row_without_readable_hidden_tests_is_refused(hidden):
    with pytest.raises(ValueError, match=r"test6.jsonl, row 0: .*private_test_cases"):
        load_task("livecodebench", hub=hub_of(lcb_row(hidden)))


def test_jsonl_tells_kinds_and_names_problems_by_place_or_content(tmp_path):
    path = write(
        tmp_path,
        {"id": "a", "question": "1 + 1?", "answer": 2},
        {"prompt": "Which?", "choices": ["no", "yes"], "answer": "B"},
        {"problem": "Whole?", "answer": "-3", "kind": "integer"},
    )
    problems = load_task("jsonl", [path]).problems
    assert [problem.kind for problem in problems] == ["maths", "choice", "integer"]
    assert [problem.id for problem in problems] == ["a", f"{path}, line 2", f"{path}, line 3"]
    named = load_task("jsonl", [path], ids="content").problems
    assert all(problem.id.startswith("problem-") for problem in named)


@pytest.mark.parametrize(
    "record",
    [
        {"answer": [80, "081"]},
        {"answer": "080 or 081 (both were accepted)"},
        {"answer": "080 or 81", "kind": "integer"},
    ],
)
def test_any_of_several_accepted_answers_is_right(tmp_path, record):
    (problem,) = load_task(
        "jsonl", [write(tmp_path, {"id": "1", "question": "Q", **record})]
    ).problems
    assert (problem.kind, problem.answer) == ("integer", "80 or 81")
    with Grader() as grader:
        for number, right in ((80, True), (81, True), (82, False)):
            answer = Answer(rf"So \boxed{{{number}}}.", "stop", 5)
            assert graded(answer, problem, grader.grade).correct is right


GOOD = {"id": "1", "question": "Q", "answer": "1"}
TARGET = {"question": "Make 26.", "kind": "target", "numbers": [2, 3, 8, 10], "answer": 26}


def test_a_number_target_has_numbers_and_is_graded_by_computing(tmp_path):
    (problem,) = load_task("jsonl", [write(tmp_path, TARGET)]).problems
    assert problem.kind == "target"
    with Grader() as grader:
        grader.check([problem])
        for text, right in ((r"\boxed{8x2+10}", True), (r"\boxed{26}", False)):
            assert graded(Answer(text, "stop", 5), problem, grader.grade).correct is right


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([GOOD, {"id": "2", "answer": "1"}], 'line 2: has no "problem" or "question" or "prompt"'),
        ([GOOD, {"id": "2", "question": "R"}], 'line 2: has no "answer"'),
        ([GOOD, {"id": "2", "question": "R", "answer": " "}], 'line 2: has no "answer"'),
        ([GOOD, {"id": "2", "question": "R", "answer": True}], 'line 2: has no "answer"'),
        ([GOOD, "", '{"id": '], "line 3: is not JSON"),
        ([GOOD, "[1]"], "line 2: is a list, need a JSON object"),
        ([GOOD, {**GOOD, "question": "R"}], "line 2: has the id '1' of .*line 1; .*--ids content"),
        ([GOOD, {**GOOD, "id": "2"}], "line 2: is the same problem as .*line 1"),
        ([""], "holds no problem; need at least one"),
        ([{**GOOD, "kind": "essay"}], "line 1: \"kind\" is 'essay'"),
        ([{**GOOD, "kind": "integer", "answer": "x"}], "need an integer"),
        ([{**GOOD, "answer": "2 or 3"}], "if each is right, write a list; if both belong to the"),
        ([{**GOOD, "answer": ["1/2", "3"]}], "a list holds every integer that is accepted"),
        ([{**GOOD, "answer": []}], "a list holds every integer that is accepted"),
        ([{**GOOD, "answer": [True]}], 'line 1: has no "answer"'),
        ([{**GOOD, "choices": ["a", "b"], "answer": "C"}], "need the letter of one of 2 choices"),
        ([{**GOOD, "choices": "ab"}], '"choices" must be a list of texts'),
        ([{**GOOD, "kind": "code"}], "line 1: problem 1: has no tests"),
        ([{**GOOD, "kind": "target"}], 'line 1: "numbers" is None; .* list of the numbers given'),
        ([{**TARGET, "numbers": []}], "line 1: numbers is empty"),
        ([{**TARGET, "numbers": [0]}], "line 1: number is 0; need 1 to"),
        ([{**TARGET, "answer": "26"}], "line 1: target is '26'; need an integer"),
    ],
)
def test_a_bad_task_file_is_refused_with_its_line(tmp_path, records, message):
    with pytest.raises(ValueError, match=message):
        load_task("jsonl", [write(tmp_path, *records)])


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("aime25", {"problem": "P", "answer": "1000"}, "need an integer from 0 to 999"),
        ("aime25", {"problem": "P", "answer": "about 3"}, "need an integer from 0 to 999"),
        ("gsm8k", {"question": "Q", "answer": "3"}, "no number behind ####"),
        ("gpqa_diamond", {**gpqa(1), "Correct Answer": "wrong 1 2"}, "two of the four options"),
    ],
)
def test_a_wrong_answer_field_is_refused(name, record, message):
    with pytest.raises(ValueError, match=message):
        load_task(name, hub=hub_of(record))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "aime26"}, "task is 'aime26'; it must be one of aime120"),
        ({"name": "jsonl"}, "task jsonl needs --data"),
        ({"name": "gsm8k", "max_problems": 0}, "max_problems is 0"),
        ({"name": "gsm8k", "hub": hub_of()}, "holds no problem"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_task(**arguments)


def test_max_problems_keeps_the_first(tmp_path):
    path = write(tmp_path, *({**GOOD, "id": str(n), "question": f"Q{n}"} for n in range(5)))
    task = load_task("jsonl", [path], max_problems=2)
    assert [problem.id for problem in task.problems] == ["0", "1"]


def test_files_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"need a .jsonl file"):
        load_task("jsonl", [tmp_path / "a.csv"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_task("jsonl", [tmp_path / "latin.jsonl"])
    with pytest.raises(OSError, match="No such file"):
        load_task("jsonl", [tmp_path / "none.jsonl"])


def test_the_hub_being_away_is_said_with_a_way_out():
    """The tests run with the hub switched off."""
    for name in TASKS[:-1]:
        with pytest.raises(OSError, match=r"--data FILE\.jsonl"):
            load_task(name)
