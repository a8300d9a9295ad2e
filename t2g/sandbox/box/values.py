"""Python values as JSON and back, between two processes of which one is not trusted.

Plain data (numbers, texts, containers, dates) is copied. Everything else stays where it is and is known to the
other side by its number: there a `Remote` stands for it (t2g.sandbox.box.remote). Nothing in a message can name code
to be run: decoding makes plain data, proxies and exceptions of the standard library, and nothing else.
"""

import builtins
import importlib
import sys
import traceback
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

Json = Any
# Containers that may change while the other side works on its copy; the changes are sent back.
MUTABLE: dict[str, type] = {
    "list": list, "dict": dict, "set": set, "bytearray": bytearray,
    "deque": deque, "OrderedDict": OrderedDict, "defaultdict": defaultdict, "Counter": Counter,
}  # fmt: skip
_KINDS = {kind: name for name, kind in MUTABLE.items()}
# By the name of a type: the parts that its values are made of. Without a maker below, the type itself makes them.
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
_MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.int": lambda text: int(text, 16),
    "builtins.bytes": bytes.fromhex,
    "builtins.tuple": lambda *parts: parts,
    "builtins.frozenset": lambda *parts: frozenset(parts),
    "builtins.type": lambda name: _builtin_type(name),
    "builtins.ellipsis": lambda: ...,
    "builtins.NotImplementedType": lambda: NotImplemented,
}
_BIG = 2**53


class Exchange:
    """One request and its reply: mutable containers in it are numbered in the order in which both sides meet them."""

    def __init__(self) -> None:
        self.known: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.received: list[tuple[int, list[Any]]] = []  # (number, contents as they came)

    def add(self, container: Any) -> int:
        self.known.append(container)
        self.numbers[id(container)] = len(self.known) - 1
        return len(self.known) - 1

    def changed(self) -> list[int]:
        """Return numbers of the received containers that no longer hold the same objects in the same order."""
        both = ((number, _flat(contents(self.known[number])), _flat(before)) for number, before in self.received)
        return [n for n, now, before in both if list(map(id, now)) != list(map(id, before))]


def contents(container: Any) -> list[Any]:
    """Return what a mutable container holds: its elements, or the (key, value) pairs of a dictionary."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def refill(container: Any, items: list[Any]) -> None:
    """Put `items` in the place of what the container held."""
    container.clear()
    if isinstance(container, dict):
        for key, value in items:
            container[key] = value
    elif isinstance(container, set):
        container.update(items)
    else:
        container.extend(items)


def _flat(items: list[Any]) -> list[Any]:
    return [part for item in items for part in (item if type(item) is tuple else (item,))]


class Codec:
    """Copies plain values. A subclass has `export` and `resolve`, which name any other object."""

    export: Callable[[Any, Exchange], Json]
    resolve: Callable[[str, Json, Exchange], Any]

    def encode(self, value: Any, exchange: Exchange) -> Json:
        kind = type(value)
        if value is None or kind in (bool, str, float) or (kind is int and -_BIG < value < _BIG):
            return value
        if kind in _KINDS:
            return self._encode_mutable(_KINDS[kind], value, exchange)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _PARTS and (kind is not type or getattr(builtins, value.__name__, None) is value):
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
        """ValueError, TypeError, KeyError or IndexError for a message that no encoder makes."""
        if isinstance(message, list):
            raise ValueError("a bare list")
        if not isinstance(message, dict):
            return message
        tag, body = next(iter(message.items()))
        if tag in MUTABLE:
            return self._decode_mutable(tag, message, exchange)
        if tag == "same":
            return exchange.known[body]
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
        number = exchange.add(container)  # before its items, which may hold it
        items = [self.decode(item, exchange) for item in message[name]]
        refill(container, items)
        exchange.received.append((number, items))
        return container


def _builtin_type(name: str) -> type:
    if not isinstance(found := getattr(builtins, name), type):
        raise ValueError(f"{name} is no type")
    return found


def lines_of(error: BaseException, file: str) -> list[int]:
    """Return the lines of that file in the error's traceback, innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [line for frame, line in frames if frame.f_code.co_filename == file]


def known_exception(module: str, name: str) -> type[BaseException] | None:
    """Return an exception of the standard library that is imported already; no message can cause an import."""
    if module.partition(".")[0] not in sys.stdlib_module_names or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
