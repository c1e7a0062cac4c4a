"""The run folder: torn lines, a full disk, other settings, another writer."""

from __future__ import annotations

import json
import resource

import pytest

from reset.evaluate.store import (
    SAMPLES,
    SETTINGS,
    RunFolder,
    check_run_target,
    differences,
    read_samples,
)

OLD = {
    "task": "toy",
    "engine": {"name": "scripted", "versions": {"torch": "2.13"}},
    "seeds": [0, 1],
}


def sample(number, text="word"):
    return {"problem_id": f"p{number}", "sample": 0, "text": text}


def opened(path, settings=OLD, resume=True):
    return RunFolder(path, settings, [{"id": "p0"}], resume=resume)


def test_samples_come_back_as_they_went_in(tmp_path):
    texts = ["plain", "é 漢 \u2028 \x00 \ud800", 'quote " and \\ and \n newline']
    with opened(tmp_path / "run") as folder:
        for number, text in enumerate(texts):
            folder.append(sample(number, text))
    assert [one["text"] for one in read_samples(tmp_path / "run")] == texts
    with opened(tmp_path / "run") as folder:
        assert len(folder.samples) == 3


def test_a_line_torn_at_any_byte_is_dropped_and_the_next_one_is_whole(tmp_path):
    with opened(tmp_path / "run") as folder:
        folder.append(sample(0))
        folder.append(sample(1, "é\n"))
    file = tmp_path / "run" / SAMPLES
    content = file.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(first, len(content)):
        file.write_bytes(content[:cut])
        with opened(tmp_path / "run") as folder:
            assert folder.samples == [sample(0)]
            folder.append(sample(1, "é\n"))
        assert file.read_bytes() == content


def test_a_full_disk_keeps_what_was_there_and_says_so(tmp_path):
    """A limit on the size of files cuts a write short, as a full disk does."""
    with opened(tmp_path / "run") as folder:
        folder.append(sample(0))
        kept = (tmp_path / "run" / SAMPLES).read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + 50, limits[1]))
        try:
            with pytest.raises(OSError, match=r"the 1 samples before are kept.*--resume"):
                folder.append(sample(1, "x" * 200))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "run" / SAMPLES).read_bytes() == kept
        folder.append(sample(1))
    assert len(read_samples(tmp_path / "run")) == 2


def test_a_run_is_not_continued_by_accident(tmp_path):
    opened(tmp_path / "run").close()
    with pytest.raises(ValueError, match=r"holds a run already; go on with it \(--resume\)"):
        opened(tmp_path / "run", resume=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "aime25"}, "task was 'toy', is 'aime25'"),
        ({"engine": {"name": "scripted", "versions": {"torch": "2.14"}}}, "engine.versions.torch"),
        ({"seeds": [0]}, "seeds was"),
        ({"top_p": 0.9}, "top_p was None"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, change, message):
    opened(tmp_path / "run").close()
    before = (tmp_path / "run" / SETTINGS).read_bytes()
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "run", {**OLD, **change})
    assert (tmp_path / "run" / SETTINGS).read_bytes() == before


def test_two_writers_are_refused(tmp_path):
    with (
        opened(tmp_path / "run"),
        pytest.raises(ValueError, match="another process is writing to this run"),
    ):
        opened(tmp_path / "run")


def test_a_kill_before_the_settings_leaves_a_folder_that_can_be_used(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / SAMPLES).touch()
    (tmp_path / "run" / ".settings.json.17.partial").write_text("{")
    with opened(tmp_path / "run", resume=False) as folder:
        assert folder.samples == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2: is no sample"),
        ('{"problem_id": "p1"}', "line 2: is no sample"),
        (json.dumps(sample(0)), "line 2: is the same sample as line 1"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, message):
    with opened(tmp_path / "run") as folder:
        folder.append(sample(0))
    with (tmp_path / "run" / SAMPLES).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=message):
        opened(tmp_path / "run")


def test_folders_that_are_no_runs_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds no run but 'notes.txt'"):
        check_run_target(tmp_path, resume=True)
    with pytest.raises(ValueError, match="is a file; --output needs a folder"):
        check_run_target(tmp_path / "notes.txt", resume=False)
    with pytest.raises(ValueError, match="does not exist; create it first"):
        check_run_target(tmp_path / "no" / "run", resume=False)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_damaged_settings_are_named(tmp_path):
    opened(tmp_path / "run").close()
    (tmp_path / "run" / SETTINGS).write_text("{")
    with pytest.raises(ValueError, match=r"settings.json: is damaged"):
        opened(tmp_path / "run")


def test_differences_have_dotted_names():
    found = list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}))
    assert found == [("a.c", 2, 3), ("d", None, 4)]
