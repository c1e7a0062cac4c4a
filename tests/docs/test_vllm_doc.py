"""docs/vllm.md: what it tells to type is what works, and its table of keys is complete."""

from __future__ import annotations

import re

from reset.vllm.options import LEGAL_KEYS, MAX_WINDOW, request_config, server_options
from tests.docs.vllm_commands import PAGE, curl_body, defaults_in_commands, server_command


def test_l10_the_request_and_the_defaults_of_the_page_are_accepted():
    body = curl_body()
    assert request_config(body["vllm_xargs"], 1.0, server_options({})) is not None
    for environment, additional in defaults_in_commands():
        assert server_options(environment, additional).defaults == {"t_low": 0.1, "tau_0": 0.5505}


def test_l10_the_server_is_started_with_the_class_that_exists():
    words = server_command()
    (name,) = [word for word in words if word.startswith("reset.vllm:")]
    import reset.vllm

    assert name.split(":")[1] in reset.vllm.__all__


def test_the_keys_of_the_page_are_those_that_are_read():
    table = PAGE.read_text(encoding="utf-8").split("| key | meaning |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert sorted(named) == sorted(LEGAL_KEYS)
    assert f"at most {MAX_WINDOW}" in table
