"""Read a JSON object that was truncated at a length limit: complete values, and complete items of the last list."""

import json
import re
from typing import Any, NamedTuple

_BLANKS = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder(strict=False)  # allows line ends in strings


class TruncatedObject(NamedTuple):
    """The complete values of a JSON object."""

    values: dict[str, Any]
    truncated_key: str | None  # the last key of `values`, if its list was truncated; None: that value is complete


def load_truncated_object(text: str) -> TruncatedObject:
    """Return what is complete of the JSON object that `text` begins with. No text raises.

    >>> load_truncated_object('{"critique": "It says phone.", "good": ["by Ann"], "poor": ["phone", "lap')
    TruncatedObject(values={'critique': 'It says phone.', 'good': ['by Ann'], 'poor': ['phone']}, truncated_key='poor')
    """
    values: dict[str, Any] = {}
    at = _skip(text, 0, "{")
    while at is not None:
        key, at = _decode(text, at)
        if at is None or not isinstance(key, str):
            break
        at = _skip(text, at, ":")
        if at is None:
            break
        if text.startswith("[", at):
            items, at = _decode_items(text, at + 1)
            values[key] = items
            if at is None:
                return TruncatedObject(values, key)
        else:
            value, at = _decode(text, at)
            if at is None:
                break
            values[key] = value
        at = _skip(text, at, ",")
    return TruncatedObject(values, None)


def _decode_items(text: str, at: int) -> tuple[list[Any], int | None]:
    """Return the complete items of a list that begins before `at`, and its end; None if it was truncated."""
    items: list[Any] = []
    end = _skip(text, at, "]")
    while end is None:
        item, item_end = _decode(text, _skip_blanks(text, at))
        if item_end is None:
            return items, None
        end = _skip(text, item_end, "]")
        following = _skip(text, item_end, ",")
        if end is None and following is None:
            return [*items, item], None
        items.append(item)
        at = item_end if following is None else following
    return items, end


def _decode(text: str, at: int) -> tuple[Any, int | None]:
    """Return the JSON value at a position and its end; the end is None without a complete value."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, None


def _skip(text: str, at: int, mark: str) -> int | None:
    """Return the position of the next character after blanks, `mark` and blanks; None at another character."""
    start = _skip_blanks(text, at)
    if not text.startswith(mark, start):
        return None
    return _skip_blanks(text, start + 1)


def _skip_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    assert blanks is not None, "the pattern matches an empty text"
    return blanks.end()
