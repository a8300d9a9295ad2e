"""An annotator that gets no answer, what answers cost, several of them, and the same through a real socket."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from annotators import GOOD, MISS, RESPONSE, ScriptedChat, annotator, ask, config, judge, many, prompt, spans
from fake_endpoint import KEY, KEY_VARIABLE, FakeEndpoint, Reply, answer, completion, fake_endpoint, says, span
from loop_clock import LoopClock

from t2g.errors import RunStopped, UserError
from t2g.feedback.sources.chat_client import MAX_LOST, ChatCompletion, ChatError
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.feedback.sources.llm import LLMFeedback, estimate_cost
from t2g.tasks.base import get_task
from t2g.types import SpanFeedback

DEADLINE_S = 30
GONE = ChatError("HTTP 400", "gone")


def test_a_refusal_is_not_argued_with() -> None:
    no = ChatCompletion(text="I cannot help.", finish_reason="refusal", prompt_tokens=5, output_tokens=4)
    feedback, chat = ask(no)
    assert (feedback.status, len(chat.requests)) == ("failed", 1)
    assert "refused: I cannot help." in feedback.reason


def test_a_failure_after_a_usable_answer_does_not_lose_it() -> None:
    assert spans(ask(MISS, GONE)[0]) == [("bag", -1)]


def test_a_failure_that_may_pass_takes_one_of_the_tries() -> None:
    broken = ChatError("connection", "the answer broke off", is_transient=True)
    assert spans(ask(broken, MISS, GOOD)[0]) == [("phone", 1)]
    feedback, chat = ask(MISS, broken, broken)
    assert (spans(feedback), len(chat.requests)) == ([("bag", -1)], 3)
    feedback, chat = ask(broken)
    assert (feedback.status, feedback.reason, len(chat.requests)) == ("failed", "the answer broke off", 3)


def judge_on_a_clock(source: LLMFeedback, chat: ScriptedChat) -> SpanFeedback:
    """The feedback of a model whose answers take time of the loop and none of ours."""

    async def run() -> SpanFeedback:
        chat.clock = LoopClock()
        return await source.judge(prompt(), RESPONSE)

    return asyncio.run(run())


def test_the_deadline_is_of_all_tries() -> None:
    """Four tries of 10 s, and 5 s of the fifth."""
    chat = ScriptedChat(ChatError("connection", "broke off", is_transient=True), delay_s=10)
    feedback = judge_on_a_clock(annotator(chat, timeout_s=45, max_tries=1000), chat)
    assert feedback.status == "failed" and "within timeout_s=45" in feedback.reason
    assert len(chat.requests) == 5


def test_an_answer_that_does_not_come_is_a_failure_with_a_price() -> None:
    chat = ScriptedChat(GOOD, delay_s=3600)
    source = annotator(chat, timeout_s=20)
    feedback = judge_on_a_clock(source, chat)
    assert feedback.status == "failed" and "gave no answer within timeout_s=20" in feedback.reason
    estimate = estimate_cost([(prompt(), RESPONSE)], config(), get_task("summarization"))
    assert f"({source.client.num_tokens:,} of prompts" in estimate


def test_a_judgement_is_finished_before_another_begins() -> None:
    chat = ScriptedChat(MISS, GOOD, MISS, GOOD)
    many(annotator(chat, concurrency=1), 2)
    assert [len(messages) for messages in chat.requests] == [1, 3, 1, 3]


def test_a_run_without_answers_stops() -> None:
    source = annotator(ScriptedChat(GONE))
    for _ in range(MAX_LOST - 1):
        assert judge(source).reason == "gone"
    with pytest.raises(RunStopped, match=f"{MAX_LOST} requests in a row got no answer, .*gone"):
        judge(source)


def test_an_answer_in_between_is_a_sign_of_life() -> None:
    source = annotator(ScriptedChat(*[GONE] * (MAX_LOST - 1), GOOD, *[GONE] * (MAX_LOST - 1), GOOD))
    assert [judge(source).status for _ in range(2 * MAX_LOST)].count("ok") == 2


def test_each_kind_of_failure_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    source = annotator(ScriptedChat(GONE, GONE, GONE, ChatError("x", "?")))
    for _ in range(4):
        judge(source)
    assert [message.split(" (")[0] for message in caplog.messages] == ["feedback failed: gone", "feedback failed: ?"]


# What it costs


def test_the_cap_ends_requests_but_not_records() -> None:
    chat = ScriptedChat(GOOD)  # 110 tokens each
    source = annotator(chat, max_total_tokens=200)
    feedback = [judge(source) for _ in range(3)]
    assert [f.status for f in feedback] == ["ok", "ok", "failed"]
    assert "220 tokens are spent" in feedback[2].reason
    assert "llm.max_total_tokens=200" in feedback[2].reason
    assert (source.client.num_tokens, len(chat.requests)) == (220, 2)
    assert all(judge(source).status == "failed" for _ in range(MAX_LOST))  # each record fails, the run goes on stopped


def test_an_estimate_counts_bytes_and_longest_answers() -> None:
    fields = {"num_annotators": 3, "temperature": 0.7, "max_output_tokens": 50, "max_total_tokens": 9999}
    _, chat = ask(GOOD, **fields)
    content = chat.requests[0][0]["content"]
    schema = json.dumps(chat.schemas[0])
    expected = -(-len(content.encode()) // 3) + 8 + -(-len(schema) // 3)
    items = [(prompt(), RESPONSE), (prompt(), RESPONSE)]
    total = 6 * (expected + 50)

    def estimate(cap: int | None) -> str:
        return estimate_cost(items, config(**fields | {"max_total_tokens": cap}), get_task("summarization"))

    assert estimate(None) == estimate(total)
    opening = f"judge: 6 requests, up to about {total:,} tokens ({6 * expected:,} of prompts, 300 of answers)"
    assert estimate(total).startswith(opening)
    with pytest.raises(UserError, match=rf"about {total:,} tokens .* \(data\.limit\) under another run\.name"):
        estimate(total - 1)


# Several annotators


def test_annotators_vote_and_agreement_is_reported() -> None:
    phone = span("phone", "good", phrase="c")
    bag = span("bag", "poor", phrase="c")
    feedback, chat = ask(
        lambda seed: answer("c", *[[phone, bag], [phone], [bag]][seed]), num_annotators=3, temperature=0.7
    )
    assert spans(feedback) == [("phone", 1), ("bag", -1)]
    assert feedback.agreement == pytest.approx((2 * 5 / (8 + 5) + 2 * 3 / (8 + 3) + 0) / 3)
    assert (feedback.num_quotes, len(chat.requests)) == (4, 3)


def test_one_lost_annotator_of_three_weakens_the_vote_and_two_end_it() -> None:
    two, _ = ask(GONE, GOOD, num_annotators=3, temperature=0.7)
    assert spans(two) == [("phone", 1)]
    one, _ = ask(GONE, GONE, GOOD, num_annotators=3, temperature=0.7)
    assert (one.status, one.spans) == ("failed", ())
    assert one.reason == "1 of 3 annotators gave a usable answer; one did not: gone"


def test_several_annotators_at_temperature_0_are_refused() -> None:
    with pytest.raises(ValueError, match=r"llm\.num_annotators=3 with llm\.temperature=0"):
        config(num_annotators=3)


# Through a real socket


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with fake_endpoint() as server:
        server.reply = lambda number, body: says(GOOD)
        yield server


def over(server: FakeEndpoint, **fields: Any) -> LLMFeedback:
    fields = {"url": server.url} | fields
    with patch.dict(os.environ, {KEY_VARIABLE: KEY}):
        chat = EndpointChat(config(**fields).llm)
    return annotator(chat, **fields)


def test_what_may_pass_is_tried_again(server: FakeEndpoint) -> None:
    soon = {"Retry-After": "0.01"}
    broken = Reply(body=completion(GOOD), missing_bytes=9)
    later = [Reply(408, {}, soon), Reply(409, {}, soon), Reply(429, {}, {"Retry-After": "0.3"})]
    bad = [*later, Reply(503, {}, soon), Reply(500, "<html>", soon), broken]
    server.reply = lambda number, body: bad[number - 1] if number <= len(bad) else says(GOOD)
    assert judge(over(server)).status == "ok"
    assert len(server.requests) == len(bad) + 1
    assert server.times[3] - server.times[2] >= 0.3


def test_what_is_late_is_tried_again(server: FakeEndpoint) -> None:
    over_now = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Reply:
        if number == 1:
            over_now.wait(DEADLINE_S)
        return says(GOOD)

    server.reply = reply
    assert judge(over(server, request_timeout_s=0.5, timeout_s=DEADLINE_S)).status == "ok"
    assert len(server.requests) >= 2
    over_now.set()


def test_a_server_that_asks_for_more_time_than_there_is(server: FakeEndpoint) -> None:
    later = Reply(429, {"error": {"message": "later"}}, {"Retry-After": "50"})
    source = over(server, timeout_s=40)

    async def judge_while_time_passes() -> SpanFeedback:
        clock = LoopClock()

        def reply(number: int, body: dict[str, Any]) -> Reply:
            threading.Timer(0.3, clock.skip, [40]).start()  # the client waits by then
            return later

        server.reply = reply
        return await source.judge(prompt(), RESPONSE)

    started = time.monotonic()
    feedback = asyncio.run(judge_while_time_passes())
    assert feedback.status == "failed" and "within timeout_s=40" in feedback.reason
    assert time.monotonic() - started < 40
    assert len(server.requests) == 1


def test_as_many_requests_at_once_as_allowed(server: FakeEndpoint) -> None:
    third = threading.Event()

    def reply(number: int, body: dict[str, Any]) -> Reply:
        if number == 3:
            third.set()
        third.wait(DEADLINE_S)
        return says(GOOD)

    server.reply = reply
    source = over(server, concurrency=3, num_annotators=2, temperature=0.5, timeout_s=DEADLINE_S)
    assert {feedback.status for feedback in many(source, 8)} == {"ok"}
    assert (server.most_open, len(server.requests)) == (3, 16)


def test_the_pace_is_kept_and_waiting_for_it_is_no_failure() -> None:
    """Five requests, one in 30 s: the last one waits for two minutes, six times its deadline."""
    chat = ScriptedChat(GOOD)
    slow = annotator(chat, requests_per_minute=2, timeout_s=20)

    async def run() -> list[SpanFeedback]:
        clock = LoopClock()
        judging = asyncio.gather(*(slow.judge(prompt(), RESPONSE) for _ in range(5)))
        while not judging.done():
            await clock.wait(1)
        return await judging

    assert {feedback.status for feedback in asyncio.run(run())} == {"ok"}
    assert np.diff(chat.times).min() > 29


def test_a_wrong_key_stops_the_run_at_once(server: FakeEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    server.reply = lambda number, body: Reply(401, {"error": {"message": f"no key {KEY}"}})
    with pytest.raises(UserError, match=KEY_VARIABLE) as caught:
        many(over(server, concurrency=1), 5)
    assert KEY not in str(caught.value) + caplog.text
    assert len(server.requests) <= 2


def test_a_server_that_is_down(server: FakeEndpoint) -> None:
    server.shutdown()
    server.server_close()
    feedback = judge(over(server, timeout_s=3))
    assert feedback.status == "failed" and "no answer within timeout_s=3" in feedback.reason


def test_a_web_page_instead_of_an_answer(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(body="<html>Sign in</html>")
    feedback = judge(over(server))
    assert (feedback.status, len(server.requests)) == ("failed", 1)
    assert "no chat completion" in feedback.reason
