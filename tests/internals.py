"""Check that symbols of a dependency still exist and still accept the arguments that the code passes."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any


def resolve(symbol: str) -> Any:
    """Return the object that `package.module:Class.attribute` names. Raises AssertionError with the symbol."""
    module, _, path = symbol.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in path.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise AssertionError(f"{symbol} is gone: {error}") from None
    return value


def check_call(symbol: str, positional: int, keywords: Sequence[str]) -> None:
    """Raise AssertionError with the symbol where it no longer accepts such a call."""
    signature = inspect.signature(resolve(symbol))
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise AssertionError(f"{symbol}{signature} refuses the call: {error}") from None


def missing_fields(symbol: str, fields: Sequence[str], declared: Mapping[str, Any] | Sequence[str]) -> list[str]:
    return [f"{symbol}.{name}" for name in fields if name not in declared]
