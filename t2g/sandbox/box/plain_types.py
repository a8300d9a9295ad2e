"""Types of plain data: how a value is split into parts, made again from them, and changed in place.

Each table is by the name of the type, see `type_name`. A message cannot name any other type.
"""

import argparse
import builtins
import importlib
import operator
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from t2g.sandbox.box import arrays, frames

# Containers that may change while the other process works on its copy; the changes are sent back.
MUTABLE: dict[str, type] = {
    "list": list, "dict": dict, "set": set, "bytearray": bytearray,
    "deque": deque, "OrderedDict": OrderedDict, "defaultdict": defaultdict, "Counter": Counter,
}  # fmt: skip
# Attributes that are, in this order, the arguments of an equal value.
_ATTRIBUTES = {
    "builtins.complex": ("real", "imag"),
    "builtins.range": ("start", "stop", "step"),
    "builtins.slice": ("start", "stop", "step"),
    "fractions.Fraction": ("numerator", "denominator"),
    "datetime.date": ("year", "month", "day"),
    "datetime.datetime": ("year", "month", "day", "hour", "minute", "second", "microsecond", "tzinfo"),
    "datetime.time": ("hour", "minute", "second", "microsecond", "tzinfo"),
    "datetime.timedelta": ("days", "seconds", "microseconds"),
    "re.Pattern": ("pattern", "flags"),
}
_SINGLETONS = {"NaTType": "pandas.NaT", "NAType": "pandas.NA"}
_TYPES = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and not issubclass(kind, BaseException)
}


def type_name(kind: type) -> str:
    """Return module and name of a type; of the types of pandas, the module from which programs import them."""
    module = kind.__module__
    name = kind.__qualname__
    if not isinstance(module, str) or not module.startswith("pandas"):
        return f"{module}.{name}"
    return _SINGLETONS.get(name, f"pandas.{name}")


def is_plain_type(kind: type) -> bool:
    """Return whether a type crosses by its name: a builtin, or a type whose values cross by value."""
    try:
        return _make_type(type_name(kind)) is kind
    except (ValueError, AttributeError, KeyError):
        return False


def _make_type(name: str) -> type:
    return _TYPES.get(name) or _import_type(name)


def _import_type(name: str) -> type:
    """Return a type of plain data, or a scalar type of numpy.

    Raises:
        ValueError: It is no such type.
    """
    module, _, attribute = name.rpartition(".")
    is_known = name in SPLITTERS or (module == "collections" and attribute in MUTABLE)
    if not is_known and module != "numpy":
        raise ValueError(f"{name} is no type of plain data")
    kind = getattr(importlib.import_module(module), attribute)
    if not isinstance(kind, type) or not (is_known or issubclass(kind, arrays.scalar_type())):
        raise ValueError(f"{name} is no type of plain data")
    return kind


# -- split


def _split_int(value: int) -> tuple[str]:
    return (hex(value),)


def _split_bytes(value: bytes) -> tuple[str]:
    return (value.hex(),)


def _split_collection(value: Any) -> Any:
    return value


def _split_type(kind: type) -> tuple[str]:
    return (type_name(kind),)


def _split_singleton(value: object) -> tuple[()]:
    return ()


def _split_to_text(value: object) -> tuple[str]:
    return (str(value),)


def _split_timezone(zone: Any) -> tuple[Any]:
    return (zone.utcoffset(None),)


def _split_zone_info(zone: Any) -> tuple[str]:
    return (zone.key,)


def _split_array(array: Any) -> tuple[str, list[Any]]:
    return array.typecode, array.tolist()


def _split_namespace(namespace: Any) -> tuple[dict[str, Any]]:
    return (vars(namespace),)


# The arguments from which the type, or its function in MAKERS, makes an equal value.
SPLITTERS: dict[str, Callable[[Any], Any]] = {
    "builtins.int": _split_int,
    "builtins.bytes": _split_bytes,
    "builtins.tuple": _split_collection,
    "builtins.frozenset": _split_collection,
    "builtins.type": _split_type,
    "builtins.ellipsis": _split_singleton,
    "builtins.NotImplementedType": _split_singleton,
    "decimal.Decimal": _split_to_text,
    "pathlib.PosixPath": _split_to_text,
    "uuid.UUID": _split_to_text,
    "datetime.timezone": _split_timezone,
    "zoneinfo.ZoneInfo": _split_zone_info,
    "array.array": _split_array,
    "types.SimpleNamespace": _split_namespace,
    "argparse.Namespace": _split_namespace,
}
SPLITTERS |= {name: operator.attrgetter(*attributes) for name, attributes in _ATTRIBUTES.items()}
SPLITTERS |= arrays.PARTS | frames.PARTS


# -- make


def _make_int(text: str) -> int:
    return int(text, 16)


def _make_tuple(*parts: Any) -> tuple[Any, ...]:
    return parts


def _make_frozenset(*parts: Any) -> frozenset[Any]:
    return frozenset(parts)


def _make_ellipsis() -> Any:
    return ...


def _make_not_implemented() -> Any:
    return NotImplemented


def _make_simple_namespace(names: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**names)


def _make_argparse_namespace(names: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(**names)


# Bound here, because tests may patch the modules.
_make_bytes = bytes.fromhex
_make_pattern = re.compile
MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.int": _make_int,
    "builtins.bytes": _make_bytes,
    "builtins.tuple": _make_tuple,
    "builtins.frozenset": _make_frozenset,
    "builtins.type": _make_type,
    "builtins.ellipsis": _make_ellipsis,
    "builtins.NotImplementedType": _make_not_implemented,
    "re.Pattern": _make_pattern,
    "types.SimpleNamespace": _make_simple_namespace,
    "argparse.Namespace": _make_argparse_namespace,
}
MAKERS |= arrays.MAKERS | frames.MAKERS


# -- change in place


def _replace_names(old: Any, new: Any) -> None:
    vars(old).clear()
    vars(old).update(vars(new))


# Arrays, frames and namespaces change in place as containers do: functions of (object, its new value).
CHANGERS: dict[str, Callable[[Any, Any], None]] = {
    "types.SimpleNamespace": _replace_names,
    "argparse.Namespace": _replace_names,
    "numpy.ndarray": arrays.replace_array,
    "pandas.DataFrame": frames.replace_frame,
    "pandas.Series": frames.replace_frame,
}
