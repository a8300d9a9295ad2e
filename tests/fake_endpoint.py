"""An OpenAI-compatible server on this machine that fails as it is told: what the annotator is tried against.

with fake_endpoint() as server:
    server.reply = lambda number, body: Reply(429, {}, headers={"Retry-After": "1"})
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_VARIABLE = "T2G_TEST_ENDPOINT_KEY"
KEY = "sk-secret-1234"


@dataclass(frozen=True)
class Reply:
    status: int = 200
    body: Any = ""  # bytes are sent as they are, a text as HTML, anything else as JSON
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0  # pause before each byte of the body
    missing_bytes: int = 0  # fewer are sent than Content-Length says, and the connection is closed


def span(quote: str, label: str, *, phrase: str = "", occurrence: int = 1, severity: int = 1) -> dict[str, Any]:
    """An entry of an annotator's answer."""
    return {"quote": quote, "occurrence": occurrence, "label": label, "severity": severity, "phrase": phrase}


def answer(critique: str, *spans: dict[str, Any]) -> str:
    """An annotator's answer."""
    return json.dumps({"reasoning": "Step by step.", "critique": critique, "spans": list(spans)})


def completion(content: Any, finish_reason: str = "stop", *, tokens: tuple[int, int] = (100, 10)) -> dict[str, Any]:
    """The body of a chat completion whose message says `content`; tokens of prompt and answer."""
    message = {"role": "assistant", "content": content}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)},
    }


def says(content: str, **keywords: Any) -> Reply:
    return Reply(body=completion(content, **keywords))


class FakeEndpoint(ThreadingHTTPServer):
    """Answers every request by `reply(number from 1, request body)`; keeps what it was asked, and when."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Callable[[int, dict[str, Any]], Reply] = lambda number, body: says(answer("Fine."))
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []  # the Authorization header of each
        self.headers: list[dict[str, str]] = []  # all headers of each
        self.times: list[float] = []  # time.monotonic() at each
        self.open = self.most_open = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up at its deadline is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeEndpoint

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            server.keys.append(self.headers["Authorization"])
            server.headers.append(dict(self.headers.items()))
            server.times.append(time.monotonic())
            number = len(server.requests)
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        try:
            reply = server.reply(number, body)
            time.sleep(reply.delay_s)
        finally:
            with server.lock:
                server.open -= 1
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        html = isinstance(reply.body, str)
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        data = reply.body.encode() if html else data
        self.send_response(reply.status)
        self.send_header("Content-Type", "text/html" if html else "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if reply.drip_s:
            for byte in data:
                time.sleep(reply.drip_s)
                self.wfile.write(bytes([byte]))
            return
        self.wfile.write(data[: len(data) - reply.missing_bytes])

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def fake_endpoint() -> Iterator[FakeEndpoint]:
    """A server that listens until the end of the block."""
    server = FakeEndpoint()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
