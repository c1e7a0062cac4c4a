"""Answers from a server that speaks the OpenAI chat protocol: vLLM's, or any other.

A policy needs vLLM with ReSET loaded; that it was active is checked by the server's own counter,
since a server that does not know the keys ignores them without a word.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from reset.evaluate.engines import EngineStoppedError, Request
from reset.evaluate.problems import Answer

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable of the key; it is sent, and kept nowhere."""

_COUNTER = re.compile(r'^reset_requests_total\{[^}]*state="on"[^}]*\} (\S+)$', re.MULTILINE)
_PASSING = (408, 409, 425, 429, 500, 502, 503, 504)  # worth another try
_LONGEST_WAIT_S = 60.0


class HttpEngine:
    """A model behind an address such as http://localhost:8000/v1.

    Args:
        url: the address up to and with /v1.
        model: its name at the server.
        concurrency: requests under way at once.
        timeout_s: of one request, in seconds.
        retries: further tries after a failure that may pass (no answer, timeout, 429, 5xx).
        backoff_s: wait before the first of them; it doubles each time, to at most a minute.
        thinking: sent as the chat template's switch; None sends nothing.

    Raises:
        EngineStoppedError: no answer from the server.
        ValueError: it does not serve this model.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int = 8,
        timeout_s: float = 3600.0,
        retries: int = 5,
        backoff_s: float = 1.0,
        thinking: bool | None = None,
    ) -> None:
        if concurrency < 1 or retries < 0 or timeout_s <= 0:
            raise ValueError(
                f"concurrency is {concurrency}, retries {retries}, timeout {timeout_s} s; need at "
                "least 1, at least 0, and more than 0"
            )
        self._url = url.rstrip("/")
        self._model = model
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._thinking = thinking
        self._stop = threading.Event()
        self._server = self._find_server()

    def describe(self) -> dict[str, Any]:
        # Not the address: a server that is started again elsewhere is the same engine.
        return {
            "name": "http",
            "model": self._model,
            "thinking": self._thinking,
            "server": self._server,
        }

    def render(self, request: Request) -> None:
        """The server applies the chat template; what it makes is not told."""

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        self._stop.clear()
        needs_reset = any(request.config.policy != "fixed" for request in requests)
        before = self._active_requests() if needs_reset else None
        todo: SimpleQueue[tuple[int, Request]] = SimpleQueue()
        for item in enumerate(requests):
            todo.put(item)
        done: SimpleQueue[_Outcome | None] = SimpleQueue()
        # Daemons: an interrupted run must not wait for answers that are minutes away.
        workers = [
            threading.Thread(target=self._work, args=(todo, done), daemon=True)
            for _ in range(min(self._concurrency, len(requests)))
        ]
        for worker in workers:
            worker.start()
        failure: Exception | None = None
        try:
            for outcome in _until_none(done, len(workers)):
                if isinstance(outcome.result, Exception):
                    failure = failure or outcome.result
                    continue  # answers that are under way still count
                if needs_reset:
                    self._check_reset_was_active(before)
                    needs_reset = False
                yield outcome.position, outcome.result
        finally:
            self._stop.set()
        if failure is not None:
            raise failure

    def _work(
        self, todo: SimpleQueue[tuple[int, Request]], done: SimpleQueue[_Outcome | None]
    ) -> None:
        """Asks one request after the other; the first failure of any worker ends all of them."""
        try:
            while not self._stop.is_set():
                position, request = todo.get_nowait()
                try:
                    done.put(_Outcome(position, self._ask(request)))
                except (OSError, ValueError) as error:
                    self._stop.set()
                    done.put(_Outcome(position, error))
        except Empty:
            return
        finally:
            done.put(None)

    # ---- one request ---------------------------------------------------------------------------

    def _ask(self, request: Request) -> Answer:
        reply = self._call("/chat/completions", self._body(request))
        try:
            choice = reply["choices"][0]
            message, reason = choice["message"], choice["finish_reason"]
            tokens = int(reply["usage"]["completion_tokens"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineStoppedError(
                f"{self._url}: the reply has no {error}, as the OpenAI chat protocol asks; got "
                f"{json.dumps(reply)[:200]}"
            ) from error
        if reason not in ("stop", "length"):
            raise EngineStoppedError(
                f"{self._url}: an answer ended with finish_reason {reason!r}; only 'stop' and "
                "'length' can be scored"
            )
        return Answer(_message_text(message), reason, tokens)

    def _body(self, request: Request) -> dict[str, Any]:
        config = request.config
        body: dict[str, Any] = {
            "model": self._model,
            "messages": request.chat(),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "top_p": request.top_p,
            "temperature": config.base_temp if config.policy == "fixed" else 1.0,
        }
        if self._is_vllm:
            # vLLM would take these from the model's generation_config.
            body |= {"top_k": -1, "min_p": request.min_p, "repetition_penalty": 1.0}
            values: dict[str, Any] = {"reset": 0}  # a server may have ReSET on by default
            if config.policy != "fixed":
                values = {"reset": 1, **config.to_dict()}
            body["vllm_xargs"] = {key: value for key, value in values.items() if value is not None}
        elif request.min_p:
            body["min_p"] = request.min_p
        if self._thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self._thinking}
        return body

    # ---- the server ----------------------------------------------------------------------------

    @property
    def _is_vllm(self) -> bool:
        return bool(self._server["owned_by"] == "vllm")

    def _find_server(self) -> dict[str, Any]:
        models = self._call("/models").get("data") or []
        names = [str(one.get("id")) for one in models]
        if self._model not in names:
            raise ValueError(
                f"{self._url}: serves {', '.join(names) or 'no model'}, not {self._model!r}; pass "
                "--model with one of its names"
            )
        entry = models[names.index(self._model)]
        about = {"owned_by": entry.get("owned_by"), "root": entry.get("root")}
        if about["owned_by"] == "vllm":
            about["version"] = json.loads(self._get_root("/version") or "{}").get("version")
        return about

    def _check_reset_was_active(self, before: float | None) -> None:
        now = self._active_requests()
        if now is None or now <= (before or 0):
            raise ValueError(
                f"{self._url}: no request had ReSET on (counter reset_requests_total of /metrics), "
                "so a score would not be ReSET's. Start vLLM with --logits-processors "
                "reset.vllm:ReSETLogitsProcessor, or score a fixed temperature (--baseline)"
            )

    def _active_requests(self) -> float | None:
        """How many requests had ReSET on since the server started; None if it does not count."""
        found = _COUNTER.findall(self._get_root("/metrics") or "")
        return sum(map(float, found)) if found else None

    def _get_root(self, path: str) -> str | None:
        """A page beside /v1; None if the server has none."""
        root = self._url.removesuffix("/v1")
        try:
            with urllib.request.urlopen(root + path, timeout=min(30.0, self._timeout_s)) as reply:
                text: str = reply.read().decode()
                return text
        except (OSError, http.client.HTTPException):
            return None

    # ---- tries ---------------------------------------------------------------------------------

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """JSON of a reply; what may pass is tried again."""
        for attempt in range(self._retries + 1):
            try:
                return self._once(path, body)
            except _PassingError as error:
                last = error
            if attempt == self._retries or self._stop.is_set():
                break
            wait = min(_LONGEST_WAIT_S, max(last.wait_s, self._backoff_s * 2**attempt))
            self._stop.wait(wait)
        raise EngineStoppedError(
            f"{self._url}{path}: {last} (tried {attempt + 1} times). Every answer that came is "
            "kept; when the server is well, go on with --resume"
        ) from last

    def _once(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=self._headers())
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
                value = json.loads(reply.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:300]
            if error.code in _PASSING:
                wait = error.headers.get("Retry-After", "")
                raise _PassingError(
                    f"HTTP {error.code}: {text}", float(wait) if wait.isdigit() else 0.0
                ) from error
            raise ValueError(f"{self._url}{path}: HTTP {error.code}: {text}") from error
        except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
            raise _PassingError(str(error) or type(error).__name__) from error
        except json.JSONDecodeError as error:
            raise _PassingError(f"the reply is no JSON ({error})") from error
        if not isinstance(value, dict):
            raise ValueError(
                f"{self._url}{path}: the reply is no JSON object; is this a /v1 address?"
            )
        return value

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Content-Type": "application/json"}
        return headers if key is None else {**headers, "Authorization": f"Bearer {key}"}


@dataclass(frozen=True)
class _Outcome:
    position: int
    result: Answer | Exception


def _until_none(queue: SimpleQueue[_Outcome | None], count: int) -> Iterator[_Outcome]:
    """What comes through `queue`, until None came `count` times."""
    while count:
        outcome = queue.get()
        if outcome is None:
            count -= 1
        else:
            yield outcome


class _PassingError(Exception):
    """A failure that may be gone at the next try; `wait_s` is what the server asked for."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def _message_text(message: dict[str, Any]) -> str:
    """The whole answer; a server with a reasoning parser sends the thoughts apart."""
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content") or ""
    return f"<think>\n{thoughts}\n</think>\n\n{content}" if thoughts else content
