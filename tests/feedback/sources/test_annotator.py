"""Requests to annotators, the feedback in their answers, and follow-ups about faults."""

import asyncio
import json
from typing import Any

import pytest
from annotators import GOOD, MISS, RESPONSE, ScriptedChat, annotator, ask, judge, prompt, spans
from fake_endpoint import answer, span

from t2g.config import PolicyJob, StyleConfig
from t2g.feedback.fixes import apply_fixes
from t2g.feedback.sources.annotator import make_request
from t2g.feedback.sources.chat_client import ChatCompletion
from t2g.tasks.base import get_task


def test_an_answer_becomes_spans_that_point_into_the_critique() -> None:
    scripted = answer(
        "The phone is right. The second red is wrong.",
        span("phone", "good", phrase="The phone is right"),
        span("red", "poor", occurrence=2, severity=3, phrase="second red"),
    )
    feedback, _ = ask(scripted)
    assert spans(feedback) == [("phone", 1), ("red", -1)]
    phone, red = feedback.spans
    assert (phone.critique_range, red.start, red.severity, red.critique_range) == ((0, 18), 15, 3, (24, 34))
    assert (feedback.status, feedback.source, feedback.num_quotes, feedback.num_located) == ("ok", "llm", 2, 2)
    assert feedback.agreement is None and feedback.version.startswith("scripted#")


@pytest.mark.parametrize("confidence", [0.25, 95, "high", float("nan")])
def test_a_confidence_that_no_schema_asked_for_is_not_read(confidence: object) -> None:
    unsure = span("phone", "good", phrase="phone is right") | {"confidence": confidence}
    feedback, _ = ask(answer("The phone is right.", unsure))
    assert [piece.confidence for piece in feedback.spans] == [1.0]


def test_a_fix_of_a_poor_piece_is_kept_and_of_a_good_one_ignored() -> None:
    feedback, _ = ask(
        answer(
            "The phone is right. Its red is wrong: blue. The bag is too much.",
            span("phone", "good", phrase="phone is right") | {"fix": "phone"},
            span("red", "poor", phrase="red is wrong") | {"fix": "blue"},
            span(", a red bag", "poor", phrase="too much") | {"fix": ""},
        )
    )
    fixes = {RESPONSE[span.start : span.end]: span.fix for span in feedback.spans}
    assert fixes == {"phone": None, "red": "blue", ", a red bag": ""}
    assert apply_fixes(RESPONSE, feedback.spans) == "A blue phone."
    assert [span.fix for span in ask(GOOD)[0].spans] == [None]  # an answer without the key


def test_the_model_reasons_first_and_spans_come_last() -> None:
    _, chat = ask(GOOD)
    schema = chat.schemas[0]
    assert schema["required"] == list(schema["properties"]) == ["reasoning", "critique", "spans"]
    entry = schema["properties"]["spans"]["items"]
    assert entry["required"] == ["quote", "occurrence", "label", "severity", "fix", "phrase"]
    ((message,),) = chat.requests
    task = get_task("summarization")
    assert message["content"].startswith(task.review.opening)
    order = [task.material(prompt(), RESPONSE), "step by step", task.review.questions, '"critique": then', '"spans"']
    places = [message["content"].index(part) for part in order]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["summarization", "qa", "code", "prompts", "tiny"])
@pytest.mark.parametrize("critique", [None, "The bag is wrong."])
def test_one_form_of_the_answer_is_requested(name: str, critique: str | None) -> None:
    """The reward model's form, two lists of quotes, contradicts the annotator's."""
    for labels in ("sparse", "dense"):
        request = make_request(get_task(name), prompt(), RESPONSE, StyleConfig(labels=labels), critique)
        (message,) = request.messages
        assert message["content"].count("Answer with") == 1
        assert '"good": [' not in message["content"] and "another form" not in message["content"]
        assert all(f'"{key}":' in message["content"] for key in request.keys)


def test_redundancy_is_poor_and_in_the_prompt() -> None:
    review = get_task("summarization").review
    assert "says something again" in review.instructions(StyleConfig())
    content = make_request(get_task("summarization"), prompt(), RESPONSE, StyleConfig()).messages[0]["content"]
    assert "says something again" in content and "said twice" in content


def test_a_severity_means_the_same_to_annotator_reward_model_and_pay() -> None:
    """A wrong line of code costs reward; a working line that could be improved costs nothing."""
    task = get_task("code")
    meaning = task.review.severity
    content = make_request(task, prompt(), RESPONSE, StyleConfig()).messages[0]["content"]
    assert meaning in content
    assert meaning in task.feedback_messages(prompt(), RESPONSE)[0]["content"]
    assert "more harm" not in content and "3 is wrong" in meaning and "1 works" in meaning
    judge = {"source": "llm", "llm": {"model": "m", "url": "http://localhost/v1"}}
    job = PolicyJob(task="code", model={"policy": "m"}, data={"path": "p"}, feedback=judge)
    scripted = answer(
        "So.", span("bag", "poor", severity=3, phrase="So"), span("phone", "poor", severity=1, phrase="So")
    )
    judged, _ = ask(scripted)
    paid = {RESPONSE[s.start : s.end]: job.objective.rewards.poor[s.severity - 1] for s in judged.spans}
    assert paid == {"bag": -1.0, "phone": 0.0}


def test_without_a_critique_there_is_none_and_no_phrase() -> None:
    feedback, chat = ask(
        json.dumps({"reasoning": "r", "critique": 7, "spans": [span("phone", "good")]}),
        style=StyleConfig(critique=False),
    )
    assert (feedback.critique, spans(feedback)) == ("", [("phone", 1)])
    assert chat.schemas[0]["required"] == ["reasoning", "spans"]
    assert "phrase" not in chat.schemas[0]["properties"]["spans"]["items"]["required"]
    assert "critique" not in chat.requests[0][0]["content"]


def test_human_feedback_is_shown_of_the_response_it_is_about() -> None:
    record = {"feedback": "The bag was blue.", "generated_summary": RESPONSE}
    chat = ScriptedChat(GOOD)
    judge(annotator(chat), **record)
    judge(annotator(chat), "Another one: phone.", **record)
    has_feedback = ["The bag was blue." in messages[-1]["content"] for messages in chat.requests]
    assert has_feedback == [True, False]


def test_another_style_or_vote_is_another_version() -> None:
    chat = ScriptedChat(GOOD)
    dense = annotator(chat, style=StyleConfig(labels="dense"))
    three = annotator(chat, num_annotators=3, temperature=0.7)
    assert len({annotator(chat).version, dense.version, three.version}) == 3
    assert annotator(chat).version == annotator(chat).version


def test_a_given_critique_is_kept_and_its_spans_are_requested() -> None:
    critique = "I like that it names the phone.\nThere is no bag!"
    scripted = {
        "reasoning": "r",
        "spans": [span("bag", "poor", phrase="no bag"), span("phone", "good", phrase="phone")],
    }
    chat = ScriptedChat(json.dumps(scripted))
    feedback = asyncio.run(annotator(chat).align(prompt(), RESPONSE, critique))
    assert (feedback.critique, spans(feedback)) == (critique, [("phone", 1), ("bag", -1)])
    assert [critique[slice(*s.critique_range)] for s in feedback.spans if s.critique_range] == ["phone", "no bag"]
    assert critique in chat.requests[0][0]["content"]
    assert chat.schemas[0]["required"] == ["reasoning", "spans"]


def test_a_critique_alone_is_written_first_and_its_spans_are_found_by_a_second_request() -> None:
    first = json.dumps({"reasoning": "r", "critique": "The bag is wrong."})
    second = json.dumps({"reasoning": "r", "spans": [span("bag", "poor", phrase="bag")]})
    feedback, chat = ask(first, second, style=StyleConfig(spans=False), align="llm", num_annotators=1)
    assert (feedback.critique, spans(feedback), feedback.status) == ("The bag is wrong.", [("bag", -1)], "ok")
    assert [schema["required"] for schema in chat.schemas] == [["reasoning", "critique"], ["reasoning", "spans"]]
    received_requests = [messages[0]["content"] for messages in chat.requests]
    assert '"spans"' not in received_requests[0]
    assert "The bag is wrong." in received_requests[1]
    assert len(received_requests) == 2
    unusable, chat = ask(json.dumps({"reasoning": "r", "critique": " "}), style=StyleConfig(spans=False), align="llm")
    assert unusable.status == "unparsable" and len(chat.requests) == 3, "nothing to align"


# Faults


def test_a_failed_call_is_reported_and_repeated() -> None:
    feedback, chat = ask(MISS, GOOD)
    assert spans(feedback) == [("phone", 1)]
    assert feedback.num_quotes == feedback.num_located == 1
    assert [message["role"] for message in chat.requests[1]] == ["user", "assistant", "user"]
    assert chat.requests[1][0] == chat.requests[0][0]
    assert chat.requests[1][1]["content"] == MISS
    complaint = chat.requests[1][2]["content"]
    assert 'The quote "case" does not occur in the response.' in complaint and '"bag"' not in complaint


def test_after_the_last_try_what_was_located_is_used_and_misses_are_counted() -> None:
    feedback, chat = ask(MISS)
    assert len(chat.requests) == 3
    assert (spans(feedback), feedback.num_quotes, feedback.num_located) == ([("bag", -1)], 2, 1)
    assert feedback.status == "ok"


def test_a_later_answer_that_is_worse_does_not_replace_a_better_one() -> None:
    feedback, _ = ask(MISS, "no JSON")
    assert (spans(feedback), feedback.num_quotes) == ([("bag", -1)], 2)


def test_of_two_answers_with_as_many_quotes_located_that_with_fewer_faults_is_used() -> None:
    worse = answer("It is wrong.", *(span(quote, "poor", phrase="wrong") for quote in ("bag", "case", "cable")))
    assert ask(MISS, worse, max_tries=2)[0].num_quotes == 2


def test_nothing_located_is_unparsable_with_a_reason() -> None:
    feedback, _ = ask(answer("c", span("case", "poor", phrase="c")), max_tries=2)
    assert (feedback.status, feedback.spans, feedback.num_quotes, feedback.num_located) == ("unparsable", (), 1, 0)
    assert feedback.reason.startswith("2 answers, none without faults:") and '"case"' in feedback.reason


def test_a_critique_without_quotes_is_an_answer() -> None:
    feedback, chat = ask(answer("The color of the phone is missing."))
    assert (feedback.status, feedback.critique, len(chat.requests)) == (
        "empty",
        "The color of the phone is missing.",
        1,
    )


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        (span("", "poor", phrase="wrong"), "A quote is empty."),
        (span(" \n", "poor", phrase="wrong"), "A quote is empty."),
        (span("red", "poor", phrase="wrong", occurrence=3), "does not occur 3 times in the response"),
        (span("red", "poor", phrase="wrong") | {"severity": True}, "severity: Input should be"),
        (span("red", "weak", phrase="wrong"), "label: Input should be 'good' or 'poor'"),
        (span("red", "poor", phrase="wrong") | {"label": ["poor"]}, "label: Input should be 'good' or 'poor'"),
        (span("red bag", "good", phrase="wrong"), 'The good quote "red bag" overlaps a poor one.'),
        (span("red bag", "poor", phrase="wrong"), 'The poor quote "red bag" overlaps a poor one.'),
        ({"label": "poor"}, "quote: Field required"),
        ({"quote": 5}, "quote: Input should be"),
        ("red", "label: Field required"),
        (None, "The entry null of spans is wrong"),
    ],
)
def test_flawed_entries_are_reported_left_out_and_counted(entry: Any, fault: str) -> None:
    feedback, chat = ask(answer("It is wrong.", span("bag", "poor", phrase="wrong"), entry), max_tries=2)
    assert fault in chat.requests[1][-1]["content"]
    assert (spans(feedback), feedback.num_quotes, feedback.num_located) == ([("bag", -1)], 2, 1)


@pytest.mark.parametrize(
    "entry",
    [
        span("bag", "poor", phrase="wrong") | {"label": " Poor ", "severity": "2", "occurrence": 1.0},
        span("bag", "poor", phrase="wrong") | {"label": "POOR", "severity": 2.0, "occurrence": None},
    ],
)
def test_numbers_and_labels_are_read_as_models_write_them(entry: dict[str, Any]) -> None:
    good = span("phone", "good", phrase="wrong") | {"severity": None, "fix": 3, "occurrence": "1"}
    feedback, chat = ask(answer("It is wrong.", good, entry))
    assert (spans(feedback), len(chat.requests)) == ([("phone", 1), ("bag", -1)], 1)
    assert [piece.severity for piece in feedback.spans] == [1, 2]


@pytest.mark.parametrize(
    ("details", "severity"),
    [
        ({"severity": 4}, 3),
        ({"severity": 0}, 1),
        ({"severity": -2.0}, 1),
        ({"occurrence": 0}, 1),
        ({"occurrence": 2}, 1),  # the response has it once
        ({"fix": 5}, 1),
        ({"fix": "x" * 4001}, 1),
        ({"fix": "half \ud83d"}, 1),
        ({"label": "Incorrect"}, 1),
        ({"label": -1}, 1),
    ],
)
def test_a_poor_piece_is_kept_without_what_is_wrong_in_its_details(details: dict[str, Any], severity: int) -> None:
    entry = span("bag", "poor", phrase="wrong") | details
    feedback, chat = ask(answer("It is wrong.", span("phone", "good", phrase="wrong"), entry))
    assert (spans(feedback), len(chat.requests)) == ([("phone", 1), ("bag", -1)], 1)
    assert (feedback.spans[1].severity, feedback.spans[1].fix) == (severity, None)


@pytest.mark.parametrize("first", ["good", "poor"])
def test_two_entries_with_one_place_of_several_are_reported(first: str) -> None:
    twice = span("red", first, phrase="wrong"), span("red", "poor", phrase="wrong")
    feedback, chat = ask(answer("It is wrong.", *twice), max_tries=2)
    assert 'The quote "red" occurs more than once' in chat.requests[1][-1]["content"]
    assert spans(feedback) == [("red", -1)]


def test_a_quote_of_code_is_where_the_line_end_is_spelled() -> None:
    response = "a = x.split(' ')\nb = y.split('\\n')"
    written = json.dumps(span("split('X')", "poor", phrase="wrong")).replace("X", r"\n")
    text = f'{{"reasoning": "", "critique": "It is wrong.", "spans": [{written}]}}'
    feedback = asyncio.run(annotator(ScriptedChat(text)).judge(prompt(), response))
    (located,) = feedback.spans
    assert located.start == response.index("split", 20)


def test_a_lone_surrogate_in_an_answer_is_no_part_of_a_fault() -> None:
    _, chat = ask(answer("The bag.", span("bag", "poor", phrase="lone \ud800")), GOOD)
    assert 'The phrase "lone \ufffd" of the quote "bag"' in chat.requests[1][-1]["content"]


def test_a_phrase_missing_from_the_critique_is_reported_and_its_span_kept() -> None:
    feedback, chat = ask(answer("It is wrong.", span("bag", "poor", phrase="the bag")), max_tries=2)
    assert 'The phrase "the bag" of the quote "bag" does not occur in the critique.' in chat.requests[1][-1]["content"]
    assert spans(feedback) == [("bag", -1)]
    assert feedback.spans[0].critique_range is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "answer is no JSON"),
        ("Sure!", "answer is no JSON"),
        (GOOD[:-30], "answer is no JSON"),
        ("[1]", "answer is no JSON"),
        ('{"a": ' * 30_000 + "}", "characters; at most"),
        ('{"a":' * 9_000 + "}", "answer is no JSON"),
        (json.dumps({"reasoning": "r", "spans": []}), "critique is missing or no str"),
        (json.dumps({"critique": "c"}), "spans is missing or no list"),
        (json.dumps({"critique": "c", "spans": {}}), "spans is missing or no list"),
        (answer("  "), "The critique is empty."),
        (
            ChatCompletion(text=GOOD, finish_reason="length", prompt_tokens=1, output_tokens=99),
            "truncated after 99 tokens",
        ),
    ],
)
def test_answers_that_cannot_be_read(text: str | ChatCompletion, fault: str) -> None:
    feedback, chat = ask(text, max_tries=2)
    assert (feedback.status, len(chat.requests)) == ("unparsable", 2)
    assert fault in chat.requests[1][-1]["content"]
    assert fault in feedback.reason
    assert all(len(message["content"]) < 6000 for message in chat.requests[1])


def test_the_complete_spans_of_a_cut_answer_are_kept_if_one_is_poor() -> None:
    whole = answer("It is a phone.", span("phone", "poor", phrase="phone"), span("A", "good", phrase="It"))
    shortened = ChatCompletion(text=whole[:-4], finish_reason="length", prompt_tokens=1, output_tokens=99)
    feedback, chat = ask(shortened, max_tries=2)
    assert "truncated after 99 tokens" in chat.requests[1][-1]["content"]  # the second request begins with it
    assert (feedback.status, spans(feedback)) == ("ok", [("phone", -1)])


def cut(text: str) -> ChatCompletion:
    return ChatCompletion(text=text, finish_reason="length", prompt_tokens=1, output_tokens=99)


def test_a_draft_before_an_answer_that_was_cut_does_not_count() -> None:
    draft = answer("It is a phone.", span("phone", "poor", phrase="phone"))
    final = answer("It is a phone.", span("bag", "poor", phrase="phone"), span("A", "good", phrase="It"))
    assert spans(ask(cut(f"{draft}\nWait:\n{final[:-4]}"), max_tries=1)[0]) == [("bag", -1)]
    drafts = [f"{draft}\nWait:\n{final[:60]}", f"<think>Perhaps {draft} or", f"<|channel|>analysis<|message|>{draft}"]
    assert [ask(cut(text), max_tries=1)[0].status for text in drafts] == ["unparsable"] * 3
    assert spans(ask(cut(f"<think>{draft}</think>In {{1, 2}}: {final[:-4]}"), max_tries=1)[0]) == [("bag", -1)]
    wrapped = f'{{"feedback": {final[:-4]}'
    assert spans(ask(cut(wrapped), max_tries=1)[0]) == [("bag", -1)]


def test_text_around_the_object_is_forgiven() -> None:
    assert spans(ask(f"Here it is:\n```json\n{GOOD}\n```")[0]) == [("phone", 1)]


@pytest.mark.parametrize(
    ("response", "quote", "occurrence", "start"),
    [
        ("return n", "n", 1, 7),
        ("return n", "n", 2, 7),  # as it is counted in the text
        ("with it", "it", 2, 5),
        ("n return n", "n", 2, 9),  # as whole words are counted
        ("return", "n", 1, 5),
        ("noon", "n", 2, 3),
    ],
)
def test_an_occurrence_is_counted_with_and_without_matches_within_words(
    response: str, quote: str, occurrence: int, start: int
) -> None:
    text = answer("It is wrong.", span(quote, "poor", phrase="wrong", occurrence=occurrence))
    chat = ScriptedChat(text)
    feedback = asyncio.run(annotator(chat).judge(prompt(), response))
    assert [piece.start for piece in feedback.spans] == [start]


def test_half_characters_do_not_end_the_annotation() -> None:
    entry = '{"quote": "\\udfff", "label": "poor", "phrase": "bad"}'
    chat = ScriptedChat('{"reasoning": "", "critique": "bad \\ud800", "spans": [' + entry + "]}")
    feedback = asyncio.run(annotator(chat).judge(prompt(), "x \ud800"))
    assert feedback.status == "unparsable"
    "".join(message["content"] for messages in chat.requests for message in messages).encode()
    feedback.critique.encode()


def test_good_pieces_overlap_no_good_ones_and_the_same_piece_twice_is_one() -> None:
    twice = span("phone", "good", phrase="right"), span("phone", "good", phrase="right")
    feedback, chat = ask(answer("right", *twice, span("red phone", "good", phrase="right")), answer("right", *twice))
    assert spans(feedback) == [("phone", 1)]
    assert len(chat.requests) == 2
    assert 'The good quote "red phone" overlaps a good one.' in chat.requests[1][-1]["content"]


def test_a_thousand_entries_are_bounded() -> None:
    scripted = answer("red", *(span("red", "good", phrase="red") for _ in range(600)))
    feedback, _ = ask(scripted, max_tries=1)
    assert feedback.num_quotes == 600 and len(feedback.spans) == 1
