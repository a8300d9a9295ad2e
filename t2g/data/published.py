"""Translate published annotated records to our field names, row by row.

Supported are Good spans / good_spans / good_code, Poor spans / poor_spans, wrong_code (severity 3), improvement_code
(severity 1) and word_score_list. The critique may be textual_feedback, Code Feedback or a complete JSON answer. All
fields may be in the row or in an object `annotations`, `analysis` or `spans`. Good, poor and spans may be objects of
lists, {"start": [0, 4], "end": [2, 6]}, as `datasets` stores a sequence of objects.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from t2g.text.messages import get_content, read_content

_NAMES = {
    "id": "prompt_id",
    "question_id": "prompt_id",
    "post": "prompt",
    "question": "prompt",
    "generated_summary": "response",
    "generated_summary_for_feedback": "response",
    "solution": "response",
    "textual_feedback": "critique",
    "code_feedback": "critique",
    "good_spans": "good",
    "good_code": "good",
    "poor_spans": "poor",
    "outcome": "execution",  # annotated records of version 0.1
}
_SEVERITIES = {"wrong_code": 3, "improvement_code": 1, "improvable_code": 1}  # how severe a piece of poor code is
_OBJECTS = ("annotations", "analysis", "spans")
LABEL_FIELDS = ("good", "poor", "spans")  # fields of a record that hold lists
_SPAN_FIELDS = (*_OBJECTS, "label", "labels", "entities")  # where annotation tools write spans
_SPAN_DEPTH = 5  # levels of such a field that are searched


def translate_row(row: Mapping[str, Any], our_names: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (fields under our names, other fields) of a row.

    Args:
        row: Null values are ignored.
        our_names: Our field names, which take precedence over published ones.

    Raises:
        ValueError: A field is invalid.

    >>> translate_row({"Post": "p", "Poor spans": ["x"], "wrong_code": ["y"], "n": 1}, {"prompt", "poor"})
    ({'prompt': 'p', 'poor': ['x', {'quote': 'y', 'severity': 3}]}, {'n': 1})
    """
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    severe: list[dict[str, Any]] = []  # quotes with a severity
    items = [(key, value) for key, value in _items(row, our_names) if value is not None]
    items.sort(key=lambda item: item[0] not in our_names)
    for key, value in items:
        normalized = _normalize(key)
        name = key if key in our_names else _translate_name(normalized, value)
        severity = _SEVERITIES.get(normalized)
        if severity is not None:
            quotes = _check_list(key, value)
            severe += [{"quote": quote, "severity": severity} for quote in quotes]
        elif name is None or name in fields:
            extra[key] = value
        else:
            fields[name] = value

    for name in LABEL_FIELDS:
        marks = fields.get(name)
        if isinstance(marks, dict):
            fields[name] = transpose_columns(name, marks)
    if severe:
        fields["poor"] = _check_list("poor", fields.get("poor", ())) + severe
    response = fields.get("response")
    if isinstance(response, list):
        response = _last_content(response)
        fields["response"] = response
    if "word_score_list" in extra and isinstance(response, str):
        fields["spans"] = make_word_spans(extra.pop("word_score_list"), response)
    _check_no_spans_are_lost(row, fields)
    return fields, extra


def _translate_name(normalized: str, value: Any) -> str | None:
    """Return our name of a published field, or None."""
    name = _NAMES.get(normalized)
    if name == "execution" and not isinstance(value, dict):
        return None  # a user's own field that is named outcome
    return name


def _check_no_spans_are_lost(row: Mapping[str, Any], fields: Collection[str]) -> None:
    """Check that a row without marks has no spans in a form that is not read: it would count as judged and unmarked.

    Raises:
        ValueError: A field has such spans.
    """
    if any(name in fields for name in LABEL_FIELDS):
        return
    for name in _SPAN_FIELDS:
        if _holds_spans(row.get(name), _SPAN_DEPTH):
            raise ValueError(
                f"field {name} is {row[name]!r:.80}; spans are read from the field spans, a list of objects with "
                "start, end and label"
            )


def _holds_spans(value: Any, depth: int) -> bool:
    """Return whether a value holds offsets: an object with start and end, or [start, end, "label"]."""
    if isinstance(value, dict):
        keys = list(map(str, value))
        has_start = any(key.startswith("start") for key in keys)
        has_end = any(key.startswith("end") for key in keys)
        if has_start and has_end:
            return True
        inner = list(value.values())
    elif isinstance(value, list | tuple):
        if [type(item) for item in value] == [int, int, str]:
            return True
        inner = list(value)
    else:
        return False
    return depth > 0 and any(_holds_spans(item, depth - 1) for item in inner)


def _items(row: Mapping[str, Any], our_names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of the row, then those of its objects.

    Raises:
        ValueError: An object `spans` holds nothing that is known.
    """
    _check_spans(row.get("spans"), our_names)
    answer = _parse_answer(row.get("critique"))
    for key, value in row.items():
        may_hold_spans = key in _OBJECTS
        is_object = may_hold_spans and isinstance(value, dict)
        is_answer = key == "critique" and answer
        if may_hold_spans and (_has_columns(value) or _is_span_list(value)):
            yield "spans", value
        elif not is_object and not is_answer:
            yield key, value

    for key in _OBJECTS:
        value = row.get(key)
        if isinstance(value, dict) and not _has_columns(value):
            yield from value.items()
    yield from answer.items()


def _check_spans(spans: Any, our_names: Collection[str]) -> None:
    if not isinstance(spans, dict) or not spans or _has_columns(spans):
        return
    if not any(_is_known(key, our_names) for key in spans):
        raise ValueError(f"field spans is {spans!r:.80}; it needs to be a list of objects with start, end and label")


def _has_columns(value: Any) -> bool:
    """Return whether a value is an object with start and end: a span, or spans as columns {"start": [...], ...}."""
    return isinstance(value, dict) and {"start", "end"} <= value.keys()


def _is_span_list(value: Any) -> bool:
    """Return whether a value is a list of objects with start and end."""
    return isinstance(value, list) and bool(value) and all(map(_has_columns, value))


def _is_known(key: str, our_names: Collection[str]) -> bool:
    name = _normalize(key)
    return key in our_names or name in _NAMES or name in _SEVERITIES or name == "word_score_list"


def _normalize(key: str) -> str:
    return key.lower().replace(" ", "_")


def transpose_columns(name: str, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a field that stores a list for each of their keys, as `datasets.Sequence({...})` does.

    >>> transpose_columns("spans", {"start": [0, 4], "end": [2, 6]})
    [{'start': 0, 'end': 2}, {'start': 4, 'end': 6}]

    Raises:
        ValueError: The values are no lists of one length.
    """
    lists = [value for value in columns.values() if isinstance(value, list | tuple)]
    lengths = set(map(len, lists))
    if len(lists) < len(columns) or len(lengths) != 1:
        needs = "a list of objects, or an object of lists of one length"
        raise ValueError(f"field {name} is {dict(columns)!r:.80}; it needs to be {needs}")
    rows = zip(*lists, strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _parse_answer(critique: Any) -> dict[str, Any]:
    """Return the JSON object of a critique that is an annotator's complete answer, {} for plain text."""
    if not isinstance(critique, str) or '"textual_feedback"' not in critique:
        return {}
    start = critique.find("{")
    end = critique.rfind("}") + 1
    try:
        answer = json.loads(critique[start:end])
    except (ValueError, RecursionError) as error:
        raise ValueError("field critique holds an answer in JSON that is broken") from error
    return answer if isinstance(answer, dict) else {}


def _check_list(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise ValueError(f"field {name} is {value!r:.80}; it needs to be a list of quotes")
    return list(value)


def _last_content(messages: list[Any]) -> str:
    last = messages[-1] if messages else None
    content = read_content(get_content(last)) if isinstance(last, dict) else None
    if content is None or not content.is_complete or not content.text.strip():
        raise ValueError("field response is a list that does not end with a message of role and content")
    return content.text


def make_word_spans(words: Any, response: str) -> list[dict[str, int]]:
    """Return the spans of runs of consecutive words with the same label, located in order in `response`.

    Args:
        words: Items [word, score] or {"word", "score"}; a score above 0 is good, below 0 poor. A word that is not found
            is skipped and ends the run.

    >>> make_word_spans([["a", 0], ["red", "-1"], ["phone", -1], ["hums", 1]], "a red phone hums")
    [{'start': 2, 'end': 11, 'label': -1}, {'start': 12, 'end': 16, 'label': 1}]
    """
    spans: list[dict[str, int]] = []
    position = 0  # in the response, after the last word found
    running_label = 0
    for item in _check_list("word_score_list", words):
        word, score = _parse_word_score(item)
        start = response.find(word, position)
        if start < 0:
            running_label = 0
            continue

        position = start + len(word)
        label = (score > 0) - (score < 0)
        if label and label == running_label:
            spans[-1]["end"] = position
        elif label:
            spans.append({"start": start, "end": position, "label": label})
        running_label = label
    return spans


def _parse_word_score(item: Any) -> tuple[str, float]:
    pair = (item.get("word"), item.get("score")) if isinstance(item, dict) else item
    match pair:
        case [str(word), int() | float() | str() as score] if word.strip():
            try:
                return word, float(score)
            except (ValueError, OverflowError):
                pass
    raise ValueError(f"an entry of word_score_list is {item!r:.80}; it needs to be [word, score]")
