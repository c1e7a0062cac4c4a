"""A server that speaks the OpenAI chat protocol, with answers and faults by script."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]


def chat_reply(text: str, reason: str = "stop", tokens: int = 5, **message: Any) -> Reply:
    """What a server answers to a chat request."""
    choice = {"message": {"content": text, **message}, "finish_reason": reason}
    return 200, {"choices": [choice], "usage": {"completion_tokens": tokens}}


@dataclass
class Script:
    """`reply` makes the answer to the n-th chat request (from 0) with this body."""

    reply: Callable[[int, dict[str, Any]], Reply]
    owner: str = "vllm"
    counts_reset: bool = True
    delay_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    active: int = 0

    def metrics(self) -> str:
        if not self.counts_reset:
            return "other_total 1.0\n"
        return (
            f'reset_requests_total{{state="off"}} 9.0\nreset_requests_total{{state="on"}} '
            f"{float(self.active)}\n"
        )


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    """`script` behind an address of this machine, which goes into `script.url`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

        def do_GET(self) -> None:  # the name that http.server calls
            if self.path == "/v1/models":
                entry = {"id": "toy", "owned_by": script.owner, "root": "/models/toy"}
                self.send(200, {"data": [entry]})
            elif self.path == "/version" and script.owner == "vllm":
                self.send(200, {"version": "0.32.0"})
            elif self.path == "/metrics":
                self.send(200, script.metrics())
            else:
                self.send(404, {"error": "no such page"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(script.bodies)
                script.bodies.append(body)
                script.keys.append(self.headers.get("Authorization"))
                script.active += bool(body.get("vllm_xargs", {}).get("reset"))
            time.sleep(script.delay_s)
            self.send(*script.reply(number, body))

        def send(self, status: int, content: Any) -> None:
            data = content if isinstance(content, str) else json.dumps(content)
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data.encode())))
                self.end_headers()
                self.wfile.write(data.encode())
            except OSError:
                return  # the client gave up, as some tests want

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
