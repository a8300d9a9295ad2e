"""One request to an OpenAI-compatible server, against a small server of our own."""

import asyncio
import gzip
import json
import os
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
from fake_endpoint import KEY, KEY_VARIABLE, FakeEndpoint, Reply, completion, fake_endpoint, says

from t2g.config import LLMConfig
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources import endpoint
from t2g.feedback.sources.chat_client import ChatCompletion, ChatError, ChatRequest
from t2g.feedback.sources.completions import MAX_BODY_BYTES, read_completion
from t2g.feedback.sources.endpoint import EndpointChat, read_body

MESSAGES = [{"role": "user", "content": "Is it fine?"}]
SCHEMA = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
QUESTION = ChatRequest(messages=MESSAGES, schema=SCHEMA, max_output_tokens=64, temperature=0.5, seed=3)


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as server:
        yield server


def chat(server: FakeEndpoint, key: str = KEY, **fields: Any) -> EndpointChat:
    values = {"url": server.url, "model": "judge", "key_env": KEY_VARIABLE, "request_timeout_s": 30.0} | fields
    with patch.dict(os.environ, {KEY_VARIABLE: key}):
        return EndpointChat(LLMConfig(**values))


def ask(chat: EndpointChat) -> ChatCompletion:
    return asyncio.run(chat.complete(QUESTION))


def refusal(chat: EndpointChat) -> ChatError:
    with pytest.raises(ChatError) as caught:
        ask(chat)
    assert KEY[:5] not in str(caught.value)  # nor a part of it
    return caught.value


def test_a_request_and_its_answer(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: says("Fine.", tokens=(7, 2))
    assert ask(chat(server)) == ChatCompletion(text="Fine.", finish_reason="stop", prompt_tokens=7, output_tokens=2)
    (request,) = server.requests
    assert server.keys == [f"Bearer {KEY}"]
    assert request["model"] == "judge" and request["messages"] == MESSAGES
    assert (request["max_completion_tokens"], request["temperature"], request["seed"]) == (64, 0.5, 3)
    assert request["response_format"]["json_schema"] == {"name": "feedback", "strict": True, "schema": SCHEMA}


def test_credentials_of_the_environment_for_another_server_are_not_sent(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: Bearer other-key\nX-Gateway-Key: gateway-key")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-other")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-other")
    ask(chat(server))
    assert server.keys == [f"Bearer {KEY}"]
    values = " ".join(server.headers[0].values())
    assert not any(text in values for text in ("other", "gateway"))


def test_the_client_is_of_the_loop_that_asks(server: FakeEndpoint) -> None:
    client = chat(server)
    assert [ask(client).finish_reason for _ in range(2)] == ["stop", "stop"]


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
def test_transient_errors_are_retried_until_the_deadline(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 2)
    busy = Reply(status, {"error": {"message": f"busy, {KEY}"}}, {"Retry-After": "0.01"})
    server.reply = lambda number, body: busy
    failed = refusal(chat(server))
    assert failed.kind == f"HTTP {status}" and "busy, ***" in str(failed)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 403, 413, 422])
def test_what_concerns_this_request_alone(server: FakeEndpoint, status: int) -> None:
    refused = Reply(status, {"error": {"message": "too long"}})
    server.reply = lambda number, body: says("Fine.") if number == 1 else refused
    client = chat(server)
    ask(client)
    failed = refusal(client)
    assert not failed.is_transient and len(server.requests) == 2
    assert "too long" in str(failed)
    assert str(status) in str(failed)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_named_by_its_variable_and_never_shown(server: FakeEndpoint, status: int) -> None:
    server.reply = lambda number, body: Reply(status, {"error": {"message": f"Incorrect API key: {KEY}"}})
    client = chat(server)
    with pytest.raises(UserError, match=f"refuses the key in the environment variable {KEY_VARIABLE}") as caught:
        ask(client)
    error: BaseException | None = caught.value
    assert KEY not in str(error) and error.__suppress_context__  # a traceback would show the cause
    assert KEY not in repr(client)


def test_a_wrong_model_or_path(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(404, {"error": {"message": "no model judge"}})
    with pytest.raises(UserError, match=r"does not know llm\.model=judge or the path: .*no model judge"):
        ask(chat(server))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (429, {"message": "You exceeded your quota", "code": "insufficient_quota"}),
        (429, {"message": "You exceeded your quota", "type": "exceeded_current_quota_error", "code": None}),
        (403, {"message": "You exceeded your quota", "type": "insufficient_quota", "code": 7}),
        (402, {"message": "You exceeded your quota"}),
    ],
)
def test_an_exhausted_quota_ends_the_run_at_the_first_request(
    server: FakeEndpoint, status: int, error: dict[str, Any]
) -> None:
    server.reply = lambda number, request: Reply(status, {"error": error}, {"x-should-retry": "true"})
    with pytest.raises(RunStopped, match=f"account of {KEY_VARIABLE} has nothing left to spend: .*exceeded your quota"):
        ask(chat(server))
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_is_not_followed(server: FakeEndpoint, status: int) -> None:
    with fake_endpoint() as other:
        headers = {"Location": f"http://me:pass1234@127.0.0.1:{other.server_port}/v1/chat/completions?to=x"}
        server.reply = lambda number, request: Reply(status, "", headers)
        with pytest.raises(
            UserError, match=r"llm\.url=.* redirects to http://\*\*\*@127\S+/completions; redirects are not"
        ):
            ask(chat(server))
        assert len(server.requests) == 1 and other.requests == []


@pytest.mark.parametrize("status", [200, 400, 503])
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_body_that_grows_is_bounded_in_memory(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, status: int, encoding: str
) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    body = b"x" * (64 * 2**20)
    sent = gzip.compress(body, 1) if encoding == "gzip" else body
    server.reply = lambda number, request: Reply(status, sent, {"Content-Encoding": encoding})
    client = chat(server)
    tracemalloc.start()
    try:
        assert refusal(client).kind == ("answer" if status == 200 else f"HTTP {status}")
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BODY_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("proxy", ["ftp://me:pass1234@proxy", "http://me:pa/ss1234@proxy:80", "http://me:pass1234@"])
def test_a_proxy_that_cannot_be_is_named_without_its_password(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    with pytest.raises(UserError, match="HTTP_PROXY needs the form http://host:port") as caught:
        chat(server)
    assert "1234" not in str(caught.value)


def test_a_proxy_that_repeats_its_password_is_masked(server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply = lambda number, request: Reply(400, {"error": {"message": "no to me:p%40ss1234 and p@ss1234"}})
    monkeypatch.setenv("HTTP_PROXY", f"http://me:p%40ss1234@127.0.0.1:{server.server_port}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    failed = refusal(chat(server, url="http://far.example/v1"))
    assert "no to me:*** and ***" in str(failed) and "1234" not in str(failed)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 1)
    with fake_endpoint() as server:
        pass
    assert refusal(chat(server)).kind == "connection"


def test_a_server_misses_its_deadline(server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_RETRIES", 0)
    hung_up = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Reply:
        hung_up.wait(30)
        return Reply(body={})

    server.reply = reply
    assert refusal(chat(server, request_timeout_s=0.1)).kind == "connection"
    hung_up.set()


def test_a_body_that_breaks_off(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(body=completion("Fine."), missing_bytes=20)
    failed = refusal(chat(server))
    assert failed.is_transient and "broke off" in str(failed)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("<html>proxy</html>", ": <html>"),
        ("\x1b[2J", ": ?[2J"),
        ('{"choices": [{"message": {"content": "Fi', "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ({}, "choices: Field required"),
        ([1], "no chat completion"),
        (None, "no chat completion"),
        ({"choices": []}, "choices: "),
        ({"choices": "x"}, "choices: "),
        ({"choices": [None]}, "choices.0: "),
        ({"choices": [{"index": 0}]}, "message: Field required"),
        ({"choices": [{"message": "x"}]}, "message: "),
        (completion(5), "content: Input should be a valid string"),
        (completion(["Fine."]), "content: Input should be a valid string"),
    ],
)
def test_bodies_that_are_no_completion(server: FakeEndpoint, body: Any, sentence: str) -> None:
    server.reply = lambda number, request: Reply(body=body)
    failed = refusal(chat(server))
    assert not failed.is_transient and sentence in str(failed)


@pytest.mark.parametrize("wrap", [str, lambda text: {"error": text}, lambda text: completion([text])])
def test_a_key_that_is_repeated_where_the_sentence_is_cut(server: FakeEndpoint, wrap: Callable[[str], Any]) -> None:
    client = chat(server)
    for length in range(60, 320, 8):
        server.reply = lambda number, request, x="x" * length: Reply(body=wrap(x + KEY + "y" * 400))
        assert "x" * 60 in str(refusal(client))


def test_an_answer_and_a_refusal_do_not_repeat_a_key_that_is_no_common_word(server: FakeEndpoint) -> None:
    refused = completion("")
    refused["choices"][0]["message"]["refusal"] = f"No, {KEY}, never."
    server.reply = lambda number, body: Reply(body=refused) if number == 1 else says(f"any company with {KEY}")
    reply = ask(chat(server))
    assert (reply.text, reply.finish_reason) == ("No, ***, never.", "refusal")
    assert ask(chat(server)).text == "any company with ***"
    assert ask(chat(server, "any")).text == f"any company with {KEY}"


def test_a_key_with_strokes_as_json_may_spell_it(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(body="[" + r"sk-ab\/cd" + "]")
    assert ": [***]" in str(refusal(chat(server, "sk-ab/cd")))


def test_a_huge_body_is_refused_and_not_read_to_its_end(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: says("x" * (MAX_BODY_BYTES + 1))
    failed = refusal(chat(server))
    assert not failed.is_transient and "more than" in str(failed)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 2**20

    assert MAX_BODY_BYTES < len(asyncio.run(read_body(endless()))) <= MAX_BODY_BYTES + 2**20


def read(content: Any, finish_reason: str = "stop", **message: Any) -> ChatCompletion:
    body = completion(content, finish_reason)
    body["choices"][0]["message"] |= message
    del body["usage"]
    return read_completion(json.dumps(body).encode(), prompt="x" * 10)


def test_what_a_completion_says() -> None:
    assert read("Fine.", "length").finish_reason == "length"
    assert read(None).text == "" and read(None).finish_reason == "stop"
    assert read("", "content_filter").finish_reason == "refusal"
    assert (read(None, refusal="I cannot.").text, read(None, refusal="I cannot.").finish_reason) == (
        "I cannot.",
        "refusal",
    )
    assert (read("Fine!!").prompt_tokens, read("Fine!!").output_tokens) == (4, 2)  # bytes / 3, rounded up


@pytest.mark.parametrize(("key", "sentence"), [("", "is not set"), (" \n", "is not set"), ("a\nb", "no key has")])
def test_a_key_that_is_none(server: FakeEndpoint, key: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        chat(server, key)
    assert KEY_VARIABLE in str(caught.value)


@pytest.mark.parametrize(
    ("url", "is_clear"),
    [
        ("http://judge.example/v1", True),
        ("http://10.0.0.7:8000/v1", True),
        ("http://[2001:db8::1]:8000/v1", True),
        ("https://judge.example/v1", False),
        ("http://localhost:8000/v1", False),
        ("http://127.0.0.2:8000/v1", False),
        ("http://[::1]:8000/v1", False),
    ],
)
def test_a_key_that_leaves_this_machine_unencrypted_is_a_warning(
    server: FakeEndpoint, caplog: pytest.LogCaptureFixture, url: str, is_clear: bool
) -> None:
    chat(server, url=url)
    chat(server, "any", url=url)
    assert [f"llm.url={url} sends key" in message for message in caplog.messages] == [True] * is_clear


def test_a_line_end_behind_the_key_is_no_part_of_it(server: FakeEndpoint) -> None:
    ask(chat(server, KEY + "\n"))
    assert server.keys == [f"Bearer {KEY}"]
