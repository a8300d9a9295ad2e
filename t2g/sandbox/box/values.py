"""Encode Python values as JSON and decode them, between two processes of which one is not trusted.

Plain data (numbers, text, containers, dates, arrays, frames) is copied. Any other object stays in its process, and the
other process holds a `Remote` with its number (t2g.sandbox.box.remote). A message cannot name code to run: decoding
makes only plain data, proxies, and exceptions of the standard library.
"""

import argparse
import builtins
import importlib
import json
import re
import sys
import traceback
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from t2g.sandbox.box import arrays, frames
from t2g.sandbox.box.remote import Unsupported, is_remote

Json = Any
# Containers that may change while the other process works on its copy; the changes are sent back.
MUTABLE: dict[str, type] = {
    "list": list, "dict": dict, "set": set, "bytearray": bytearray,
    "deque": deque, "OrderedDict": OrderedDict, "defaultdict": defaultdict, "Counter": Counter,
}  # fmt: skip
_KINDS = {kind: name for name, kind in MUTABLE.items()}
# By type name: the arguments from which the type, or its function in _MAKERS, makes an equal value.
_PARTS: dict[str, Callable[[Any], Any]] = {
    "builtins.int": lambda v: (hex(v),),
    "builtins.bytes": lambda v: (v.hex(),),
    "builtins.tuple": lambda v: v,
    "builtins.frozenset": lambda v: v,
    "builtins.type": lambda v: (type_name(v),),
    "builtins.ellipsis": lambda v: (),
    "builtins.NotImplementedType": lambda v: (),
    "builtins.complex": lambda v: (v.real, v.imag),
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "builtins.slice": lambda v: (v.start, v.stop, v.step),
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.datetime": lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    "datetime.time": lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "datetime.timezone": lambda v: (v.utcoffset(None),),
    "pathlib.PosixPath": lambda v: (str(v),),
    "uuid.UUID": lambda v: (str(v),),
    "zoneinfo.ZoneInfo": lambda v: (v.key,),
    "array.array": lambda v: (v.typecode, v.tolist()),
    "re.Pattern": lambda v: (v.pattern, v.flags),
    "types.SimpleNamespace": lambda v: (vars(v),),
    "argparse.Namespace": lambda v: (vars(v),),
    **arrays.PARTS,
    **frames.PARTS,
}
_MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.int": lambda text: int(text, 16),
    "builtins.bytes": bytes.fromhex,
    "builtins.tuple": lambda *parts: parts,
    "builtins.frozenset": lambda *parts: frozenset(parts),
    "builtins.type": lambda name: _TYPES.get(name) or _import_type(name),
    "builtins.ellipsis": lambda: ...,
    "builtins.NotImplementedType": lambda: NotImplemented,
    "re.Pattern": re.compile,
    "types.SimpleNamespace": lambda names: SimpleNamespace(**names),
    "argparse.Namespace": lambda names: argparse.Namespace(**names),
    **arrays.MAKERS,
    **frames.MAKERS,
}
# Arrays and frames change in place as containers do: type name -> function (object, its new value).
_CHANGE: dict[str, Callable[[Any, Any], None]] = {
    "types.SimpleNamespace": lambda old, new: _replace_names(old, new),
    "argparse.Namespace": lambda old, new: _replace_names(old, new),
    "numpy.ndarray": arrays.replace_array,
    "pandas.DataFrame": frames.replace_frame,
    "pandas.Series": frames.replace_frame,
}
_TYPES = {
    f"builtins.{name}": kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and not issubclass(kind, BaseException)
}
# Their parts may be objects of the other process; the parts of other types are plain.
_HOLDERS = {"builtins.tuple", "builtins.frozenset", "builtins.slice"}
_SINGLETONS = {"NaTType": "pandas.NaT", "NAType": "pandas.NA"}
_MAX_JSON_INT = 2**53


class Exchange:
    """Mutable containers of one request and its reply, numbered in the order in which both processes meet them."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self.numbers: dict[int, int] = {}  # by id
        self.received: list[tuple[int, Any, Any]] = []  # (number, state as received, objects that keep its ids)
        self.has_tainted = False  # whether a tainted object takes part

    def add(self, container: Any) -> int:
        self.containers.append(container)
        self.numbers[id(container)] = number = len(self.containers) - 1
        return number


def contents(container: Any) -> list[Any]:
    """Return the elements of a mutable container, or (key, value) pairs of a dictionary."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def replace_contents(container: Any, items: list[Any]) -> None:
    """Replace the elements of a container, or the pairs of a dictionary."""
    container.clear()
    if isinstance(container, dict):
        for key, value in items:
            container[key] = value
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def _replace_names(old: Any, new: Any) -> None:
    vars(old).clear()
    vars(old).update(vars(new))


def _item_ids(items: list[Any]) -> list[int]:
    return [id(part) for item in items for part in (item if type(item) is tuple else (item,))]


class Codec:
    """Encode and decode plain values. `export` and `resolve` of a subclass encode and decode any other object."""

    export: Callable[[Any, Exchange], Json]
    resolve: Callable[[str, Json, Exchange], Any]
    refuse: Callable[[str], Unsupported]
    is_solution: bool

    def encode(self, value: Any, exchange: Exchange) -> Json:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _MAX_JSON_INT):
            return value
        if kind in _KINDS:
            return self._encode_mutable(_KINDS[kind], value, exchange)
        name = type_name(kind)
        if name in _CHANGE:
            return self._encode_changing(name, value, exchange)
        if name in _PARTS and (kind is not type or is_plain_type(value)):
            return self._encode_parts(name, value, exchange)
        if arrays.is_plain_scalar(value):
            return self._encode_parts("numpy.generic", value, exchange)
        if name.startswith("numpy.dtype"):
            return self._encode_parts("numpy.dtype", value, exchange)
        return self.export(value, exchange)

    def _encode_parts(self, name: str, value: Any, exchange: Exchange) -> Json:
        return {"made": [name, [self.encode(part, exchange) for part in _PARTS[name](value)]]}

    def _encode_changing(self, name: str, value: Any, exchange: Exchange) -> Json:
        if id(value) in exchange.numbers:
            return {"same": exchange.numbers[id(value)]}
        exchange.add(value)
        return {"changing": name, "parts": self._encode_parts(name, value, Exchange())}

    def _encode_mutable(self, name: str, value: Any, exchange: Exchange) -> Json:
        if id(value) in exchange.numbers:
            return {"same": exchange.numbers[id(value)]}
        exchange.add(value)
        extra = value.default_factory if name == "defaultdict" else value.maxlen if name == "deque" else None
        return {name: self._encode_items(value, exchange), "extra": self.encode(extra, Exchange())}

    def _encode_items(self, container: Any, exchange: Exchange) -> list[Json]:
        return [self.encode(item, exchange) for item in contents(container)]

    def encode_changes(self, exchange: Exchange) -> list[Json]:
        """Return [number, content] of the received containers that no longer hold the same objects in the same order.

        A content may add containers to the exchange, so that all changed containers are found first.
        """
        changed = [n for n, state, _ in exchange.received if self._state(exchange.containers[n]) != state]
        return [[n, self._encode_change(exchange.containers[n], exchange)] for n in changed]

    def _encode_change(self, container: Any, exchange: Exchange) -> Json:
        name = type_name(type(container))
        if name in _CHANGE:
            return self._encode_parts(name, container, Exchange())
        return self._encode_items(container, exchange)

    def apply_change(self, container: Any, message: Json, exchange: Exchange) -> None:
        """Give a container the content that `encode_changes` of the other process sent."""
        name = type_name(type(container))
        if name in _CHANGE:
            new = self.decode(message, Exchange())
            if hasattr(new, "__dict__"):
                self.check_functions(vars(container), vars(new))
            _CHANGE[name](container, new)
            return
        items = [self.decode(item, exchange) for item in message]
        if isinstance(container, dict):
            self.check_functions(container, dict(items))
        elif isinstance(container, list):
            self._check_function_list(container, items)
        replace_contents(container, items)

    def check_functions(self, old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
        """Check that the other process replaced no function of this one, in a dictionary or namespace.

        Raises:
            Unsupported: It did.
        """
        if not self.is_solution:
            for key, value in new.items():
                if callable(old.get(key)) and old[key] is not value and not is_remote(old[key]):
                    raise self.refuse("the solution replaced a function of the tests")

    def _check_function_list(self, old: list[Any], new: list[Any]) -> None:
        """Check that no function of this process gave way to one of the other process; see `check_functions`."""
        kept = set(map(id, new))
        lost = [value for value in old if callable(value) and not is_remote(value) and id(value) not in kept]
        if lost and not self.is_solution and any(is_remote(value) and callable(value) for value in new):
            raise self.refuse("the solution replaced a function of the tests")

    def _state(self, container: Any) -> Any:
        """Return a value that differs once the container has changed."""
        name = type_name(type(container))
        if name in _CHANGE:
            return _to_json(self._encode_parts(name, container, Exchange()))
        return _item_ids(contents(container))

    def decode(self, message: Json, exchange: Exchange) -> Any:
        """Return the value of a message.

        Raises:
            ValueError, TypeError, KeyError, IndexError: No encoder makes this message.
        """
        if isinstance(message, list):
            raise ValueError("a bare list")
        if not isinstance(message, dict):
            return message
        tag, body = next(iter(message.items()))
        if tag in MUTABLE:
            return self._decode_mutable(tag, message, exchange)
        if tag == "same":
            return exchange.containers[body]
        if tag == "changing":
            return self._decode_changing(message, exchange)
        if tag != "made":
            return self.resolve(tag, message, exchange)
        name, parts = body
        if name not in _PARTS:
            raise ValueError(f"{name} is no plain value")
        module, _, attribute = name.rpartition(".")
        make = _MAKERS.get(name) or getattr(importlib.import_module(module), attribute)
        values = [self.decode(part, exchange) for part in parts]
        if name not in _HOLDERS and any(map(is_remote, values)):
            raise ValueError(f"{name} holds no objects")
        return make(*values)

    def _decode_changing(self, message: Json, exchange: Exchange) -> Any:
        if message["changing"] not in _CHANGE:
            raise ValueError("a value that does not change")
        value = self.decode(message["parts"], Exchange())
        number = exchange.add(value)
        exchange.received.append((number, self._state(value), None))
        return value

    def _decode_mutable(self, name: str, message: Json, exchange: Exchange) -> Any:
        extra = self.decode(message["extra"], Exchange())
        container = deque(maxlen=extra) if name == "deque" else MUTABLE[name]()
        if name == "defaultdict":
            container.default_factory = extra
        number = exchange.add(container)  # before its items are decoded, which may contain it
        items = [self.decode(item, exchange) for item in message[name]]
        replace_contents(container, items)
        exchange.received.append((number, _item_ids(items), items))
        return container


_to_json = json.JSONEncoder().encode  # not `json.dumps`, which tests may patch


def type_name(kind: type) -> str:
    """Return module and name of a type; of the types of pandas, the module from which programs import them."""
    module, name = kind.__module__, kind.__qualname__
    if not isinstance(module, str) or not module.startswith("pandas"):
        return f"{module}.{name}"
    return _SINGLETONS.get(name, f"pandas.{name}")


def is_plain_type(kind: type) -> bool:
    """Return whether a type crosses by its name: a builtin, or a type whose values cross by value."""
    try:
        name = type_name(kind)
        return (_TYPES.get(name) or _import_type(name)) is kind
    except (ValueError, AttributeError, KeyError):
        return False


def _import_type(name: str) -> type:
    """Return a type of plain data, or a scalar type of numpy.

    Raises:
        ValueError: It is no such type.
    """
    module, _, attribute = name.rpartition(".")
    is_known = name in _PARTS or (module == "collections" and attribute in MUTABLE)
    if not is_known and module != "numpy":
        raise ValueError(f"{name} is no type of plain data")
    kind = getattr(importlib.import_module(module), attribute)
    if not isinstance(kind, type) or not (is_known or issubclass(kind, arrays.scalar_type())):
        raise ValueError(f"{name} is no type of plain data")
    return kind


def traceback_lines(error: BaseException, file: str) -> list[int]:
    """Return the lines of a file in the traceback of an error, innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [line for frame, line in frames if frame.f_code.co_filename == file]


def find_library_exception(module: str, name: str) -> type[BaseException] | None:
    """Return an exception class of an imported module of the standard library, numpy or pandas.

    A message cannot cause an import.
    """
    root = module.partition(".")[0]
    if (root not in sys.stdlib_module_names and root not in ("numpy", "pandas")) or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
