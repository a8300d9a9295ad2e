"""The annotator: what it is asked, how it is corrected, and every way in which a model does not answer."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from fake_endpoint import KEY, KEY_VARIABLE, FakeEndpoint, Reply, answer, completion, fake_endpoint, says, span

from t2g.data.chat import Message
from t2g.errors import RunStopped, UserError
from t2g.feedback.chat import ChatFailed, Completion
from t2g.feedback.endpoint import EndpointChat
from t2g.feedback.llm import MAX_LOST, LLMFeedback, estimate_cost, refuse_over_cap
from t2g.sections import FeedbackConfig, StyleConfig
from t2g.tasks.base import get_task
from t2g.types import Prompt, SpanFeedback

DEADLINE_S = 30
RESPONSE = "A red phone, a red bag."
GOOD = answer("The phone is right. The bag is wrong.", span("phone", "good", phrase="The phone is right"))
MISS = answer("The case is wrong.", span("case", "poor", phrase="case"), span("bag", "poor", phrase="wrong"))


def prompt(**payload: Any) -> Prompt:
    blank = np.zeros(0, np.int32)
    return Prompt(prompt_id="7", prompt_ids=blank, prompt_text="What hums?", task="summarization", payload=payload)


def config(*, style: StyleConfig | None = None, timeout_s: float = 60.0, **llm: Any) -> FeedbackConfig:
    fields = {"model": "judge", "key_env": KEY_VARIABLE, "request_timeout_s": 30.0} | llm
    return FeedbackConfig(source="llm", llm=fields, style=style or StyleConfig(), timeout_s=timeout_s)  # type: ignore[arg-type]


class ScriptedChat:
    """Says what it is told to, or fails; keeps what it was asked."""

    model = name = "scripted"

    def __init__(self, *script: str | Completion | Exception | Callable[[int], str], delay_s: float = 0.0) -> None:
        self.script, self.delay_s = script, delay_s
        self.asked: list[Sequence[Message]] = []
        self.schemas: list[Mapping[str, Any]] = []
        self.times: list[float] = []  # time.monotonic() at each
        self.answered = asyncio.Event()

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Any],
        max_output_tokens: int,
        temperature: float,
        seed: int,
    ) -> Completion:
        said = self.script[min(len(self.asked), len(self.script) - 1)]
        self.asked.append(messages)
        self.schemas.append(schema)
        self.times.append(time.monotonic())
        await asyncio.sleep(self.delay_s)
        self.answered.set()
        if isinstance(said, Exception):
            raise said
        if isinstance(said, Completion):
            return said
        text = said if isinstance(said, str) else said(seed)
        return Completion(text=text, finish_reason="stop", prompt_tokens=100, output_tokens=10)


def annotator(chat: Any, **fields: Any) -> LLMFeedback:
    return LLMFeedback(chat, config(**fields), get_task("summarization"))


def judge(source: LLMFeedback, response: str = RESPONSE, **payload: Any) -> SpanFeedback:
    return asyncio.run(source.judge(prompt(**payload), response))


def spans(feedback: SpanFeedback, response: str = RESPONSE) -> list[tuple[str, int]]:
    return [(response[s.start : s.end], s.label) for s in feedback.spans]


def many(source: LLMFeedback, count: int) -> list[SpanFeedback]:
    async def run() -> list[SpanFeedback]:
        return await asyncio.gather(*(source.judge(prompt(), RESPONSE) for _ in range(count)))

    return asyncio.run(run())


# What is asked and what an answer becomes


def test_an_answer_becomes_spans_that_point_into_the_critique() -> None:
    said = answer(
        "The phone is right. The second red is wrong.",
        span("phone", "good", phrase="The phone is right"),
        span("red", "poor", occurrence=2, severity=3, phrase="second red"),
    )
    feedback = judge(annotator(ScriptedChat(said)))
    assert spans(feedback) == [("phone", 1), ("red", -1)]
    phone, red = feedback.spans
    assert (phone.critique_range, red.start, red.severity, red.critique_range) == ((0, 18), 15, 3, (24, 34))
    assert (feedback.status, feedback.source, feedback.num_quotes, feedback.num_located) == ("ok", "llm", 2, 2)
    assert feedback.agreement is None and feedback.version.startswith("scripted#")


def test_the_model_reasons_first_and_spans_come_last() -> None:
    chat = ScriptedChat(GOOD)
    judge(annotator(chat))
    schema = chat.schemas[0]
    assert schema["required"] == list(schema["properties"]) == ["reasoning", "critique", "spans"]
    entry = schema["properties"]["spans"]["items"]
    assert entry["required"] == ["quote", "occurrence", "label", "severity", "phrase"]
    ((message,),) = chat.asked
    task = get_task("summarization").feedback_messages(prompt(), RESPONSE)
    assert message["content"].startswith(task[0]["content"])
    assert message["content"].index("step by step") < message["content"].index('"critique": then')


def test_without_a_critique_there_is_none_and_no_phrase() -> None:
    chat = ScriptedChat(json.dumps({"reasoning": "r", "critique": 7, "spans": [span("phone", "good")]}))
    feedback = judge(annotator(chat, style=StyleConfig(critique=False)))
    assert (feedback.critique, spans(feedback)) == ("", [("phone", 1)])
    assert chat.schemas[0]["required"] == ["reasoning", "spans"]
    assert "phrase" not in chat.schemas[0]["properties"]["spans"]["items"]["required"]
    assert "critique" not in chat.asked[0][0]["content"]


def test_human_feedback_is_shown_of_the_response_it_is_about() -> None:
    record = {"feedback": "The bag was blue.", "generated_summary": RESPONSE}
    chat = ScriptedChat(GOOD)
    judge(annotator(chat), **record)
    judge(annotator(chat), "Another one: phone.", **record)
    shown = ["The bag was blue." in messages[-1]["content"] for messages in chat.asked]
    assert shown == [True, False]


def test_another_style_or_vote_is_another_version() -> None:
    chat = ScriptedChat(GOOD)
    dense = annotator(chat, style=StyleConfig(labels="dense"))
    three = annotator(chat, num_annotators=3, temperature=0.7)
    assert len({annotator(chat).version, dense.version, three.version}) == 3
    assert annotator(chat).version == annotator(chat).version


def test_a_given_critique_is_kept_and_its_pieces_are_asked_for() -> None:
    critique = "I like that it names the phone.\nThere is no bag!"
    said = {"reasoning": "r", "spans": [span("bag", "poor", phrase="no bag"), span("phone", "good", phrase="phone")]}
    chat = ScriptedChat(json.dumps(said))
    feedback = asyncio.run(annotator(chat).align(prompt(), RESPONSE, critique))
    assert (feedback.critique, spans(feedback)) == (critique, [("phone", 1), ("bag", -1)])
    assert [critique[slice(*s.critique_range)] for s in feedback.spans if s.critique_range] == ["phone", "no bag"]
    assert critique in chat.asked[0][0]["content"] and chat.schemas[0]["required"] == ["reasoning", "spans"]


# What is wrong is told


def test_a_miss_is_told_and_the_call_is_made_again() -> None:
    chat = ScriptedChat(MISS, GOOD)
    feedback = judge(annotator(chat))
    assert spans(feedback) == [("phone", 1)] and feedback.num_quotes == feedback.num_located == 1
    assert [message["role"] for message in chat.asked[1]] == ["user", "assistant", "user"]
    assert chat.asked[1][0] == chat.asked[0][0] and chat.asked[1][1]["content"] == MISS
    complaint = chat.asked[1][2]["content"]
    assert 'The quote "case" does not occur in the response.' in complaint and '"bag"' not in complaint


def test_after_the_last_try_what_was_located_is_used_and_misses_are_counted() -> None:
    chat = ScriptedChat(MISS)
    feedback = judge(annotator(chat))
    assert len(chat.asked) == 3
    assert (spans(feedback), feedback.num_quotes, feedback.num_located) == ([("bag", -1)], 2, 1)
    assert feedback.status == "ok"


def test_a_later_answer_that_is_worse_does_not_replace_a_better_one() -> None:
    feedback = judge(annotator(ScriptedChat(MISS, "no JSON")))
    assert (spans(feedback), feedback.num_quotes) == ([("bag", -1)], 2)


def test_of_two_answers_with_as_many_quotes_located_that_with_fewer_faults_is_used() -> None:
    worse = answer("It is wrong.", *(span(quote, "poor", phrase="wrong") for quote in ("bag", "case", "cable")))
    assert judge(annotator(ScriptedChat(MISS, worse), max_tries=2)).num_quotes == 2


def test_nothing_located_is_unparsable_with_a_reason() -> None:
    feedback = judge(annotator(ScriptedChat(answer("c", span("case", "poor", phrase="c"))), max_tries=2))
    assert (feedback.status, feedback.spans, feedback.num_quotes, feedback.num_located) == ("unparsable", (), 1, 0)
    assert feedback.reason.startswith("2 answers, none without faults:") and '"case"' in feedback.reason


def test_a_critique_without_quotes_is_an_answer() -> None:
    chat = ScriptedChat(answer("The colour of the phone is missing."))
    feedback = judge(annotator(chat))
    assert (feedback.status, feedback.critique, len(chat.asked)) == ("empty", "The colour of the phone is missing.", 1)


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (span("", "poor", phrase="wrong"), "A quote is empty."),
        (span(" \n", "poor", phrase="wrong"), "A quote is empty."),
        (span("red", "poor", phrase="wrong", occurrence=3), "does not occur 3 times in the response"),
        (span("red", "poor", phrase="wrong", occurrence=0), "whole number from 1"),
        (span("red", "poor", phrase="wrong", severity=4), "must be 1, 2 or 3"),
        (span("red", "poor", phrase="wrong") | {"severity": True}, "must be 1, 2 or 3"),
        (span("red", "bad", phrase="wrong"), 'must be "good" or "poor"'),
        (span("red", "poor", phrase="wrong") | {"label": ["poor"]}, 'must be "good" or "poor"'),
        (span("red bag", "good", phrase="wrong"), 'The good quote "red bag" overlaps a poor one.'),
        (span("red bag", "poor", phrase="wrong"), 'The poor quote "red bag" overlaps a poor one.'),
        ({"label": "poor"}, 'needs a "quote"'),
        ({"quote": 5}, 'needs a "quote"'),
        ("red", 'needs a "quote"'),
        (None, 'needs a "quote"'),
    ],
)
def test_entries_that_are_told_left_out_and_counted(entry: Any, fault: str) -> None:
    chat = ScriptedChat(answer("It is wrong.", span("bag", "poor", phrase="wrong"), entry))
    feedback = judge(annotator(chat, max_tries=2))
    assert fault in chat.asked[1][-1]["content"]
    assert (spans(feedback), feedback.num_quotes, feedback.num_located) == ([("bag", -1)], 2, 1)


def test_a_phrase_that_the_critique_does_not_have_is_told_and_its_span_is_kept() -> None:
    chat = ScriptedChat(answer("It is wrong.", span("bag", "poor", phrase="the bag")))
    feedback = judge(annotator(chat, max_tries=2))
    assert 'The phrase "the bag" of the quote "bag" does not occur in the critique.' in chat.asked[1][-1]["content"]
    assert spans(feedback) == [("bag", -1)] and feedback.spans[0].critique_range is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "not one JSON object"),
        ("Sure!", "not one JSON object"),
        (GOOD[:-30], "not one JSON object"),
        ("[1]", "not one JSON object"),
        ('{"a": ' * 30_000, "characters; it must be shorter"),
        ('{"a":' * 9_000 + "}", "not one JSON object"),
        (json.dumps({"reasoning": "r", "spans": []}), '"critique" with a text'),
        (json.dumps({"critique": "c"}), '"spans" with a list'),
        (json.dumps({"critique": "c", "spans": {}}), '"spans" with a list'),
        (answer("  "), "The critique is empty."),
        (Completion(text=GOOD, finish_reason="length", prompt_tokens=1, output_tokens=99), "cut after 99 tokens"),
    ],
)
def test_answers_that_cannot_be_read(text: str | Completion, fault: str) -> None:
    chat = ScriptedChat(text)
    feedback = judge(annotator(chat, max_tries=2))
    assert (feedback.status, len(chat.asked)) == ("unparsable", 2)
    assert fault in chat.asked[1][-1]["content"] and fault in feedback.reason
    assert all(len(message["content"]) < 6000 for message in chat.asked[1])


def test_text_around_the_object_is_forgiven() -> None:
    assert spans(judge(annotator(ScriptedChat(f"Here it is:\n```json\n{GOOD}\n```")))) == [("phone", 1)]


def test_half_characters_do_not_end_the_annotation() -> None:
    entry = '{"quote": "\\udfff", "label": "poor", "phrase": "bad"}'
    chat = ScriptedChat('{"reasoning": "", "critique": "bad \\ud800", "spans": [' + entry + "]}")
    feedback = asyncio.run(annotator(chat).judge(prompt(), "x \ud800"))
    assert feedback.status == "unparsable"
    "".join(message["content"] for messages in chat.asked for message in messages).encode()
    feedback.critique.encode()


def test_good_pieces_overlap_no_good_ones_and_the_same_piece_twice_is_one() -> None:
    twice = span("phone", "good", phrase="right"), span("phone", "good", phrase="right")
    chat = ScriptedChat(answer("right", *twice, span("red phone", "good", phrase="right")), answer("right", *twice))
    assert spans(judge(annotator(chat))) == [("phone", 1)] and len(chat.asked) == 2
    assert 'The good quote "red phone" overlaps a good one.' in chat.asked[1][-1]["content"]


def test_a_thousand_entries_are_bounded() -> None:
    said = answer("red", *(span("red", "good", phrase="red") for _ in range(600)))
    feedback = judge(annotator(ScriptedChat(said), max_tries=1))
    assert feedback.num_quotes == 600 and len(feedback.spans) == 1


# No answer


def test_a_refusal_is_not_argued_with() -> None:
    no = Completion(text="I cannot help.", finish_reason="refusal", prompt_tokens=5, output_tokens=4)
    chat = ScriptedChat(no)
    feedback = judge(annotator(chat))
    assert (feedback.status, len(chat.asked)) == ("failed", 1)
    assert "refused: I cannot help." in feedback.reason


def test_a_failure_after_a_usable_answer_does_not_lose_it() -> None:
    chat = ScriptedChat(MISS, ChatFailed("answer", "nothing", passing=False))
    assert spans(judge(annotator(chat))) == [("bag", -1)]


def test_patience_is_of_one_judgement_and_the_last_failure_is_named() -> None:
    waits = [ChatFailed("HTTP 503", f"try {s}", passing=True, retry_after_s=s) for s in (0.01, 0.01, 3600)]
    chat = ScriptedChat(*waits)
    feedback = judge(annotator(chat, timeout_s=600))
    assert feedback.status == "failed" and len(chat.asked) == 3
    assert feedback.reason == "try 3600; no answer to 3 requests within timeout_s=600"


def test_time_that_requests_take_is_patience_spent() -> None:
    failed = ChatFailed("HTTP 503", "overloaded", passing=True, retry_after_s=0)
    chat = ScriptedChat(*[failed] * 12, GOOD, delay_s=0.1)
    assert judge(annotator(chat, timeout_s=0.45)).status == "failed"
    assert len(chat.asked) <= 5


def test_an_answer_that_does_not_come_is_a_failure_with_a_price() -> None:
    source = annotator(ScriptedChat(GOOD, delay_s=3600), timeout_s=0.2)
    feedback = judge(source)
    assert feedback.status == "failed" and "gave no answer within 0.2 s" in feedback.reason
    estimate = estimate_cost([(prompt(), RESPONSE)], config(), get_task("summarization"))
    assert source.num_tokens == estimate.prompt_tokens


def test_a_judgement_is_finished_before_another_begins() -> None:
    chat = ScriptedChat(MISS, GOOD, MISS, GOOD)
    many(annotator(chat, concurrency=1), 2)
    assert [len(messages) for messages in chat.asked] == [1, 3, 1, 3]


def test_a_wait_beyond_all_patience_is_not_begun() -> None:
    chat = ScriptedChat(ChatFailed("HTTP 429", "later", passing=True, retry_after_s=600))
    started = time.monotonic()
    assert judge(annotator(chat, timeout_s=300)).status == "failed"
    assert time.monotonic() - started < 100 and len(chat.asked) == 1


def test_nobody_answers_and_the_run_stops() -> None:
    source = annotator(ScriptedChat(ChatFailed("HTTP 400", "no such option", passing=False)))
    for _ in range(MAX_LOST - 1):
        assert judge(source).reason == "no such option"
    with pytest.raises(RunStopped, match=f"{MAX_LOST} annotators in a row got no answer, .*no such option"):
        judge(source)


def test_an_answer_in_between_is_a_sign_of_life() -> None:
    failed = ChatFailed("HTTP 400", "no", passing=False)
    source = annotator(ScriptedChat(*[failed] * (MAX_LOST - 1), GOOD, *[failed] * (MAX_LOST - 1), GOOD))
    assert [judge(source).status for _ in range(2 * MAX_LOST)].count("ok") == 2


def test_each_kind_of_failure_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = [ChatFailed("HTTP 400", "no", passing=False)] * 3 + [ChatFailed("x", "?", passing=False)]
    source = annotator(ScriptedChat(*failures))
    for _ in range(4):
        judge(source)
    assert [message.split(" (")[0] for message in caplog.messages] == ["feedback failed: no", "feedback failed: ?"]


# What it costs


def test_the_cap_ends_requests_but_not_records() -> None:
    chat = ScriptedChat(GOOD)  # 110 tokens each
    source = annotator(chat, max_total_tokens=200)
    feedback = [judge(source) for _ in range(3)]
    assert [f.status for f in feedback] == ["ok", "ok", "failed"]
    assert "220 tokens are spent" in feedback[2].reason and "llm.max_total_tokens=200" in feedback[2].reason
    assert (source.num_tokens, len(chat.asked)) == (220, 2)
    assert all(judge(source).status == "failed" for _ in range(MAX_LOST))  # each record is told, the run is not stopped


def test_an_estimate_counts_bytes_and_longest_answers() -> None:
    chat = ScriptedChat(GOOD)
    fields = {"num_annotators": 3, "temperature": 0.7, "max_output_tokens": 50, "max_total_tokens": 9999}
    judge(annotator(chat, **fields))
    content, schema = chat.asked[0][0]["content"], json.dumps(chat.schemas[0])
    expected = -(-len(content.encode()) // 3) + 8 + -(-len(schema) // 3)
    items = [(prompt(), RESPONSE), (prompt(), RESPONSE)]
    estimate = estimate_cost(items, config(**fields), get_task("summarization"))
    assert (estimate.num_requests, estimate.output_tokens) == (6, 300)
    assert estimate.prompt_tokens == 6 * expected and estimate.total == 6 * (expected + 50)
    refuse_over_cap(estimate, config(max_total_tokens=estimate.total).llm)
    refuse_over_cap(estimate, config().llm)
    words = rf"6 requests to judge .* about {estimate.total} tokens .* \(data\.limit\) under another run\.name"
    with pytest.raises(UserError, match=words):
        refuse_over_cap(estimate, config(max_total_tokens=estimate.total - 1).llm)


# Several annotators


def test_annotators_vote_and_agreement_is_reported() -> None:
    phone, bag = span("phone", "good", phrase="c"), span("bag", "poor", phrase="c")
    chat = ScriptedChat(lambda seed: answer("c", *[[phone, bag], [phone], [bag]][seed]))
    feedback = judge(annotator(chat, num_annotators=3, temperature=0.7))
    assert spans(feedback) == [("phone", 1), ("bag", -1)]
    assert feedback.agreement == pytest.approx((2 * 5 / (8 + 5) + 2 * 3 / (8 + 3) + 0) / 3)
    assert (feedback.num_quotes, len(chat.asked)) == (4, 3)


def test_one_lost_annotator_of_three_weakens_the_vote_and_two_end_it() -> None:
    failed = ChatFailed("x", "gone", passing=False)
    two = judge(annotator(ScriptedChat(failed, GOOD), num_annotators=3, temperature=0.7))
    assert spans(two) == [("phone", 1)]
    one = judge(annotator(ScriptedChat(failed, failed, GOOD), num_annotators=3, temperature=0.7))
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
    chat = EndpointChat(config(**fields).llm, environ={KEY_VARIABLE: KEY})
    return annotator(chat, **fields)


def test_what_may_pass_is_tried_again(server: FakeEndpoint) -> None:
    soon = {"Retry-After": "0.01"}
    bad = [Reply(429, {}), Reply(429, {}, {"Retry-After": "0.3"}), Reply(503, {}, soon), Reply(500, "<html>", soon)]
    server.reply = lambda number, body: bad[number - 1] if number <= len(bad) else says(GOOD)
    assert judge(over(server)).status == "ok"
    assert len(server.requests) == 5
    assert server.times[2] - server.times[1] >= 0.3


def test_what_breaks_off_is_tried_again(server: FakeEndpoint) -> None:
    bad = Reply(body=completion(GOOD), missing_bytes=9)
    server.reply = lambda number, body: bad if number == 1 else says(GOOD)
    assert judge(over(server)).status == "ok"
    assert len(server.requests) == 2


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


def test_a_server_that_asks_to_wait_is_left_alone_by_everybody() -> None:
    chat = ScriptedChat(ChatFailed("HTTP 429", "later", passing=True, retry_after_s=0.4), GOOD)

    async def run() -> list[SpanFeedback]:
        source = annotator(chat)
        first = asyncio.create_task(source.judge(prompt(), RESPONSE))
        await chat.answered.wait()
        return [await source.judge(prompt(), RESPONSE), await first]

    assert [feedback.status for feedback in asyncio.run(run())] == ["ok", "ok"]
    assert min(chat.times[1:]) - chat.times[0] >= 0.4


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
    chat = ScriptedChat(GOOD)
    slow = annotator(chat, requests_per_minute=120, timeout_s=1.5)
    assert {feedback.status for feedback in many(slow, 5)} == {"ok"}
    assert chat.times[-1] - chat.times[0] > 1.5  # 2 s, less what the first was late


def test_a_wrong_key_stops_the_run_at_once(server: FakeEndpoint, caplog: pytest.LogCaptureFixture) -> None:
    server.reply = lambda number, body: Reply(401, {"error": {"message": f"no key {KEY}"}})
    with pytest.raises(UserError, match=KEY_VARIABLE) as caught:
        many(over(server, concurrency=1), 5)
    assert KEY not in str(caught.value) + caplog.text and len(server.requests) <= 2


def test_a_server_that_is_down(server: FakeEndpoint) -> None:
    server.shutdown()
    server.server_close()
    feedback = judge(over(server, timeout_s=3))
    assert feedback.status == "failed"
    assert "connection" in feedback.reason.lower() and "requests within timeout_s=3" in feedback.reason


def test_a_web_page_instead_of_an_answer(server: FakeEndpoint) -> None:
    server.reply = lambda number, body: Reply(body="<html>Sign in</html>")
    feedback = judge(over(server))
    assert (feedback.status, len(server.requests)) == ("failed", 1) and "no JSON" in feedback.reason
