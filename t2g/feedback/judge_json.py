"""The JSON object in the answer of a language model, which may stand among other text.

Accepted are text around the object, drafts before it, raw line ends and tabs in strings, trailing commas, and an object
within another one, as {"feedback": {...}}. Nothing else is repaired: a wrong guess about an answer would be trained on,
while a request whose answer has no object is repeated. A draft does not count if the answer after it
cannot be read, or if it is one of several objects of a list.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

MAX_ANSWER_CHARS = 65_536  # characters of an answer, critique or execution; longer ones are rejected
MAX_FAILURES = 400  # braces with which no object begins; each costs a scan
MAX_REPAIRS = 32  # the same where there are trailing commas: each costs a longer scan
MAX_DEPTH = 3  # depth of an object within others
CLOSING_TAG = re.compile(
    r"</(think|thinking|thought|thoughts|reasoning|reflection|seed:think)>|\[/THINK\]|◁/think▷"
    r"|<\|END_THINKING\|>|<\|channel\|>final<\|message\|>",
    re.IGNORECASE,
)
OPENING_TAG = re.compile(
    r"<(think|thinking|thought|thoughts|reasoning|reflection|seed:think)>|\[THINK\]|◁think▷"
    r"|<\|START_THINKING\|>|<\|channel\|>analysis<\|message\|>",
    re.IGNORECASE,
)
START = re.compile(r'\{(?=\s*["}])')
# A string, or a comma with nothing but blanks before the end of an object or list. Possessive: in linear time.
POSSIBLE_COMMA = re.compile(r",\s*+[}\]]")
TRAILING_COMMA = re.compile(r'"(?:[^"\\]++|\\.)*+"?|,(?=\s*+[}\]])', re.DOTALL)


class JsonObject(NamedTuple):
    """A JSON object in a text."""

    value: dict[str, Any]
    start: int
    end: int  # half-open, in characters of the text


def load_judge_answer(text: str, kinds: Mapping[str, type]) -> dict[str, Any] | str:
    """Return the last object that has these keys with values of these types, else the reason as a sentence.

    Objects that end before the last closing tag of the model's thinking are drafts and do not count.

    >>> load_judge_answer('<think>{"a": 1}</think> In {Berlin}: {"feedback": {"a": 2,}}', {"a": int})
    {'a': 2}
    """
    thinking_end = find_thinking_end(text)
    answer = _load_answer(text[thinking_end:], kinds)
    if isinstance(answer, str) and thinking_end:
        around = _load_answer(text, kinds, draft_end=thinking_end)  # the tag may stand in a string of the object
        if not isinstance(around, str):
            return around
    return answer


def _load_answer(text: str, kinds: Mapping[str, type], draft_end: int = 0) -> dict[str, Any] | str:
    """Return the answer in a text, or the reason why there is none. draft_end: Objects that end earlier are drafts."""
    if len(text) > MAX_ANSWER_CHARS:
        return f"the answer has {len(text)} characters; at most {MAX_ANSWER_CHARS} are read"
    objects = [item for item in find_objects(text) if item.end > draft_end]
    answers = [_find_answer(item.value, kinds) for item in objects]
    last = max((index for index, answer in enumerate(answers) if answer is not None), default=None)
    if last is None:
        return _explain_missing_answer(text, objects, kinds)

    answer = answers[last]
    _, brace, rest = text[objects[last].end :].partition("{")
    if brace and _has_keys(rest, kinds):
        return "the answer ends with an object that cannot be read"
    if answer != _find_listed_answer(text, objects[: last + 1], answers):
        return "the answer has several objects where one is needed"
    return answer


def _find_listed_answer(text: str, objects: Sequence[JsonObject], answers: Sequence[Any]) -> Any:
    """Return the answer before the last object with only commas or blanks between them; without one the last answer.

    Such objects are a list. A draft is followed by words.
    """
    for index in range(len(objects) - 2, -1, -1):
        between = text[objects[index].end : objects[index + 1].start]
        if between.strip(" \t\r\n,"):
            break
        if answers[index] is not None:
            return answers[index]
    return answers[len(objects) - 1]


def _explain_missing_answer(text: str, objects: Sequence[JsonObject], kinds: Mapping[str, type]) -> str:
    """Return why a text has no answer."""
    for start in islice(START.finditer(text), MAX_REPAIRS):
        if not _has_keys(text[start.start() :], kinds):
            break
        try:
            DECODER.raw_decode(text, start.start())
        except (ValueError, RecursionError) as error:
            return f"the answer is no JSON object: {error}"
    if not objects:
        return "the answer is no JSON object"
    value = objects[-1].value
    wrong = next(key for key, kind in kinds.items() if not isinstance(value.get(key), kind))
    return f"the answer's {wrong} is missing or no {kinds[wrong].__name__}"


def _has_keys(text: str, kinds: Mapping[str, type]) -> bool:
    """Return whether a text mentions all keys as keys of JSON."""
    return all(re.search(rf'"{re.escape(key)}"\s*:', text) for key in kinds)


def find_thinking_end(text: str) -> int:
    """Return the character after the last closing tag of the model's thinking, 0 without one."""
    return max((match.end() for match in CLOSING_TAG.finditer(text)), default=0)


def find_last_object(text: str, key: str) -> int | None:
    """Return where the last object with this key begins, None without one, or if another object begins behind it."""
    keys = list(re.finditer(rf'"{re.escape(key)}"\s*:', text))
    if not keys:
        return None
    starts = [match.start() for match in START.finditer(text, 0, keys[-1].start() + 1)]
    if not starts:
        return None
    whole = _decode(text, starts[-1])
    if whole is not None and START.search(text, whole.end):
        return None
    return starts[-1]


def find_objects(text: str) -> list[JsonObject]:
    """Return the outermost objects of a text, in order; none where too many fail, as the last ones are not known."""
    objects: list[JsonObject] = []
    position = 0
    num_failures = 0
    has_commas = POSSIBLE_COMMA.search(text) is not None
    max_failures = MAX_REPAIRS if has_commas else MAX_FAILURES
    while start := START.search(text, position):
        decoded = _decode(text, start.start())
        if decoded is None:
            num_failures += 1
            decoded = _decode_without_commas(text, start.start()) if has_commas else None
        if num_failures > max_failures:
            return []
        if decoded is not None:
            objects.append(decoded)
        position = decoded.end if decoded else start.end()
    return objects


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object. ValueError if a key occurs twice, as after a quotation mark that is not escaped."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


DECODER = json.JSONDecoder(strict=False, object_pairs_hook=_make_object)  # allows control characters in strings


def _decode(text: str, start: int) -> JsonObject | None:
    """Return the object that starts here, or None."""
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return JsonObject(value, start, end)


def _decode_without_commas(text: str, start: int) -> JsonObject | None:
    """Return the object that starts here, if it decodes without its trailing commas, or None."""
    commas = [match.start() for match in TRAILING_COMMA.finditer(text, start) if match[0] == ","]
    if not commas:
        return None
    cuts = [start, *(comma + 1 for comma in commas)]
    pieces = [text[cut:comma] for cut, comma in zip(cuts, [*commas, len(text)], strict=True)]
    decoded = _decode("".join(pieces), 0)
    if decoded is None:
        return None
    shifted = [comma - start - index for index, comma in enumerate(commas)]  # in the joined pieces
    end = start + decoded.end + bisect_left(shifted, decoded.end)
    return JsonObject(decoded.value, start, end)


def _find_answer(value: dict[str, Any], kinds: Mapping[str, type], depth: int = MAX_DEPTH) -> dict[str, Any] | None:
    """Return the object with the keys, or the only one within it; None of several."""
    if all(isinstance(value.get(key), kind) for key, kind in kinds.items()):
        return value
    if depth == 0:
        return None
    inner = [item for item in value.values() if isinstance(item, dict)]
    answers = [answer for item in inner if (answer := _find_answer(item, kinds, depth - 1)) is not None]
    return answers[0] if len(answers) == 1 else None
