"""Read spans as annotation tools write them: other labels, other units of offsets, and the marked text.

    {"start": 14, "end": 24, "text": "annotation", "labels": ["Poor"]}

JavaScript counts in UTF-16 units, in which an emoji has length 2: all later offsets of such a tool are too large. The
text of a span decides: the span is where the text is. Without a text the unit is a setting.
"""

from bisect import bisect_left
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

from t2g.config.feedback import OffsetUnit
from t2g.text.quotes import locate_all
from t2g.types import LABELS

NEARBY = 32  # characters between a span's offset and its text, besides what the unit of the offset may add
LABEL_SYNONYMS = {
    "good": "good", "positive": "good", "correct": "good", "1": "good", "+1": "good",
    "poor": "poor", "bad": "poor", "negative": "poor", "incorrect": "poor", "wrong": "poor", "-1": "poor",
}  # fmt: skip
NO_LABELS: Mapping[str, str] = MappingProxyType({})


def read_spans(
    spans: list[Any], response: str, *, offsets: OffsetUnit = "characters", labels: Mapping[str, str] = NO_LABELS
) -> list[Any]:
    """Return the spans in characters of the response, with labels 1 and -1. Entries that are no objects stay.

    Args:
        offsets: Unit of start and end of spans without a text.
        labels: The file's label -> good or poor.

    Raises:
        ValueError: A label is unknown, a text is not near its offsets or not unique there, or an offset splits a
            character.
    """
    result: list[Any] = []
    for number, span in enumerate(spans):
        if isinstance(span, dict):
            span = _read_span(span, f"spans[{number}]", response, offsets, labels)
        result.append(span)
    return result


def _read_span(
    span: dict[str, Any], name: str, response: str, offsets: OffsetUnit, labels: Mapping[str, str]
) -> dict[str, Any]:
    result = dict(span)
    result.pop("text", None)
    result.pop("labels", None)
    if "label" in span or "labels" in span:
        result["label"] = _read_label(span, name, labels)
    bounds = _read_bounds(span)
    if bounds is None:
        return result  # the record's validation names what is wrong
    text = span.get("text")
    if isinstance(text, str) and text:
        start, end = _locate_text(text, bounds, name, response, offsets)
    else:
        start, end = (_to_characters(position, name, response, offsets) for position in bounds)
    return {**result, "start": start, "end": end}


def _read_bounds(span: dict[str, Any]) -> tuple[int, int] | None:
    start = span.get("start")
    end = span.get("end")
    if not (_is_whole_number(start) and _is_whole_number(end)):
        return None
    return int(start), int(end)


def _is_whole_number(value: Any) -> bool:
    if isinstance(value, int):  # float(value) fails for hundreds of digits
        return True
    return isinstance(value, float) and value.is_integer()


def _read_label(span: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> Literal[-1, 1]:
    """Return the label of a span, which is in `label`, or alone in the list `labels`."""
    label = span.get("label")
    if label is None:  # a table with both columns has null in the other one
        label = span.get("labels")
    if isinstance(label, list) and len(label) == 1:
        label = label[0]
    text = format_label(label)
    meaning = labels.get(text) or LABEL_SYNONYMS.get(text.strip().lower())
    if meaning is None:
        raise ValueError(
            f"{name} has the label {label!r:.80}; it needs to be good or poor, or with source=human one of human_labels"
        )
    return LABELS[meaning]


def format_label(label: Any) -> str:
    """Return a label as a config names it: the text, or a class id such as 2 (or 2.0) as "2"; "" for others."""
    if _is_whole_number(label):
        return str(int(label))
    return label if isinstance(label, str) else ""


def _locate_text(text: str, bounds: tuple[int, int], name: str, response: str, offsets: OffsetUnit) -> tuple[int, int]:
    """Return the range of a span's text: at its offsets if it is there, else where it is unique nearby."""
    borders = _find_borders(response, offsets)
    start = bisect_left(borders, bounds[0])
    end = bisect_left(borders, bounds[1])
    if response[start:end] == text:
        return start, end

    num_bytes = len(response.encode(errors="replace"))
    max_distance = NEARBY + num_bytes - len(response)
    nearby = [match for match in locate_all(response, text) if abs(match[0] - bounds[0]) <= max_distance]
    if len(nearby) == 1:
        return nearby[0]

    problem = "does not occur near them"
    if nearby:
        problem = f"occurs {len(nearby)} times near them; with source=human, set offsets to what the tool counts"
    raise ValueError(f"{name} is [{bounds[0]}, {bounds[1]}), and its text {text!r:.80} {problem}")


def _to_characters(position: int, name: str, response: str, offsets: OffsetUnit) -> int:
    """Return the character that begins at a position in units of `offsets`. ValueError within a character."""
    if offsets == "characters":
        return position
    borders = _find_borders(response, offsets)
    index = bisect_left(borders, position)
    if not 0 <= position <= borders[-1] or borders[index] != position:
        size = f"{borders[-1]} {offsets} units"
        raise ValueError(f"{name} has the offset {position}, where no character of the response's {size} begins")
    return index


@lru_cache(maxsize=4)  # all spans of a record share a response
def _find_borders(response: str, offsets: OffsetUnit) -> list[int]:
    """Return the position before each character and after the last one, in units of `offsets`."""
    size_of = {"characters": _count_characters, "utf16": _count_utf16_units, "bytes": _count_bytes}[offsets]
    sizes = map(size_of, response)
    return list(accumulate(sizes, initial=0))


def _count_characters(character: str) -> int:
    return 1


def _count_utf16_units(character: str) -> int:
    return 2 if ord(character) > 0xFFFF else 1


def _count_bytes(character: str) -> int:
    return len(character.encode(errors="replace"))
