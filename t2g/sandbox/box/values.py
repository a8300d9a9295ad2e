"""Encode Python values as JSON and decode them, between two processes of which one is not trusted.

Plain data (numbers, text, containers, dates) is copied. Any other object stays in its process, and the other process
holds a `Remote` with its number (t2g.sandbox.box.remote). A message cannot name code to run: decoding makes only plain
data, proxies, and exceptions of the standard library.
"""

import builtins
import importlib
import sys
import traceback
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

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
    "builtins.type": lambda v: (v.__name__,),
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
}
_BUILTIN_TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
_MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.int": lambda text: int(text, 16),
    "builtins.bytes": bytes.fromhex,
    "builtins.tuple": lambda *parts: parts,
    "builtins.frozenset": lambda *parts: frozenset(parts),
    "builtins.type": _BUILTIN_TYPES.__getitem__,
    "builtins.ellipsis": lambda: ...,
    "builtins.NotImplementedType": lambda: NotImplemented,
}
_MAX_JSON_INT = 2**53


class Exchange:
    """Mutable containers of one request and its reply, numbered in the order in which both processes meet them."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self.numbers: dict[int, int] = {}  # by id
        self.received: list[tuple[int, list[Any]]] = []  # (number, contents as received)

    def add(self, container: Any) -> int:
        self.containers.append(container)
        self.numbers[id(container)] = number = len(self.containers) - 1
        return number

    def changed(self) -> list[int]:
        """Return the numbers of the received containers that no longer hold the same objects in the same order."""
        return [n for n, items in self.received if _item_ids(contents(self.containers[n])) != _item_ids(items)]


def contents(container: Any) -> list[Any]:
    """Return the elements of a mutable container; (key, value) pairs of a dictionary."""
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


def _item_ids(items: list[Any]) -> list[int]:
    return [id(part) for item in items for part in (item if type(item) is tuple else (item,))]


class Codec:
    """Encode and decode plain values. `export` and `resolve` of a subclass encode and decode any other object."""

    export: Callable[[Any, Exchange], Json]
    resolve: Callable[[str, Json, Exchange], Any]

    def encode(self, value: Any, exchange: Exchange) -> Json:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and abs(value) < _MAX_JSON_INT):
            return value
        if kind in _KINDS:
            return self._encode_mutable(_KINDS[kind], value, exchange)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _PARTS and (kind is not type or _BUILTIN_TYPES.get(value.__name__) is value):
            return {"made": [name, [self.encode(part, exchange) for part in _PARTS[name](value)]]}
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and type(value.item()) is not kind:
            return self.encode(value.item(), exchange)  # a scalar of numpy
        return self.export(value, exchange)

    def _encode_mutable(self, name: str, value: Any, exchange: Exchange) -> Json:
        if id(value) in exchange.numbers:
            return {"same": exchange.numbers[id(value)]}
        exchange.add(value)
        extra = value.default_factory if name == "defaultdict" else value.maxlen if name == "deque" else None
        return {name: self.encode_items(value, exchange), "extra": self.encode(extra, Exchange())}

    def encode_items(self, container: Any, exchange: Exchange) -> list[Json]:
        return [self.encode(item, exchange) for item in contents(container)]

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
        if tag != "made":
            return self.resolve(tag, message, exchange)
        name, parts = body
        if name not in _PARTS:
            raise ValueError(f"{name} is no plain value")
        module, _, attribute = name.rpartition(".")
        make = _MAKERS.get(name) or getattr(importlib.import_module(module), attribute)
        return make(*(self.decode(part, exchange) for part in parts))

    def _decode_mutable(self, name: str, message: Json, exchange: Exchange) -> Any:
        extra = self.decode(message["extra"], Exchange())
        container = deque(maxlen=extra) if name == "deque" else MUTABLE[name]()
        if name == "defaultdict":
            container.default_factory = extra
        number = exchange.add(container)  # before its items are decoded, which may contain it
        items = [self.decode(item, exchange) for item in message[name]]
        replace_contents(container, items)
        exchange.received.append((number, items))
        return container


def traceback_lines(error: BaseException, file: str) -> list[int]:
    """Return the lines of a file in the traceback of an error, innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [line for frame, line in frames if frame.f_code.co_filename == file]


def find_stdlib_exception(module: str, name: str) -> type[BaseException] | None:
    """Return an exception class of an imported module of the standard library; a message cannot cause an import."""
    if module.partition(".")[0] not in sys.stdlib_module_names or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
