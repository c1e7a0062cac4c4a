"""Preset files of one calibration and of several, whatever is in them."""

from __future__ import annotations

import json

import pytest

from reset import ReSETConfig
from reset.presets import (
    check_entry_target,
    has_entry,
    read_entry,
    split_preset,
    used_problems,
    write_entry,
)

ONE = {"config": {"t_low": 0.1, "tau_0": 0.5}}
TWO = {"config": {"policy": "fixed", "base_temp": 0.3, "tau_0": 0.7}}


@pytest.fixture
def several(tmp_path):
    path = tmp_path / "presets.json"
    write_entry(path, ONE, "one")
    write_entry(path, TWO, "models/two")
    return path


def test_several_models_in_one_file(several):
    assert json.loads(several.read_text()) == {"presets": {"one": ONE, "models/two": TWO}}
    assert ReSETConfig.from_file(several, name="one") == ReSETConfig(t_low=0.1, tau_0=0.5)
    two = ReSETConfig.from_file(several, name="models/two")
    assert (two.policy, two.base_temp) == ("fixed", 0.3)
    assert ReSETConfig.from_file(several, name="one", t_high=0.6).t_high == 0.6
    assert list(several.parent.iterdir()) == [several]


def test_a_name_that_is_there_is_replaced_and_the_others_stay(several):
    write_entry(several, TWO, "one")
    assert read_entry(several, "one") == TWO
    assert read_entry(several, "models/two") == TWO


def test_has_entry(several, tmp_path):
    assert has_entry(several, "one")
    assert not has_entry(several, "three")
    assert not has_entry(tmp_path / "none.json", "one")
    assert not has_entry(tmp_path / "none.json")


def test_file_and_name_are_told_apart(several, tmp_path):
    assert split_preset(str(several)) == (several, None)
    assert split_preset(f"{several}:one") == (several, "one")
    assert split_preset("Qwen3-8B") is None
    assert split_preset(f"{several}:") is None
    assert split_preset(str(tmp_path / "none.json:one")) is None
    with_colon = tmp_path / "a:b"
    with_colon.write_text("{}")
    assert split_preset(str(with_colon)) == (with_colon, None)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", None, "is not JSON"),
        ("", "one", "is not JSON"),
        (b"\xff\xfe\x00", None, "is not JSON .*utf-8"),
        ("[" * 100_000, None, "nested too deep"),
        ("[]", None, 'no "config" object'),
        ("null", "one", 'no "config" object'),
        ('{"config": [1]}', None, 'no "config" object'),
        ('{"config": {"tau_0": NaN}}', None, "NaN is no JSON number"),
        ('{"config": {}, "config": {}}', None, "the key 'config' is there twice"),
        ('{"presets": {"a": {}, "a": {}}}', "a", "the key 'a' is there twice"),
        ('{"config": {"tau_0": ' + "1" * 5000 + "}}", None, "is not JSON"),
        ('{"presets": {"a": {"config": {}}}}', None, "by name .a.; pass .*f.json:NAME"),
        ('{"presets": {"a": {"config": {}}}}', "b", "holds no preset 'b', but these: a"),
        ('{"presets": {}}', "b", "holds no preset 'b', but these: none"),
        ('{"presets": ["a"]}', "a", 'no "presets" object'),
        ('{"config": {}}', "a", 'no "presets" object'),
        ('{"presets": {"a": {"tau_0": 1}}}', "a", "preset 'a' has no \"config\" object"),
        ('{"presets": {"a": "config"}}', "a", "preset 'a' has no \"config\" object"),
    ],
)
def test_files_that_are_none_are_named(tmp_path, content, name, message):
    path = tmp_path / "f.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        read_entry(path, name)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"t_low": "0.1", "tau_0": 0.5}, TypeError, "t_low is '0.1'; it must be a number"),
        ({"t_low": 0.1, "tau_0": 1e400}, ValueError, "Infinity is no JSON number"),
        ({"t_low": 0.1, "tau_0": 0.5, "rm": "-rf"}, ValueError, r"unknown field\(s\) rm"),
        ({"t_low": 0.1, "tau_0": 0.5, "policy": ["fixed"]}, ValueError, "policy is"),
        ({"t_low": 0.1, "tau_0": True}, TypeError, "tau_0 is True"),
    ],
)
def test_values_that_are_none_are_named(tmp_path, config, error, message):
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"config": config}))
    with pytest.raises(error, match=message):
        ReSETConfig.from_file(path)


def test_a_calibration_that_recommends_nothing_says_so_where_t_low_is_needed(tmp_path):
    path = tmp_path / "c.json"
    write_entry(path, {"config": {"tau_0": 0.5}, "recommendation": "no difference shown: ..."})
    with pytest.raises(ValueError, match='no t_low: its search ended in "no difference shown'):
        ReSETConfig.from_file(path)
    assert ReSETConfig.from_file(path, t_low=0.1).tau_0 == 0.5
    assert ReSETConfig.from_file(path, policy="fixed").base_temp == 0.6


@pytest.mark.parametrize("name", ["", " ", "a:b", "a\nb"])
def test_names_that_could_not_be_asked_for_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="a preset's name is"):
        write_entry(tmp_path / "f.json", ONE, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ({"presets": {"one": ONE}}, None, "they would be lost; give this one a name"),
        (ONE, "one", 'no "presets" object'),
        ({"scripts": {}}, None, "is there and is no preset file"),
        ([], None, 'no "config" object'),
    ],
)
def test_other_files_are_not_overwritten(tmp_path, content, name, message):
    path = tmp_path / "f.json"
    path.write_text(json.dumps(content))
    for refuse in (
        lambda: check_entry_target(path, name),
        lambda: write_entry(path, TWO, name),
    ):
        with pytest.raises(ValueError, match=message):
            refuse()
    assert json.loads(path.read_text()) == content


def test_problems_of_both_parts_are_told(tmp_path):
    assert used_problems({"problems": ["a"], "search": {"problems": ["b"]}}) == {"a", "b"}
    assert used_problems({"problems": ["a"], "search": None}) == {"a"}
    assert used_problems({"problems": {"a": 1}, "search": [1]}) == set()
    assert used_problems({"problems": ["a", 3, None]}) == {"a"}
