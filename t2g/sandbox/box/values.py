"""Python values as JSON and back, between two processes of which one is not trusted.

Plain data (numbers, texts, containers, dates) is copied. Everything else stays where it is and is known to the
other side by its number: there a `Remote` stands for it (t2g.sandbox.box.remote). Nothing in a message can name code
to be run: decoding makes plain data, proxies and exceptions of the standard library, and nothing else.
"""

import builtins
import importlib
import sys
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
_CONSTANTS = {"NotImplemented": NotImplemented, "Ellipsis": Ellipsis}
# Values that are made anew from arguments, which may be such values themselves.
_PARTS: dict[tuple[str, str], Callable[[Any], tuple[Any, ...]]] = {
    ("builtins", "complex"): lambda v: (v.real, v.imag),
    ("builtins", "range"): lambda v: (v.start, v.stop, v.step),
    ("builtins", "slice"): lambda v: (v.start, v.stop, v.step),
    ("decimal", "Decimal"): lambda v: (str(v),),
    ("fractions", "Fraction"): lambda v: (v.numerator, v.denominator),
    ("datetime", "date"): lambda v: (v.year, v.month, v.day),
    ("datetime", "datetime"): lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    ("datetime", "timedelta"): lambda v: (v.days, v.seconds, v.microseconds),
    ("datetime", "timezone"): lambda v: (v.utcoffset(None),),
    ("pathlib", "PosixPath"): lambda v: (str(v),),
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
        """Numbers of the received containers that no longer hold the same objects in the same order."""
        result = []
        for number, before in self.received:
            now = contents(self.known[number])
            if len(now) != len(before) or any(a is not b for a, b in zip(_flat(now), _flat(before), strict=False)):
                result.append(number)
        return result


def contents(container: Any) -> list[Any]:
    """What a mutable container holds: its elements, or the (key, value) pairs of a dictionary."""
    return list(container.items()) if isinstance(container, dict) else list(container)


def refill(container: Any, items: list[Any]) -> None:
    """Puts `items` in the place of what the container held."""
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
    """Copies plain values. `export` and `resolve` say how any other object is named; see t2g.sandbox.box.remote."""

    def export(self, value: Any, exchange: Exchange) -> Json:
        raise NotImplementedError

    def resolve(self, tag: str, message: Json, exchange: Exchange) -> Any:
        raise NotImplementedError

    def encode(self, value: Any, exchange: Exchange) -> Json:
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float or (kind is int and -_BIG < value < _BIG):
            return value
        if kind is int:
            return {"int": hex(value)}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind in _KINDS:
            return self._encode_mutable(_KINDS[kind], value, exchange)
        if kind is tuple or kind is frozenset:
            return {kind.__name__: [self.encode(item, exchange) for item in value]}
        key = (kind.__module__, kind.__qualname__)
        if key in _PARTS:
            return {"made": [*key, [self.encode(part, exchange) for part in _PARTS[key](value)]]}
        if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and type(value.item()) is not kind:
            return self.encode(value.item(), exchange)  # a scalar of numpy, which is not imported for this
        if value is NotImplemented or value is Ellipsis:
            return {"constant": repr(value)}
        if kind is type and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        return self.export(value, exchange)

    def _encode_mutable(self, name: str, value: Any, exchange: Exchange) -> Json:
        if id(value) in exchange.numbers:
            return {"same": exchange.numbers[id(value)]}
        exchange.add(value)
        extra = value.default_factory if name == "defaultdict" else value.maxlen if name == "deque" else None
        return {name: self.encode_items(value, exchange), "extra": self.encode(extra, Exchange())}

    def encode_items(self, container: Any, exchange: Exchange) -> list[Json]:
        items = contents(container)
        if isinstance(container, dict):
            return [[self.encode(key, exchange), self.encode(value, exchange)] for key, value in items]
        return [self.encode(item, exchange) for item in items]

    def decode(self, message: Json, exchange: Exchange) -> Any:
        """ValueError, TypeError, KeyError or IndexError for a message that no encoder makes."""
        if not isinstance(message, dict):
            if isinstance(message, list):
                raise ValueError("a bare list")
            return message
        tag, body = next(iter(message.items()))
        if tag == "int":
            return int(body, 16)
        if tag == "bytes":
            return bytes.fromhex(body)
        if tag in MUTABLE:
            return self._decode_mutable(tag, message, exchange)
        if tag == "same":
            return exchange.known[body]
        if tag == "tuple" or tag == "frozenset":
            items = [self.decode(item, exchange) for item in body]
            return tuple(items) if tag == "tuple" else frozenset(items)
        if tag == "made":
            return self._make(body, exchange)
        if tag == "constant":
            return _CONSTANTS[body]
        if tag == "builtin":
            value = getattr(builtins, body)
            if not isinstance(value, type):
                raise ValueError(f"{body} is no type")
            return value
        return self.resolve(tag, message, exchange)

    def _decode_mutable(self, name: str, message: Json, exchange: Exchange) -> Any:
        extra = self.decode(message["extra"], Exchange())
        container = deque(maxlen=extra) if name == "deque" else MUTABLE[name]()
        if name == "defaultdict":
            container.default_factory = extra
        number = exchange.add(container)  # before its items, which may hold it
        items = self.decode_items(container, message[name], exchange)
        refill(container, items)
        exchange.received.append((number, items))
        return container

    def decode_items(self, container: Any, message: Json, exchange: Exchange) -> list[Any]:
        if isinstance(container, dict):
            return [(self.decode(key, exchange), self.decode(value, exchange)) for key, value in message]
        return [self.decode(item, exchange) for item in message]

    def _make(self, body: Json, exchange: Exchange) -> Any:
        module, name, parts = body
        if (module, name) not in _PARTS:
            raise ValueError(f"{module}.{name} is no plain value")
        return getattr(importlib.import_module(module), name)(*(self.decode(part, exchange) for part in parts))


def known_exception(module: str, name: str) -> type[BaseException] | None:
    """An exception of the standard library that is imported already; no message can cause an import."""
    if module.partition(".")[0] not in sys.stdlib_module_names or module not in sys.modules:
        return None
    found = getattr(sys.modules[module], name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
