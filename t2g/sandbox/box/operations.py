"""What a process does with one of its objects for the other process, by the name of the operation."""

import inspect
from collections.abc import Callable
from typing import Any

# By plain type: returns the plain value of an instance of a subclass, by the methods of the plain type.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__, dict: dict.copy
}  # fmt: skip
for _kind in (bytes, tuple, frozenset, list, set, bytearray):
    _PLAIN[_kind] = lambda value, kind=_kind: kind(kind.__iter__(value))
_find_signature = inspect.signature  # however the tests patch the module


def _call(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return target(*args, **kwargs)


def _call_method(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name, *rest = args
    return getattr(type(target), name)(target, *rest, **kwargs)


def _get(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return getattr(target, *args)


def _set(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    setattr(target, *args)


def _delete(target: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    delattr(target, *args)


def _read_plain(target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return plain_part(target)


def _read_signature(target: Any, args: list[Any], kwargs: dict[str, Any]) -> list[Any]:
    parameters = _find_signature(target).parameters
    return [*map(_parts_of, parameters.values())]


OPERATIONS: dict[str, Callable[[Any, list[Any], dict[str, Any]], Any]] = {
    "call": _call,
    "method": _call_method,
    "get": _get,
    "set": _set,
    "delete": _delete,
    "plain": _read_plain,
    "signature": _read_signature,
}


def _parts_of(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """Return name, kind, and default and annotation if the parameter has them; an annotation is a type or text."""
    parts: dict[str, Any] = {}
    if parameter.default is not parameter.empty:
        parts["default"] = parameter.default
    if parameter.annotation is not parameter.empty:
        parts["annotation"] = parameter.annotation
        if not isinstance(parameter.annotation, type):
            parts["annotation"] = str(parameter.annotation)
    return parameter.name, int(parameter.kind), parts


def plain_part(value: Any) -> Any:
    """Return the plain value of an instance of a subclass of a plain type; None for other objects."""
    for kind, to_plain in _PLAIN.items():
        if isinstance(value, kind):
            return to_plain(value)
    return None
