"""The tests of LiveCodeBench rows, as they are stored."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from reset.evaluate.graders.hidden_tests import encode_hidden, load_tests
from reset.evaluate.problems import Problem


def case(text="1\n2", output="3", kind="stdin"):
    return {"input": text, "output": output, "testtype": kind}


def problem(public, private, metadata="{}"):
    fields = {"public_test_cases": public, "private_test_cases": private, "metadata": metadata}
    return Problem("lcb-3", "Add.", "code", "", tests=json.dumps(fields))


def pickled(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_r1_hidden_tests_are_loaded():
    hidden = pickled(json.dumps([case("3\n4", "7"), case("5\n6", "11")]))
    suite = load_tests(problem(json.dumps([case()]), hidden))
    assert [c.output for c in suite.cases] == ["3", "7", "11"]
    assert suite.function is None


@pytest.mark.parametrize(
    "private",
    [
        "not base64!",
        base64.b64encode(b"not zlib").decode(),
        base64.b64encode(zlib.compress(b"not a pickle")).decode(),
        base64.b64encode(zlib.compress(json.dumps([case()]).encode())).decode(),
        pickled(json.dumps([case()]))[:-8],
        pickled([case()]),
        pickled("not JSON"),
        pickled(json.dumps({"input": "1"})),
        pickled(json.dumps([{"input": "1"}])),
        pickled(json.dumps(["1"])),
        pickled(json.dumps([case(kind="other")])),
    ],
)
def test_r1_a_row_that_cannot_be_decoded_is_an_error(private):
    with pytest.raises(ValueError, match="problem lcb-3: private_test_cases"):
        load_tests(problem(json.dumps([case()]), private))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_r1_unpickling_calls_nothing(tmp_path, protocol):
    class Touch:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "made"),)

    data = base64.b64encode(zlib.compress(pickle.dumps(Touch(), protocol))).decode()
    with pytest.raises(ValueError, match="only a text is allowed"):
        load_tests(problem("[]", data))
    assert not (tmp_path / "made").exists()


def test_plain_json_is_read_too_and_encoding_has_an_inverse():
    text = json.dumps([case()])
    assert load_tests(problem("[]", text)) == load_tests(problem("[]", encode_hidden(text)))


def test_functional_tests_name_their_function():
    public = json.dumps([case(kind="functional")])
    assert load_tests(problem(public, "", '{"func_name": "add"}')).function == "add"
    with pytest.raises(ValueError, match="lcb-3: metadata has no func_name"):
        load_tests(problem(public, ""))


@pytest.mark.parametrize(
    ("public", "private", "message"),
    [
        ("[]", "", "has no tests"),
        ("{}", "", "public_test_cases"),
        (json.dumps([case()]), json.dumps([case(kind="functional")]), "one kind"),
    ],
)
def test_unsound_tests_are_an_error(public, private, message):
    with pytest.raises(ValueError, match=f"problem lcb-3: .*{message}"):
        load_tests(problem(public, private))


def test_tests_that_are_no_json_are_an_error():
    with pytest.raises(ValueError, match="problem lcb-3: tests: is not JSON"):
        load_tests(Problem("lcb-3", "Add.", "code", ""))
