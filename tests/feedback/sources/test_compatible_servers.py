"""Servers that call themselves OpenAI-compatible and differ: in their answers, errors and fields of requests."""

import asyncio
import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from fake_endpoint import KEY, KEY_VARIABLE, FakeEndpoint, Reply, completion, fake_endpoint, says
from httpx2 import Request, Response
from pydantic import ValidationError

from t2g.config import LLMConfig
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources import endpoint
from t2g.feedback.sources.chat_client import ChatCompletion, ChatError, ChatRequest
from t2g.feedback.sources.completions import extract_error, find_error_status, find_reason, read_completion
from t2g.feedback.sources.endpoint import MAX_ERROR_BYTES, EndpointChat, read_response

SCHEMA = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
MESSAGES = [{"role": "user", "content": "Is it fine?"}]
QUESTION = ChatRequest(messages=MESSAGES, schema=SCHEMA, max_output_tokens=64, temperature=0.5, seed=3)


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as server:
        yield server


def make_chat(server: FakeEndpoint, **fields: Any) -> EndpointChat:
    values = {"url": server.url, "model": "judge", "key_env": KEY_VARIABLE, "request_timeout_s": 30.0} | fields
    with patch.dict(os.environ, {KEY_VARIABLE: KEY}):
        return EndpointChat(LLMConfig(**values))


def ask(chat: EndpointChat) -> ChatCompletion:
    return asyncio.run(chat.complete(QUESTION))


def fail(chat: EndpointChat) -> ChatError:
    with pytest.raises(ChatError) as caught:
        ask(chat)
    return caught.value


# ------------------------------------------------------------------------------------------------------------- answers
def read(content: Any, usage: Any = None, **message: Any) -> ChatCompletion:
    body = completion(content)
    body["choices"][0]["message"] |= message
    body["usage"] = usage
    return read_completion(json.dumps(body).encode(), prompt="x" * 10)


def test_a_content_in_parts_is_their_text() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    parts = [thinking, {"type": "text", "text": '{"critique": '}, {"type": "text", "text": '"Fine."}'}]
    assert read(parts).text == '{"critique": "Fine."}'
    assert read([]).text == ""
    assert read([thinking]).text == ""


def test_without_content_the_reasoning_is_the_answer() -> None:
    assert read(None, reasoning_content="Fine.").text == "Fine."
    assert read("", reasoning="Fine.").text == "Fine."
    assert read("\n\n", reasoning_content="Fine.").text == "Fine."
    assert read("Good.", reasoning_content="Fine.").text == "Good."
    assert read(None, reasoning_content=["x"]).text == ""


def test_reasoning_that_was_cut_is_no_answer() -> None:
    body = completion(None)
    body["choices"][0]["message"] |= {"reasoning_content": "Let me draft: {}"}
    body["choices"][0]["finish_reason"] = "length"
    assert read_completion(json.dumps(body).encode(), prompt="x").text == ""


@pytest.mark.parametrize(
    "usage",
    [
        [],
        "none",
        {"prompt_tokens": -1},
        {"completion_tokens": 10**9 + 1},
        {"prompt_tokens": "many"},
        3,
        {},
    ],
)
def test_a_usage_in_another_form_is_estimated(usage: Any) -> None:
    answer = read("Fine!!", usage)
    assert (answer.prompt_tokens, answer.output_tokens) == (4, 2)  # bytes / 3, rounded up


# -------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"error": "too long", "error_type": "validation"}, "too long"),
        ({"message": "too long"}, "too long"),
        ({"detail": "too long"}, "too long"),
        ({"detail": [{"loc": ["body", "n"], "msg": "too long"}]}, "body.n: too long"),
        ({"object": "error", "message": {"detail": [{"loc": ["n"], "msg": "too long"}]}}, "n: too long"),
        ([{"error": {"code": 400, "message": "too long"}}], "too long"),
        ({"error": {"message": "Provider error", "metadata": {"raw": "too long"}}}, "Provider error; too long"),
        ({"errors": ["too long", "too hot"]}, "too long; too hot"),
        ({"title": "Bad", "detail": "too long"}, "too long; Bad"),
        ("too long", "too long"),
        ("<html><h1>Bad</h1>\n<p>too long</p></html>", "Bad too long"),
        ({"code": 7}, '{"code": 7}'),
    ],
)
def test_the_reason_of_a_server_is_shown_in_every_form(server: FakeEndpoint, body: Any, reason: str) -> None:
    server.reply = lambda number, request: Reply(422, body)
    assert str(fail(make_chat(server))).endswith(f": HTTP 422: {reason}")


def test_reasons_are_read_in_linear_time_and_bounded_depth() -> None:
    started = time.monotonic()
    for body in (b"<" * 65536, b"[" * 65536, b'{"error":' * 7000, b'{"error": {"message": "' + b"x" * 65000):
        find_reason(body)
    deep: Any = "too deep"
    for _ in range(100):
        deep = {"error": deep}
    assert "too deep" in find_reason(json.dumps(deep).encode()), "then the body itself"
    assert time.monotonic() - started < 5


def test_an_error_with_status_200_is_as_bounded_as_others(server: FakeEndpoint) -> None:
    error = {"code": 400, "loc": ["y" * 50_000] * 5, "errors": ["too long"]}
    body = json.dumps({"error": error}).encode()
    response = Response(200, content=body, request=Request("POST", server.url))
    shortened = asyncio.run(read_response(response, limit_s=10))
    assert (shortened.status_code, len(shortened.content)) == (400, MAX_ERROR_BYTES)

    error = {"loc": ["y" * 10**6], "errors": [f"reason {number}" for number in range(20_000)]}
    body = json.dumps({"error": error}).encode()
    tracemalloc.start()
    reason = find_reason(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    field = "y" * 200
    assert reason == "; ".join(f"{field}: reason {number}" for number in range(4))
    assert peak < 20 * len(body)


@pytest.mark.parametrize("code", [429, "429", "rate_limit_exceeded", 503, "overloaded_error"])
def test_an_error_with_status_200_is_retried_as_its_code_says(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, code: Any
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 2)
    busy = Reply(200, {"error": {"code": code, "message": "busy"}}, {"Retry-After": "0.01"})
    server.reply = lambda number, body: busy if number < 3 else says("Fine.")
    assert ask(make_chat(server)).text == "Fine."
    assert len(server.requests) == 3


def test_an_answer_that_the_server_could_not_finish_is_retried(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 2)
    failed = {"message": {"content": "The seed"}, "finish_reason": "error"}
    with_reason = failed | {"error": {"code": 502, "message": "idle timeout"}}
    replies = {1: failed, 2: with_reason}
    server.reply = lambda number, body: (
        Reply(200, {"choices": [replies[number]]}, {"Retry-After": "0.01"}) if number < 3 else says("Fine.")
    )
    assert ask(make_chat(server)).text == "Fine."
    assert len(server.requests) == 3
    server.reply = lambda number, body: Reply(200, {"choices": [with_reason]}, {"Retry-After": "0.01"})
    assert str(fail(make_chat(server))).endswith("HTTP 200 with error 502: idle timeout")

    refused = failed | {"error": {"code": 400, "message": "too long"}}
    server.reply = lambda number, body: Reply(200, {"choices": [refused]})
    server.requests.clear()
    assert str(fail(make_chat(server))).endswith("HTTP 200 with error 400: too long")
    assert len(server.requests) == 1, "the model's words are no error"
    limited = {"choices": [failed], "error": {"code": 429}}
    assert extract_error(json.dumps(limited).encode()) == b'{"error": {"code": 429}}'
    assert find_error_status(extract_error(json.dumps({"choices": [failed]}).encode()) or b"") == 503


def test_other_errors_with_status_200_are_not_retried(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(200, {"error": "no model is loaded"})
    failed = fail(make_chat(server))
    assert not failed.is_transient and str(failed).endswith("HTTP 200 with error 400: no model is loaded")
    assert len(server.requests) == 1
    server.reply = lambda number, body: Reply(200, {"error": {"code": 401, "message": "who?"}})
    with pytest.raises(UserError, match="refuses the key"):
        ask(make_chat(server))
    server.reply = lambda number, body: Reply(200, {"error": {"code": 402, "message": "pay"}})
    with pytest.raises(RunStopped, match="nothing left to spend"):
        ask(make_chat(server))


def test_a_completion_is_no_error() -> None:
    body = completion('{"error": 1}') | {"error": None}
    assert extract_error(json.dumps(body).encode()) is None
    assert find_error_status(b'{"error": {"code": "' + b"000000429" * 1000 + b'"}}') == 400, "no status"
    assert extract_error(b'"error"') is None and extract_error(b'{"error": ') is None


# -------------------------------------------------------------------------------------------------------------- fields
MISTRAL = {
    "object": "error",
    "message": {
        "detail": [
            {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted", "input": 64}
            for name in ("max_completion_tokens", "seed")
        ]
    },
}
DEEPSEEK = {"error": {"message": "This response_format type is unavailable now", "code": "invalid_request_error"}}


def test_a_server_that_refuses_fields_gets_others_and_is_remembered(
    server: FakeEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Mistral refuses two fields, DeepSeek the schema; a server that refuses all three takes two attempts."""

    def reply(number: int, body: dict[str, Any]) -> Reply:
        if "max_completion_tokens" in body or "seed" in body:
            return Reply(422, MISTRAL)
        if body["response_format"]["type"] != "json_object":
            return Reply(400, DEEPSEEK)
        return says("Fine.")

    server.reply = reply
    chat = make_chat(server)
    assert [ask(chat).text for _ in range(2)] == ["Fine.", "Fine."]
    assert len(server.requests) == 4, "two refusals, and an answer for each question"
    last = server.requests[-1]
    assert last["max_tokens"] == 64 and last["response_format"] == {"type": "json_object"}
    assert last["temperature"] == 0.5
    assert len(caplog.messages) == 1
    assert "max_completion_tokens, response_format, seed" in caplog.messages[0]


def test_a_model_with_a_temperature_of_its_own_is_asked_without_one(server: FakeEndpoint) -> None:
    message = "Unsupported value: 'temperature' does not support 0 with this model. Only the default is supported."
    refusal = Reply(400, {"error": {"message": message, "param": "temperature", "code": "unsupported_value"}})
    server.reply = lambda number, body: refusal if "temperature" in body else says("Fine.")
    assert ask(make_chat(server)).text == "Fine."
    assert ["temperature" in request for request in server.requests] == [True, False]
    server.reply = lambda number, body: Reply(400, {"error": {"message": "temperature must be at most 0.3"}})
    server.requests.clear()
    assert "at most 0.3" in str(fail(make_chat(server)))
    assert len(server.requests) == 1


def test_a_fallback_that_does_not_help_is_not_remembered(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(400, {"error": {"message": "plant no seed here"}})
    chat = make_chat(server)
    assert "plant no seed" in str(fail(chat))
    assert ["seed" in request for request in server.requests] == [True, False]
    server.reply = lambda number, body: says("Fine.")
    ask(chat)
    assert server.requests[-1]["seed"] == 3


def test_the_config_omits_and_adds_fields(server: FakeEndpoint) -> None:
    fields = {"omit": ["temperature", "response_format"], "extra": {"reasoning_effort": "low"}}
    server.reply = lambda number, body: says("Fine.")
    ask(make_chat(server, request=fields))
    (request,) = server.requests
    assert request["reasoning_effort"] == "low"
    assert request.keys() == {"model", "messages", "max_completion_tokens", "seed", "reasoning_effort"}


@pytest.mark.parametrize("fields", [{"omit": ["messages"]}, {"extra": {"stream": True}}, {"remove": ["seed"]}])
def test_fields_that_a_config_may_not_change(fields: Any) -> None:
    with pytest.raises(ValidationError, match=r"request\.(omit|extra|remove)"):
        LLMConfig(model="judge", url="http://127.0.0.1:9/v1", request=fields)


def test_fields_of_requests_need_a_server() -> None:
    with pytest.raises(ValidationError, match=r"llm\.url is not set"):
        LLMConfig(model="judge", request={"omit": ["seed"]})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- time
@pytest.mark.parametrize("status", [200, 400])
def test_a_server_that_drips_bytes_misses_the_deadline(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    server.reply = lambda number, request: Reply(status, completion("Fine."), drip_s=0.05)  # 12 s
    started = time.monotonic()
    failed = fail(make_chat(server, request_timeout_s=2.0))
    assert time.monotonic() - started < 10
    assert failed.is_transient == (status == 200)
