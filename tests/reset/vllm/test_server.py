"""The server as docs/vllm.md starts it: its own commands, over HTTP, on SmolLM2."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.vllm_commands import curl_body, server_command

pytestmark = [pytest.mark.vllm, pytest.mark.model]
PATIENCE_S = 180


class Server:
    """A running server and what it wrote."""

    def __init__(self, port: int, log: Path) -> None:
        self.port, self.log = port, log

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://localhost:{self.port}{path}", timeout=60) as reply:
            return reply.read().decode()

    def ask(self, **changes) -> tuple[int, dict]:
        """The page's request with changes: status and answer."""
        request = urllib.request.Request(
            f"http://localhost:{self.port}/v1/chat/completions",
            data=json.dumps({**curl_body(), "max_tokens": 8, **changes}).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def wait_for_line(self, part: str) -> str:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for line in self.log.read_text().splitlines():
                if part in line:
                    return line
            time.sleep(0.2)
        raise AssertionError(f"{part!r} is not in the log:\n{self.log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, *server_command()[1:], "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "1"},
        )
        server = Server(port, log)
        try:
            _wait_until_ready(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(timeout=60)


def _wait_until_ready(server: Server, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()[-4000:]
        try:
            server.get("/health")
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"not ready after {PATIENCE_S} s:\n{server.log.read_text()[-4000:]}")


def test_l7_l10_the_commands_of_the_page_work_and_show_that_it_was_active(server):
    status, answer = server.ask()
    assert status == 200
    count = answer["usage"]["completion_tokens"]
    assert server.wait_for_line("request joined, ").endswith(
        "reset: T_low 0.1, T_high 0.6, tau_0 2.2 nats, window 32, estimator hybrid"
    )
    assert f"request left, {count} tokens, " in server.wait_for_line("request left, ")
    assert 'reset_requests_total{state="on"} 1.0' in server.get("/metrics")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"reset": 1}, "t_low is missing"),
        ({"reset": 1, "t_low": 0.1}, "tau_0 is missing"),
        ({"reset": 1, "t_low": "cold", "tau_0": 0.5}, "t_low is 'cold'"),
        ({"reset": 1, "t_low": 0.1, "tau_0": [0.5]}, "tau_0 is [0.5]"),
        ({"reset": 1, "t_low": 0.1, "tau0": 0.5}, "did you mean 'tau_0'?"),
        ({"reset": 1, "t_low": 0.1, "tau_0": -1}, "tau_0 is -1"),
    ],
)
def test_l7_wrong_values_are_400_and_name_the_field(server, sent, message):
    status, answer = server.ask(vllm_xargs=sent)
    assert status == 400
    assert message in json.dumps(answer).replace('\\"', '"')


def test_l7_the_engine_lives_on_and_requests_without_the_switch_are_served(server):
    status, answer = server.ask(vllm_xargs={"somebody_elses": [1, 2]})
    assert status == 200
    assert answer["usage"]["completion_tokens"] > 0
    assert 'reset_requests_total{state="off"}' in server.get("/metrics")
