"""Problems and calibration texts from files and hub data sets."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from reset.texts import read_problems, read_texts

RECORDS = [
    {"question": "1+1?", "answer": "2"},
    {"problem": "2+2?", "solution": "4"},
    {"prompt": "no answer", "answer": 7},
]


def lines_file(folder, records):
    path = folder / "data.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return str(path)


def test_problems_come_alone_and_texts_with_their_answers(tmp_path):
    path = lines_file(tmp_path, RECORDS)
    assert read_problems(path, 3) == ["1+1?", "2+2?", "no answer"]
    assert read_problems(path, 2) == ["1+1?", "2+2?"]
    assert read_texts(path, 128) == ["1+1?\n\n2", "2+2?\n\n4", "no answer"]
    assert read_texts(lines_file(tmp_path, [{"text": "plain"}, *RECORDS]), 1) == ["plain"]


@pytest.mark.parametrize("read", [read_problems, read_texts])
def test_a_text_file_is_cut_at_blank_lines(tmp_path, read):
    path = tmp_path / "texts.txt"
    path.write_text("One and two make three.\nSo they do.\n\n\nFour is even.\n \nFive is odd.\n")
    expected = ["One and two make three.\nSo they do.", "Four is even.", "Five is odd."]
    assert read(str(path), 3) == expected
    assert read(str(path), 2) == expected[:2]


@pytest.mark.parametrize(
    ("read", "name", "content", "message"),
    [
        (read_problems, "a.jsonl", '{"prompt": "q"}\n', "holds 1 problems, but 2 were asked for"),
        (read_problems, "a.jsonl", '{"prompt": "q"}\n{"text": "x"}\n', "line 2: has no problem"),
        (read_problems, "a.jsonl", '{"prompt": "q"}\n{oops\n', "line 2: is not JSON"),
        (read_problems, "a.txt", "one\n", "ask for fewer"),
        (read_texts, "a.jsonl", '{"text": "x"}\n{"body": "y"}\n', r"line 2: has no text, need"),
        (read_texts, "a.jsonl", "[1]\n", r"a\.jsonl, line 1: has no text, need"),
        (read_texts, "a.jsonl", "{\n", r"a\.jsonl, line 1: is not JSON"),
        (read_texts, "a.txt", " \n\n", r"a\.txt: holds no text"),
        (read_texts, "a.txt", b"caf\xe9", r"a\.txt: is not UTF-8 text"),
        (read_texts, "a.csv", "x", r"a\.csv: need a \.txt or \.jsonl file"),
    ],
)
def test_bad_files_are_named(tmp_path, read, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read(str(path), 2)


@pytest.mark.parametrize("read", [read_problems, read_texts])
def test_files_and_counts_that_cannot_be(tmp_path, read):
    with pytest.raises(OSError, match=r"No such file.*gone\.txt"):
        read(str(tmp_path / "gone.txt"), 1)
    with pytest.raises(ValueError, match=r"any\.txt: 0 texts asked for, need at least 1"):
        read("any.txt", 0)


@pytest.mark.parametrize("read", [read_problems, read_texts])
def test_a_data_set_without_the_package_names_the_extra(monkeypatch, read):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'reset-decoding\[eval\]'"):
        read("owner/name", 1)


def test_a_data_set_is_read_with_its_config_and_split(monkeypatch):
    def load(name, config, *, split, streaming):
        assert streaming
        return iter([{"question": f"{name} {config} {split}"}, {"other": ""}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    assert read_texts("owner/name", 1) == ["owner/name None train"]
    assert read_texts("owner/name:main:test", 1) == ["owner/name main test"]
    with pytest.raises(ValueError, match="owner/name, record 1: has no problem"):
        read_problems("owner/name", 2)


def test_a_data_set_that_cannot_be_fetched_is_explained(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=fail))
    with pytest.raises(OSError, match=r"owner/name: .* no hub data set .*no network.*local file"):
        read_texts("owner/name", 1)
