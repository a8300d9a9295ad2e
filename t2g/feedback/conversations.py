"""Logged conversations: the next message is the critique of the assistant's turn before it.

    [{"role": "user", "content": "Write a mean."}, {"role": "assistant", "content": "sum(values) / length(values)"},
     {"role": "tool", "content": "NameError: `length` is not defined"}, {"role": "assistant", "content": "..."}]

The first turn has a prompt (the user's message), a response and a critique (the tool's message). The second one has no
reply. A turn's text is its content, then one line of JSON for each tool call:
{"name": "search", "arguments": {"town": "Oslo"}}. A tool's message belongs to the call with its tool_call_id, without
one to the first call that has no message. It is an error if it begins with "Error" or "Traceback", or is a JSON object
with a field `error`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from t2g.feedback.parse import replace_surrogates
from t2g.text.messages import CONVERSATION_FIELDS, ROLES, get_content, get_role, read_content
from t2g.text.tokenizer import Message
from t2g.text.tool_calls import ToolCall, read_json_call
from t2g.types import ToolResult

NEXT_MESSAGE = "next_message"  # field of a payload: the reply to the response, for the feedback source of that name
MAX_HISTORY_CHARS = 50 * 10**6  # all histories of a conversation: each turn repeats the messages before it
MESSAGE_OVERHEAD_CHARS = 16  # counted for a message besides its text


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    """One message of the assistant, with the conversation around it."""

    number: int  # 1, 2, ... among the assistant's messages
    history: tuple[Message, ...]  # all messages before it; () above MAX_HISTORY_CHARS
    response: str
    critique: str  # the messages by users and tools before the assistant's next one; "" without a reply
    results: tuple[ToolResult, ...] = ()  # the tools' messages among them
    problem: str = ""  # what is not understood of the response, of its replies, or of the messages that it answers


class Conversation(NamedTuple):
    """Messages, as role (system, user, assistant, tool) and text."""

    messages: list[Message]
    problems: dict[int, str]  # index of a message -> what is not understood of it, in a sentence
    results: dict[int, ToolResult]  # index of a tool's message -> what it says about a call


def split_conversation(
    messages: Sequence[Message],
    problems: Mapping[int, str] = MappingProxyType({}),
    results: Mapping[int, ToolResult] = MappingProxyType({}),
) -> Iterator[AssistantTurn]:
    """Yield the turns of the assistant, in order. Several replies to a turn are joined by empty lines.

    Args:
        problems, results: See `Conversation`. A message with a problem is in the history of later turns with its text
            alone.
    """
    sizes = (len(message["content"]) + MESSAGE_OVERHEAD_CHARS for message in messages)
    sizes_before = list(accumulate(sizes, initial=0))
    num_chars = 0
    starts = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    borders = [*starts, len(messages)]
    first = 0  # the message after the assistant's previous one
    for number, (start, end) in enumerate(pairwise(borders), start=1):
        num_chars += sizes_before[start]
        is_too_long = num_chars > MAX_HISTORY_CHARS
        history = () if is_too_long else tuple(messages[:start])
        response = messages[start]["content"]
        critique = _join_replies(messages[start + 1 : end])
        turn_problems = [problems[index] for index in range(first, end) if index in problems]
        problem = turn_problems[0] if turn_problems else ""
        if is_too_long:
            problem = (
                f"the histories of the turns up to this one have more than {MAX_HISTORY_CHARS} characters; split the "
                "conversation"
            )
        turn_results = tuple(results[index] for index in range(start + 1, end) if index in results)
        yield AssistantTurn(
            number=number, history=history, response=response, critique=critique, results=turn_results, problem=problem
        )
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
    conversation = Conversation([], {}, {})
    calls: list[_LoggedCall] = []  # without a result, in the last message by the assistant
    for index, message in enumerate(messages):
        where = f"{name}[{index}]"
        role = _get_role(message, where)
        text, problem = _read_text(message, role, where)
        conversation.messages.append({"role": role, "content": text})
        if role == "assistant":
            calls = _locate_calls(message, text)
        if role == "tool" and calls:
            call = _take_call(calls, message.get("tool_call_id"))
            if call is not None:
                conversation.results[index] = _make_result(call.call, text)
        if problem:
            conversation.problems[index] = problem
    return conversation


class _LoggedCall(NamedTuple):
    """A call in the text of a message."""

    call_id: Any  # None: without one
    call: ToolCall


def _list_calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") or message.get("function_call") or []
    return calls if isinstance(calls, list) else [calls]


def _locate_calls(message: Mapping[str, Any], text: str) -> list[_LoggedCall]:
    """Return the calls of a message, which are the last lines of its text."""
    calls = _list_calls(message)
    lines = text.split("\n")
    if not calls or len(lines) < len(calls):
        return []
    located: list[_LoggedCall] = []
    start = len("".join(f"{line}\n" for line in lines[: -len(calls)]))
    for logged, line in zip(calls, lines[-len(calls) :], strict=True):
        end = start + len(line)
        call = read_json_call(text, start, end, characters=(start, end))
        call_id = logged.get("id") if isinstance(logged, dict) else None
        located.append(_LoggedCall(call_id, call))
        start = end + 1
    return located


def _take_call(calls: list[_LoggedCall], call_id: Any) -> _LoggedCall | None:
    """Remove and return the call with this id, the first one if there are no ids, and None if no call has it."""
    for number, call in enumerate(calls):
        if call_id is not None and call.call_id == call_id:
            return calls.pop(number)
    have_ids = any(call.call_id is not None for call in calls)
    if have_ids and call_id is not None:
        return None
    return calls.pop(0)


def _make_result(call: ToolCall, text: str) -> ToolResult:
    return ToolResult(
        tool=call.name,
        text=replace_surrogates(text),
        status="failed" if _is_error(text) else "ok",
        characters=call.characters,
        error_characters=call.error_characters,
        arguments=call.argument_characters,
    )


def _is_error(text: str) -> bool:
    """Return whether a tool's message says that its call failed."""
    if text.lstrip().lower().startswith(("error", "traceback")):
        return True
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error"))


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

    lines = [text]
    for call in _list_calls(message):
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
