"""Spans of what tools say: an error is about the arguments that it names, else what it quotes, else the character where
the text of the call ceased to be JSON, else the whole call.

call    weather(town="Rom", days="2")
error   `days` is "2"; it needs to be integer
span    "2", the value of days

error   there is no tool "wether"; the tools are weather, count
span    "wether" in the call

call    {"name": "weather" "arguments": {"town": "Rom"}}
error   the call is no JSON: Expecting ',' delimiter at character 19
span    the quotation mark before arguments
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import TypeAdapter

from t2g.types import Span, ToolResult

TOOL_RESULTS = "tool_results"  # field of a payload: the results of the response's calls, for next_message

QUOTES = ("``", "''", '""', ('"', '\\"'))  # the last one within a JSON text
_WORD = re.compile(r"[`'\"](\w[\w.-]*)[`'\"]")
_CODE = re.compile(r"`++([^`\n]++)`++")
_NO_WORD = re.compile(r"\W")
_RESULTS = TypeAdapter(tuple[ToolResult, ...])


def load_results(payload: dict[str, Any]) -> tuple[ToolResult, ...]:
    """Return the results of a payload, () without any."""
    return _RESULTS.validate_python(payload.get(TOOL_RESULTS, ()))


def dump_results(results: Sequence[ToolResult]) -> Any:
    """Return results as JSON values."""
    return _RESULTS.dump_python(tuple(results), mode="json")


def find_tool_spans(results: Sequence[ToolResult], answer: str, critique: str) -> list[Span]:
    """Return a poor span for each argument that an error names, else for each word that it quotes, else for the
    character where the call ceased to be JSON, else for the call.

    Args:
        results: The results of the calls in `answer`.
        critique: Their texts, in order.
    """
    spans: list[Span] = []
    position = 0
    for result in results:
        first = critique.find(result.text, position)
        critique_range = None
        if first >= 0:
            position = first + len(result.text)
            critique_range = (first, position)
        if not result.is_fault:
            continue
        places = find_named_arguments(result, answer) or find_quoted_words(result, answer)
        if not places:
            # Valid calls have the same first tokens: a critique of all tokens would make valid calls less likely.
            places = [result.error_characters or result.characters]
        for start, end in places:
            spans.append(Span(start=start, end=end, label=-1, critique_range=critique_range))
    return spans


def find_named_arguments(result: ToolResult, answer: str) -> list[tuple[int, int]]:
    """Return the characters of the arguments that a message names in quotes or backticks.

    An argument is named by its path, by the last name of the path, or, if no name is quoted, by its value.
    """
    by_name: list[tuple[int, int]] = []
    by_value: list[tuple[int, int]] = []
    for path, (start, end) in result.arguments.items():
        last_name = path.rpartition(".")[2]
        if _is_quoted(path, result.text) or _is_quoted(last_name, result.text):
            by_name.append((start, end))
        if any(_is_quoted(form, result.text) for form in _list_forms(answer[start:end])):
            by_value.append((start, end))
    return by_name or by_value


def find_quoted_words(result: ToolResult, answer: str) -> list[tuple[int, int]]:
    """Return the characters of what a message quotes of the call: a word that is a JSON text, or code within one."""
    quoted = [f'"{word}"' for word in _WORD.findall(result.text)]
    # Names alone are left out here: without the quotes of a JSON text they occur within other words.
    codes = [code for code in _CODE.findall(result.text) if _NO_WORD.search(code)]
    quoted += [json.dumps(code, ensure_ascii=False)[1:-1] for code in codes]
    places: list[tuple[int, int]] = []
    for text in quoted:
        start = answer.find(text, *result.characters)
        if start >= 0:
            places.append((start, start + len(text)))
    return places


def _is_quoted(name: str, text: str) -> bool:
    return any(f"{opening}{name}{closing}" in text for opening, closing in QUOTES)


def _list_forms(text: str) -> Iterator[str]:
    """Yield a value as a call writes it, and a JSON text without its quotes and escapes."""
    yield text
    try:
        value = json.loads(text)
    except ValueError:
        return
    if isinstance(value, str):
        yield value
