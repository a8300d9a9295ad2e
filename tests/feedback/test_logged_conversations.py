"""Logged conversations: the messages of a record, and the replies that are critiques of the assistant's turns."""

import asyncio
import json
import random
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2g.feedback.conversations import AssistantTurn, read_conversation, split_conversation
from t2g.feedback.sources.next_message import NextMessageFeedback
from t2g.loop.annotation import make_turn_samples
from t2g.tasks.base import get_task
from t2g.text.messages import ROLES
from t2g.text.tokenizer import Message

KEYS = ("role", "from", "content", "value", "tool_calls", "function_call", "function", "name", "arguments", "text")
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ås"}'}}


def chat(*texts: str) -> list[Message]:
    """Return messages of "user: text" and the like."""
    return [dict(zip(("role", "content"), text.split(": ", 1), strict=True)) for text in texts]


def test_the_messages_after_a_response_are_its_critique() -> None:
    messages = chat("system: Be short.", "user: Add.", "assistant: 1+1=3", "user: wrong", "assistant: 2", "user: ok")
    first, second = split_conversation(messages)
    assert first == AssistantTurn(number=1, history=tuple(messages[:2]), response="1+1=3", critique="wrong")
    assert second == AssistantTurn(number=2, history=tuple(messages[:4]), response="2", critique="ok")


def test_results_of_several_tools_are_one_critique_and_other_messages_are_none() -> None:
    texts = (
        "user: q",
        "assistant: a",
        "assistant: b",
        "tool: 7",
        "system: Hurry.",
        "tool:  ",
        "user: no",
        "assistant: c",
    )
    assert [(turn.number, turn.response, turn.critique) for turn in split_conversation(chat(*texts))] == [
        (1, "a", ""), (2, "b", "7\n\nno"), (3, "c", ""),
    ]  # fmt: skip


def test_every_assistant_message_is_a_turn_whose_history_is_all_before_it() -> None:
    rng = random.Random(0)
    for _ in range(200):
        roles = rng.choices(("system", "user", "assistant", "tool"), k=rng.randrange(8))
        messages = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
        turns = list(split_conversation(messages))
        assert [messages[len(turn.history)]["content"] for turn in turns] == [turn.response for turn in turns]
        assert sum(role == "assistant" for role in roles) == len(turns)
        replies = (
            [m["content"] for m in messages[roles.index("assistant") :] if m["role"] in ("user", "tool")]
            if turns
            else []
        )
        assert "\n\n".join(turn.critique for turn in turns if turn.critique) == "\n\n".join(replies)
        assert all(turn.history == tuple(messages[: len(turn.history)]) for turn in turns)


def test_a_conversation_of_very_many_turns_is_not_stored_once_for_each() -> None:
    messages = [{"role": "user", "content": "x" * 10**6}]
    for _ in range(60):
        messages += chat("assistant: y", "user: z")
    turns = list(split_conversation(messages))
    assert [len(turn.history) for turn in turns] == [*range(1, 99, 2), *[0] * 11]
    assert turns[48].problem == ""
    assert turns[49].problem.startswith("the histories of the turns up to this one have more than 50000000 characters")
    samples = make_turn_samples([{"messages": [*messages[:1], *messages[1:3] * 60]}], get_task("prompts"))
    assert [sample.is_left_out for sample in samples] == [False] * 49 + [True] * 11


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "Hi", "name": "ann"}, "user: Hi"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}, "user: ab"),
        ({"role": "developer", "content": "Be kind."}, "system: Be kind."),
        ({"role": "assistant", "content": None}, "assistant: "),
        ({"role": "tool", "tool_call_id": "c1", "content": "rain"}, "tool: rain"),
        ({"from": "human", "value": "Hi"}, "user: Hi"),
        ({"role": None, "content": None, "from": "Human", "value": "Hi"}, "user: Hi"),
        ({"role": "model", "content": "Ho"}, "assistant: Ho"),
        ({"from": "chatgpt", "value": "Ho"}, "assistant: Ho"),
        ({"from": "bing", "value": "Ho"}, "assistant: Ho"),
        ({"role": "ipython", "content": "3"}, "tool: 3"),
        ({"from": "gpt", "value": "Ho"}, "assistant: Ho"),
        ({"from": "observation", "value": "rain"}, "tool: rain"),
    ],
)
def test_forms_of_openai_and_sharegpt_are_read(message: dict[str, Any], expected: str) -> None:
    assert read_conversation({"messages": [message]}) == (chat(expected), {}, {})


def test_a_tool_call_is_a_line_of_its_own_in_the_text() -> None:
    requests = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL]}
    text = read_conversation({"messages": [requests]}).messages[0]["content"].splitlines()
    assert text[0] == "Let me look."
    assert text[1] == text[2]
    assert json.loads(text[1]) == {"name": "weather", "arguments": {"town": "Ås"}}
    assert "Ås" in text[1]
    (alone,) = read_conversation({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]}).messages
    assert alone["content"] == text[1]
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{broken"}}
    assert read_conversation({"messages": [old]}).messages[0]["content"] == '{"name": "f", "arguments": "{broken"}'
    half = {"role": "assistant", "function_call": {"name": "f", "arguments": '{"town": "\\ud800"}'}}  # of a character
    read_conversation({"messages": [half]}).messages[0]["content"].encode()


def test_errors_of_logged_tools_are_about_the_arguments_of_their_call() -> None:
    def call(call_id: str, town: str) -> dict[str, Any]:
        arguments = json.dumps({"town": town, "note": "a\u2028b\n"})
        return {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}

    unknown = '{"error": "no town \\"Rom\\"", "hint": "`town` is unknown"}'
    messages: list[dict[str, Any]] = chat("user: Weather?")
    messages.append(
        {"role": "assistant", "content": "Let me\nlook.", "tool_calls": [call("a", "Oslo"), call("b", "Rom")]}
    )
    messages.append({"role": "tool", "tool_call_id": "b", "content": unknown})
    messages.append({"role": "tool", "tool_call_id": "b", "content": "Error: `town` is Oslo, again"})  # about no call
    messages += chat("tool: rain")
    messages.append({"role": "assistant", "content": "Rain.", "tool_calls": [call("c", "Ås")]})
    messages += chat("tool: Error: timeout", "tool: Error: nobody called this", "assistant: Rain.", "user: Error: no.")
    record = {"id": "7", "messages": messages, "tool_results": "of the record"}
    samples = make_turn_samples([record], get_task("prompts"))
    source = NextMessageFeedback()
    judged = []
    for sample in samples:
        assert sample.response is not None
        feedback = asyncio.run(source.judge(sample.prompt, sample.response))
        judged.append([sample.response[span.start : span.end] for span in feedback.spans])
    whole_call = json.dumps({"name": "weather", "arguments": {"town": "Ås", "note": "a\u2028b\n"}}, ensure_ascii=False)
    assert judged == [['"Rom"'], [whole_call], []]
    assert "tool_results" not in samples[-1].prompt.payload


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"text": "a"}, "field messages is None; it needs to be a list of messages"),
        ({"messages": "Hi"}, "field messages is 'Hi'"),
        ({"messages": []}, "field messages is []"),
        ({"conversations": ["Hi"]}, "conversations[0] is 'Hi'; it needs a content, and a role, one of system"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "messages[0] is {'role': ['user']"),
        (
            {"messages": chat("user: a", "bot: b")},
            "messages[1] is {'role': 'bot', 'content': 'b'}; it needs a content, and a role, one of system,",
        ),
    ],
)
def test_a_malformed_message_is_named(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        read_conversation(record)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": None}, "has the content None"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "has the content"),
        ({"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}, "it needs to be text, or a list of"),
        ({"role": "assistant", "tool_calls": 7}, "has the tool call 7"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "has the tool call"),
    ],
)
def test_a_content_that_is_not_understood_leaves_out_its_turn_alone(message: dict[str, Any], problem: str) -> None:
    before = chat("user: q", "assistant: a", "user: no")
    after = chat("assistant: b", "user: ok", "assistant: c")
    messages = [*before, *chat("assistant: x", "user: y"), message, *after]
    conversation = read_conversation({"messages": messages})
    assert list(conversation.problems) == [5]
    assert conversation.problems[5].startswith("messages[5] ")
    assert problem in conversation.problems[5]
    turns = list(split_conversation(*conversation))
    whole = [turn.response for turn in turns if not turn.problem]
    # A user's message is the reply to x, and what b answers; the assistant's is a turn of its own.
    assert whole == (["a", "c"] if message["role"] == "user" else ["a", "x", "b", "c"])
    assert turns[-1].history[5]["content"] in ("", "a")  # later turns have what is understood


def test_arguments_that_are_no_json_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for arguments in ({"dates": {1, 2}}, {(1, 2): 3}, deep):
        call = {"role": "assistant", "function_call": {"name": "f", "arguments": arguments}}
        conversation = read_conversation({"messages": [*chat("user: a"), call]})
        assert conversation.problems[1].startswith("messages[1] has a tool call whose arguments are no JSON: ")


SCALARS = st.none() | st.integers() | st.text(max_size=3) | st.sampled_from([*ROLES])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)


VALUES = st.recursive(SCALARS, containers, max_leaves=12)


@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES), max_size=3))
def test_whatever_a_log_holds_is_read_or_refused(messages: list[dict[str, Any]]) -> None:
    with suppress(ValueError):
        assert all(
            isinstance(turn.response, str) for turn in split_conversation(*read_conversation({"messages": messages}))
        )
