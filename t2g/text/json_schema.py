"""Check the arguments of a call against the JSON schema of a tool, with a sentence for each argument that is wrong.

The keywords that tools use are known: type, nullable, enum, properties, required, additionalProperties, items and
anyOf. Other keywords allow every value.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from t2g.text.tool_calls import shorten_value

Schema = Mapping[str, Any]


class Violation(NamedTuple):
    """A value that the schema does not allow."""

    path: str  # the value that is wrong; "" if a value is missing
    message: str  # names the argument in backticks


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return _is_number(value)


TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def _has_type(value: Any, name: str) -> bool:
    """Return whether a value is of a type of JSON schema; a type of another name has every value."""
    if name == "integer":
        return _is_integer(value)
    if name == "number":
        return _is_number(value)
    return isinstance(value, TYPES.get(name, object))


def find_violations(arguments: Mapping[str, Any], parameters: Schema, tool: str) -> list[Violation]:
    """Return what is wrong with the arguments of a call of `tool`; [] for valid ones.

    >>> find_violations({"days": "2"}, {"properties": {"days": {"type": "integer"}}}, "weather")
    [Violation(path='days', message='`days` is "2"; it needs to be integer')]
    """
    closed = {"additionalProperties": False, **parameters, "type": "object"}
    return [*_check(dict(arguments), closed, "", tool)]


def _check(value: Any, schema: Any, path: str, tool: str) -> Iterator[Violation]:
    if not isinstance(schema, Mapping):
        return
    if schema.get("nullable") and value is None:
        return
    options = schema.get("anyOf")
    if isinstance(options, list):
        results = [[*_check(value, option, path, tool)] for option in options]
        if all(results):
            yield from min(results, key=len)
        return
    types = schema.get("type", ())
    types = [types] if isinstance(types, str) else types
    if types and not any(_has_type(value, name) for name in types):
        yield Violation(path, f"`{path}` is {shorten_value(value)}; it needs to be {' or '.join(types)}")
        return
    allowed = schema.get("enum")
    if isinstance(allowed, list) and value not in allowed:
        choices = ", ".join(map(shorten_value, allowed))
        yield Violation(path, f"`{path}` is {shorten_value(value)}; it needs to be one of {choices}")
    if isinstance(value, dict):
        yield from _check_members(value, schema, path, tool)
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            yield from _check(item, schema["items"], f"{path}[{number}]", tool)


def _check_members(value: dict[str, Any], schema: Schema, path: str, tool: str) -> Iterator[Violation]:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
        if name not in value:
            yield Violation("", f"`{_join(path, name)}` is missing")
    for name, member in value.items():
        member_path = _join(path, name)
        if name in properties:
            yield from _check(member, properties[name], member_path, tool)
        elif others is False:
            yield Violation(member_path, f"`{member_path}` is no argument of {tool}")
        else:
            yield from _check(member, others, member_path, tool)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
