"""Logged conversations: the next message is the critique of the assistant's turn before it.

    [{"role": "user", "content": "Write a mean."}, {"role": "assistant", "content": "sum(values) / length(values)"},
     {"role": "tool", "content": "NameError: `length` is not defined"}, {"role": "assistant", "content": "..."}]

The first turn has a prompt (the user's message), a response and a critique (the tool's message). The second one has no
reply. A turn's text is its content, then one line of JSON for each tool call:
{"name": "search", "arguments": {"town": "Oslo"}}.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from t2g.feedback.parse import replace_surrogates
from t2g.text.messages import ROLES, get_content, get_role, read_content
from t2g.text.tokenizer import Message

NEXT_MESSAGE = "next_message"  # field of a payload: the reply to the response, for the feedback source of that name
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")  # fields of a record that may hold the messages


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    """One message of the assistant, with the conversation around it."""

    number: int  # 1, 2, ... among the assistant's messages
    history: tuple[Message, ...]  # all messages before it
    response: str
    critique: str  # the messages by users and tools before the assistant's next one; "" without a reply
    problem: str = ""  # what is not understood of the response, of its replies, or of the messages that it answers


class Conversation(NamedTuple):
    """Messages, as role (system, user, assistant, tool) and text."""

    messages: list[Message]
    problems: dict[int, str]  # index of a message -> what is not understood of it, in a sentence


def split_conversation(
    messages: Sequence[Message], problems: Mapping[int, str] = MappingProxyType({})
) -> Iterator[AssistantTurn]:
    """Yield the turns of the assistant, in order. Several replies to a turn are joined by empty lines.

    Args:
        problems: See `Conversation`. A message with a problem is in the history of later turns with its text alone.
    """
    starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    borders = [*starts, len(messages)]
    first = 0  # the message after the assistant's previous one
    for number, (start, end) in enumerate(pairwise(borders), start=1):
        history = tuple(messages[:start])
        response = messages[start]["content"]
        critique = _join_replies(messages[start + 1 : end])
        turn_problems = [problems[index] for index in range(first, end) if index in problems]
        problem = turn_problems[0] if turn_problems else ""
        yield AssistantTurn(number=number, history=history, response=response, critique=critique, problem=problem)
        first = start + 1


def _join_replies(messages: Sequence[Message]) -> str:
    replies: list[str] = []
    for message in messages:
        is_reply = message["role"] in ("user", "tool")
        if is_reply and message["content"].strip():
            replies.append(message["content"])
    return "\n\n".join(replies)


def read_conversation(record: Mapping[str, Any]) -> Conversation:
    """Return the messages of a record. A content that is not understood is a problem of its message.

    Raises:
        ValueError: The record has no messages, or the role of one is unknown.
    """
    given_names = [name for name in CONVERSATION_FIELDS if record.get(name) is not None]
    name = given_names[0] if given_names else CONVERSATION_FIELDS[0]
    messages = record.get(name)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field {name} is {messages!r:.80}; it needs to be a list of messages")
    conversation = Conversation([], {})
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        role = _get_role(message, where)
        text, problem = _read_text(message, role, where)
        conversation.messages.append({"role": role, "content": text})
        if problem:
            conversation.problems[index] = problem
    return conversation


def _get_role(message: Any, where: str) -> str:
    role = get_role(message) if isinstance(message, dict) else None
    if role is None:
        raise ValueError(f"{where} is {message!r:.80}; it needs a content, and a role, one of {', '.join(ROLES)}")
    return role


def _read_text(message: Mapping[str, Any], role: str, where: str) -> tuple[str, str]:
    """Return the text of a message, and what is not understood of it as a sentence, "" for nothing."""
    content = get_content(message)
    text, is_complete = read_content(content)
    problem = ""
    if not is_complete and not (content is None and role == "assistant"):  # with tool calls
        problem = f"{where} has the content {content!r:.80}; it needs to be text, or a list of text parts"

    calls = message.get("tool_calls") or message.get("function_call") or []
    if not isinstance(calls, list):
        calls = [calls]
    lines = [text]
    for call in calls:
        try:
            lines.append(_format_call(call, where))
        except ValueError as error:
            problem = problem or str(error)
    return "\n".join(filter(None, lines)), problem


def _format_call(call: Any, where: str) -> str:
    """Return a tool call as JSON, with its arguments as an object where they are JSON."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} has the tool call {call!r:.80}; it needs to be an object with a name and arguments")
    arguments = function.get("arguments")
    with suppress(ValueError, TypeError, RecursionError):
        arguments = json.loads(arguments)
    try:
        line = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{where} has a tool call whose arguments are no JSON: {error!s:.80}") from None
    return replace_surrogates(line)
