"""The endpoint source against a small server of our own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from t2g.config import FeedbackConfig
from t2g.errors import UserError
from t2g.feedback.endpoint import EndpointFeedback
from t2g.feedback.parse import format_answer
from t2g.tasks.prompts import PromptsTask
from t2g.types import Prompt, SpanFeedback

PROMPT = Prompt(prompt_id="7", prompt_ids=np.zeros(0, np.int32), prompt_text="Hi?", task="prompts")
KEY_VARIABLE = "T2G_TEST_ENDPOINT_KEY"
ENVIRON = {KEY_VARIABLE: "secret"}
Reply = Callable[[int], tuple[int, Any]]  # from the number of the request, from 1, to status and body


def completion(content: Any, finish_reason: str = "stop") -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
    }


class Server(ThreadingHTTPServer):
    """Answers every request by `reply`; keeps what it was asked and how many requests were open at once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply: Reply = lambda number: (200, completion(format_answer("Fine.", ["yes"], [])))
        self.requests: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.open = self.most_open = 0
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up at its deadline is what some tests are about."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            server.headers.append(self.headers["Authorization"])
            number = len(server.requests)
            server.open += 1
            server.most_open = max(server.most_open, server.open)
        status, reply = server.reply(number)
        with server.lock:
            server.open -= 1
        data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if isinstance(reply, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def source(server: Server, environ: Mapping[str, str] = ENVIRON, **fields: Any) -> EndpointFeedback:
    values = {"timeout_s": 10.0, "endpoint_key_env": KEY_VARIABLE, "endpoint_model": "judge"} | fields
    config = FeedbackConfig(source="endpoint", endpoint_url=server.url, **values)
    return EndpointFeedback(config, PromptsTask(), environ=environ)


def judge(source: EndpointFeedback, response: str = "yes") -> SpanFeedback:
    return asyncio.run(source.judge(PROMPT, response))


def test_an_answer_becomes_spans(server: Server) -> None:
    feedback = judge(source(server))
    assert [(s.start, s.end, s.label) for s in feedback.spans] == [(0, 3, 1)]
    assert (feedback.critique, feedback.status, feedback.source) == ("Fine.", "ok", "endpoint")
    assert feedback.version.startswith("judge#")
    request = server.requests[0]
    assert request["messages"] == PromptsTask().feedback_messages(PROMPT, "yes")
    assert request["model"] == "judge"
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["critique", "good", "poor"]
    assert server.headers == ["Bearer secret"]


def test_what_may_pass_is_tried_again(server: Server) -> None:
    answer = completion(format_answer("Fine.", ["yes"], []))
    server.reply = lambda number: {1: (503, {}), 2: (429, {})}.get(number, (200, answer))
    assert judge(source(server)).status == "ok"
    assert len(server.requests) == 3


def test_what_will_not_pass_is_failed_at_once_and_said_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.reply = lambda number: (401, {"error": {"message": "wrong key"}})
    asked = source(server)
    assert judge(asked).status == judge(asked).status == "failed"
    assert len(server.requests) == 2
    said = [message for message in caplog.messages if "feedback failed" in message]
    assert len(said) == 1
    assert "wrong key" in said[0]
    assert "secret" not in said[0]


def test_the_deadline_holds_over_all_tries(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.reply = lambda number: (503, {})
    started = time.monotonic()
    assert judge(source(server, timeout_s=0.3)).status == "failed"
    assert time.monotonic() - started < 3
    assert "timeout_s=0.3" in caplog.text


def test_a_server_that_never_answers(server: Server) -> None:
    server.reply = lambda number: (time.sleep(1.5), (200, {}))[1]
    started = time.monotonic()
    assert judge(source(server, timeout_s=0.2)).status == "failed"
    assert time.monotonic() - started < 1.2


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (completion(None), "unparsable"),  # a refusal
        (completion("c") | {"choices": [{"index": 0, "message": {}}]}, "unparsable"),
        (completion("Sure! It is fine."), "unparsable"),
        (completion(format_answer("Fine.", ["yes"], []), "length"), "unparsable"),
        (completion(format_answer("Fine.", [], [])), "empty"),
        (completion([{"type": "text", "text": "Fine."}]), "failed"),
        (completion(5), "failed"),
        (completion("c") | {"choices": []}, "failed"),
        (completion("c") | {"choices": "x"}, "failed"),
        (completion("c") | {"choices": None}, "failed"),
        (completion("c") | {"choices": [None]}, "failed"),
        (completion("c") | {"choices": ["x"]}, "failed"),
        (completion("c") | {"choices": {"0": 1}}, "failed"),
        (completion("c") | {"choices": [{"index": 0, "message": None}]}, "failed"),
        (completion("c") | {"choices": [{"index": 0, "message": "x"}]}, "failed"),
        ({}, "failed"),
        ([], "failed"),
        ([1], "failed"),
        (None, "failed"),
        (3, "failed"),
        ("<html>proxy</html>", "failed"),
    ],
)
def test_answers_that_cannot_be_used(server: Server, body: Any, status: str) -> None:
    server.reply = lambda number: (200, body)
    assert judge(source(server)).status == status


def test_no_more_requests_are_open_than_asked(server: Server) -> None:
    answer = completion(format_answer("Fine.", ["yes"], []))
    server.reply = lambda number: (time.sleep(0.03), (200, answer))[1]
    asked = source(server, concurrency=3)

    async def many() -> list[SpanFeedback]:
        return await asyncio.gather(*(asked.judge(PROMPT, "yes") for _ in range(12)))

    assert {feedback.status for feedback in asyncio.run(many())} == {"ok"}
    assert server.most_open == 3
    assert {feedback.status for feedback in asyncio.run(many())} == {"ok"}  # in another loop too


def test_what_is_missing_is_said_at_set_up(server: Server) -> None:
    with pytest.raises(UserError, match=r"needs feedback\.endpoint_model"):
        source(server, endpoint_model=None)
    with pytest.raises(UserError, match=f"names {KEY_VARIABLE}, which is not set"):
        source(server, {})
