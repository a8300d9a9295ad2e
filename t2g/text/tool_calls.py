"""Read the calls of tools in a sampled text, as pure functions; characters are those of the text.

    Weather? <tool_call>
    {"name": "weather", "arguments": {"town": "Oslo"}}
    </tool_call>

This is one call: name weather, arguments {"town": "Oslo"}, and "town" has the characters of "Oslo". A call that
cannot be read is a call with a `problem`. Results are never read: what a policy writes as a result is text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from t2g.text.json_ranges import Characters, find_values

ARGUMENT_FIELDS = ("arguments", "parameters")  # Hermes and Qwen, Llama 3
MAX_VALUE_CHARS = 60

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_BETWEEN_CALLS = re.compile(r"[\s;]*")


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call in a text."""

    characters: Characters  # the whole call
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    argument_characters: dict[str, Characters] = field(default_factory=dict)  # by JSON path: "town", "days[0]"
    problem: str = ""  # why it cannot be read, a sentence; it then has no arguments
    error_characters: Characters | None = None  # the part of the call that the problem is about, if one is known


class NamedCall(NamedTuple):
    """The name and the arguments of a call, without its characters."""

    name: str
    arguments: Mapping[str, Any]


CallReader = Callable[[str], list[ToolCall]]


def read_hermes_calls(text: str) -> list[ToolCall]:
    """Return the calls of Hermes's form, also of Qwen 2.5 and Qwen 3: JSON between <tool_call> and </tool_call>."""
    calls = []
    for match in _HERMES.finditer(text):
        start, end = match.span(1)
        calls.append(read_json_call(text, start, end, characters=match.span()))
    return calls


def read_llama3_calls(text: str) -> list[ToolCall]:
    """Return the calls of Llama 3's form: the text is JSON with `name` and `parameters`, several divided by `;`."""
    position = len(text) - len(text.lstrip())
    if not text.startswith("{", position):
        return []
    calls = []
    length = len(text.rstrip())
    while position < length:
        end = _find_json_end(text, position, length)
        calls.append(read_json_call(text, position, end, characters=(position, end)))
        between = _BETWEEN_CALLS.match(text, end)
        position = between.end() if between else length
    return calls


def _find_json_end(text: str, start: int, length: int) -> int:
    """Return the end of the JSON value at `start`; of a text that is no JSON, its whole length."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return length
    return end


def read_json_call(text: str, start: int, end: int, *, characters: Characters) -> ToolCall:
    """Return the call whose JSON is text[start:end]."""
    try:
        call = json.loads(text[start:end], parse_constant=_refuse_constant)
        values = find_values(text, start)
    except json.JSONDecodeError as error:
        problem = f"the call is no JSON: {error.msg} at character {error.pos}"
        error_characters = _find_error_character(error, start, end, characters)
        return ToolCall(characters=characters, problem=problem, error_characters=error_characters)
    except (ValueError, RecursionError) as error:
        return ToolCall(characters=characters, problem=f"the call is no JSON: {error!s:.80}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(characters=characters, problem="the call needs to be an object with a name and arguments")
    present = [name for name in ARGUMENT_FIELDS if name in call]
    field_name = present[0] if present else ARGUMENT_FIELDS[-1]
    name = call["name"]
    arguments = call.get(field_name, {})
    if not isinstance(arguments, dict):
        problem = f"the arguments are {shorten_value(arguments)}; they need to be an object"
        error_characters = values.get(field_name)
        return ToolCall(characters=characters, name=name, problem=problem, error_characters=error_characters)
    prefix = f"{field_name}."
    ranges = {path.removeprefix(prefix): place for path, place in values.items() if path.startswith(prefix)}
    return ToolCall(characters=characters, name=name, arguments=arguments, argument_characters=ranges)


def _find_error_character(
    error: json.JSONDecodeError, start: int, end: int, characters: Characters
) -> Characters | None:
    """Return the character where text[start:end] ceased to be JSON, or the last one of a call that ended too early."""
    # An error about a string without an end has the position of its start, which is valid JSON.
    is_unterminated = error.msg.startswith("Unterminated string")
    position = end if is_unterminated else start + error.pos
    first, last = characters
    if first == last:
        return None
    position = min(position, last - 1)
    return position, position + 1


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def shorten_value(value: Any) -> str:
    """Return a JSON value as a short text."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}…"


def locate_calls(text: str, calls: Sequence[NamedCall]) -> list[ToolCall]:
    """Return the calls with their characters in a text of any form, from which a parser read them in this order.

    A call goes from its name to the name of the next one; an argument's value follows the argument's name, as JSON
    or as bare text. An argument that is not found has no characters. A call whose name is not found has those of the
    whole text.
    """
    if not calls:
        return []
    starts = []
    position = 0
    for name, _ in calls:
        start = text.find(name, position)
        starts.append(start)
        position = start + len(name) if start >= 0 else position
    ends = [*starts[1:], len(text)]
    located = []
    for (name, arguments), start, end in zip(calls, starts, ends, strict=True):
        if start < 0:
            located.append(ToolCall(characters=(0, len(text)), name=name, arguments=dict(arguments)))
            continue
        end = end if end > start else len(text)
        ranges = _locate_arguments(text, start + len(name), end, arguments)
        located.append(
            ToolCall(characters=(start, end), name=name, arguments=dict(arguments), argument_characters=ranges)
        )
    return located


def _locate_arguments(text: str, start: int, end: int, arguments: Mapping[str, Any]) -> dict[str, Characters]:
    ranges = {}
    for name, value in arguments.items():
        after_name = text.find(name, start, end) + len(name)
        if after_name < start + len(name):
            continue
        bare_value = value if isinstance(value, str) else json.dumps(value)
        for form in (json.dumps(value, ensure_ascii=False), json.dumps(value), bare_value, str(value)):
            first = text.find(form, after_name, end)
            if first >= 0 and form:
                ranges[name] = (first, first + len(form))
                break
    return ranges
