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
from typing import Any

from t2g.feedback.parse import replace_surrogates
from t2g.text.tokenizer import Message

NEXT_MESSAGE = "next_message"  # field of a payload: the reply to the response, for the feedback source of that name
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")  # of a record, that may hold the messages
ROLES = {  # names of OpenAI and of ShareGPT -> ours
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "function_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    """One message of the assistant, with the conversation around it."""

    number: int  # 1, 2, ... among the assistant's messages
    history: tuple[Message, ...]  # all messages before it
    response: str
    critique: str  # the messages by users and tools before the assistant's next one; "" without a reply


def split_conversation(messages: Sequence[Message]) -> Iterator[AssistantTurn]:
    """Yield the turns of the assistant, in order. Several replies to a turn are joined by empty lines."""
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for number, (start, end) in enumerate(pairwise([*starts, len(messages)]), start=1):
        replies = (message["content"] for message in messages[start + 1 : end] if message["role"] in ("user", "tool"))
        critique = "\n\n".join(reply for reply in replies if reply.strip())
        history, response = tuple(messages[:start]), messages[start]["content"]
        yield AssistantTurn(number=number, history=history, response=response, critique=critique)


def read_conversation(record: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a record, as role (system, user, assistant, tool) and text.

    Raises:
        ValueError: The record has no messages, or one of them is malformed.
    """
    name = next((name for name in CONVERSATION_FIELDS if record.get(name) is not None), CONVERSATION_FIELDS[0])
    messages = record.get(name)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"field {name} is {messages!r:.80}; it needs to be a list of messages")
    return [_read_message(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, where: str) -> Message:
    role = ROLES.get(str(message.get("role", message.get("from")))) if isinstance(message, dict) else None
    if role is None:
        raise ValueError(f"{where} is {message!r:.80}; it needs a content, and a role, one of {', '.join(ROLES)}")
    content = message.get("content", message.get("value"))
    calls = message.get("tool_calls") or message.get("function_call") or []
    lines = [_format_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if content is None and role == "assistant":
        texts = []  # beside tool calls
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{where} has the content {content!r:.80}; it needs to be text, or a list of text parts")
    return {"role": role, "content": "\n".join(filter(None, ["".join(texts), *lines]))}


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
