"""Find the characters of each value in a JSON text.

{"town": "Oslo", "days": [1, 20]}
town [9, 15), days [25, 32), days[0] [26, 27), days[1] [29, 31)
"""

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

Characters = tuple[int, int]  # half-open range of a text

MAX_PATHS_CHARS = 10**6  # all paths of a text; each item of a list repeats the path of the list
_BLANKS = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Member(NamedTuple):
    """A value within a JSON text."""

    path: str  # "filter.days[0]"; "" for the outermost value
    start: int
    end: int


def find_values(text: str, start: int = 0) -> dict[str, Characters]:
    """Return the characters of each value of the JSON value at `start`, by its path. A repeated key counts as its last.

    Raises:
        ValueError: The text has no JSON value there, or the paths of its values have more than MAX_PATHS_CHARS.
        RecursionError: Its values are nested too deeply.
    """
    values: dict[str, Characters] = {}
    num_chars = 0
    for member in _walk(text, _skip_blanks(text, start), ""):
        num_chars += len(member.path)
        if num_chars > MAX_PATHS_CHARS:
            raise ValueError(f"the paths of its values have more than {MAX_PATHS_CHARS} characters; shorten its keys")
        values[member.path] = (member.start, member.end)
    return values


def _walk(text: str, start: int, path: str) -> Iterator[Member]:
    """Yield the members of a value, and then the value itself, which starts at `start`."""
    opening = text[start : start + 1]
    if opening == "{":
        end = yield from _walk_members(text, start, path, closing="}")
    elif opening == "[":
        end = yield from _walk_members(text, start, path, closing="]")
    else:
        _, end = _DECODER.raw_decode(text, start)
    yield Member(path, start, end)


def _walk_members(text: str, start: int, path: str, *, closing: str) -> Iterator[Member]:
    """Yield the members of an object or a list; return the position after its end."""
    position = _skip_blanks(text, start + 1)
    number = 0
    while text[position : position + 1] != closing:
        if number:
            position = _skip(text, position, ",")
        if closing == "}":
            key, position = _DECODER.raw_decode(text, position)
            member_path = f"{path}.{key}" if path else str(key)
            position = _skip(text, position, ":")
        else:
            member_path = f"{path}[{number}]"
        end = position
        for member in _walk(text, position, member_path):
            yield member
            end = member.end
        position = _skip_blanks(text, end)
        number += 1
    return position + 1


def _skip(text: str, position: int, symbol: str) -> int:
    """Return the position after a symbol and the blanks around it. ValueError for another one."""
    position = _skip_blanks(text, position)
    if text[position : position + 1] != symbol:
        raise ValueError(f"expecting {symbol!r} at character {position}")
    return _skip_blanks(text, position + 1)


def _skip_blanks(text: str, position: int) -> int:
    blanks = _BLANKS.match(text, position)
    assert blanks is not None, "the pattern matches everywhere"
    return blanks.end()
