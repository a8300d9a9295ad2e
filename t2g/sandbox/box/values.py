"""Encode Python values as JSON and decode them, between two processes of which one is not trusted.

Plain data (numbers, text, containers, dates, arrays, frames) is copied. Any other object stays in its process, and the
other process holds a `Remote` with its number (t2g.sandbox.box.remote). A message cannot name code to run: decoding
makes only plain data, proxies, and exceptions of the standard library.
"""

import importlib
import json
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from t2g.sandbox.box import arrays
from t2g.sandbox.box.plain_types import CHANGERS, MAKERS, MUTABLE, SPLITTERS, is_plain_type, type_name
from t2g.sandbox.box.remote import Unsupported, is_remote

Json = Any
_KINDS = {kind: name for name, kind in MUTABLE.items()}
# Their parts may be objects of the other process; the parts of other types are plain.
_HOLDERS = {"builtins.tuple", "builtins.frozenset", "builtins.slice"}
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
    if isinstance(container, dict):
        return list(container.items())
    return list(container)


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
    """Return the ids of the elements, and of both parts of a pair."""
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
        if name in CHANGERS:
            return self._encode_changing(name, value, exchange)
        if name in SPLITTERS and (kind is not type or is_plain_type(value)):
            return self._encode_parts(name, value, exchange)
        if arrays.is_plain_scalar(value):
            return self._encode_parts("numpy.generic", value, exchange)
        if name.startswith("numpy.dtype"):
            return self._encode_parts("numpy.dtype", value, exchange)
        return self.export(value, exchange)

    def _encode_parts(self, name: str, value: Any, exchange: Exchange) -> Json:
        parts = SPLITTERS[name](value)
        return {"made": [name, [self.encode(part, exchange) for part in parts]]}

    def _encode_changing(self, name: str, value: Any, exchange: Exchange) -> Json:
        if id(value) in exchange.numbers:
            return {"same": exchange.numbers[id(value)]}
        exchange.add(value)
        return {"changing": name, "parts": self._encode_parts(name, value, Exchange())}

    def _encode_mutable(self, name: str, value: Any, exchange: Exchange) -> Json:
        if id(value) in exchange.numbers:
            return {"same": exchange.numbers[id(value)]}
        exchange.add(value)
        extra = None
        if name == "defaultdict":
            extra = value.default_factory
        elif name == "deque":
            extra = value.maxlen
        return {name: self._encode_items(value, exchange), "extra": self.encode(extra, Exchange())}

    def _encode_items(self, container: Any, exchange: Exchange) -> list[Json]:
        return [self.encode(item, exchange) for item in contents(container)]

    def encode_changes(self, exchange: Exchange) -> list[Json]:
        """Return [number, content] of the received containers that no longer hold the same objects in the same order.

        A content may add containers to the exchange, so that all changed containers are found first.
        """
        containers = exchange.containers
        changed = [number for number, state, _ in exchange.received if self._state(containers[number]) != state]
        return [[number, self._encode_change(containers[number], exchange)] for number in changed]

    def _encode_change(self, container: Any, exchange: Exchange) -> Json:
        name = type_name(type(container))
        if name in CHANGERS:
            return self._encode_parts(name, container, Exchange())
        return self._encode_items(container, exchange)

    def apply_change(self, container: Any, message: Json, exchange: Exchange) -> None:
        """Give a container the content that `encode_changes` of the other process sent."""
        name = type_name(type(container))
        if name in CHANGERS:
            new = self.decode(message, Exchange())
            if hasattr(new, "__dict__"):
                self.check_functions(vars(container), vars(new))
            CHANGERS[name](container, new)
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
        new_ids = set(map(id, new))
        functions = [value for value in old if callable(value) and not is_remote(value)]
        has_lost = any(id(function) not in new_ids for function in functions)
        if has_lost and not self.is_solution and any(is_remote(value) and callable(value) for value in new):
            raise self.refuse("the solution replaced a function of the tests")

    def _state(self, container: Any) -> Any:
        """Return a value that differs once the container has changed."""
        name = type_name(type(container))
        if name in CHANGERS:
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
        if name not in SPLITTERS:
            raise ValueError(f"{name} is no plain value")
        module, _, attribute = name.rpartition(".")
        make = MAKERS.get(name) or getattr(importlib.import_module(module), attribute)
        values = [self.decode(part, exchange) for part in parts]
        if name not in _HOLDERS and any(map(is_remote, values)):
            raise ValueError(f"{name} holds no objects")
        return make(*values)

    def _decode_changing(self, message: Json, exchange: Exchange) -> Any:
        if message["changing"] not in CHANGERS:
            raise ValueError("a value that does not change")
        value = self.decode(message["parts"], Exchange())
        number = exchange.add(value)
        exchange.received.append((number, self._state(value), None))
        return value

    def _decode_mutable(self, name: str, message: Json, exchange: Exchange) -> Any:
        extra = self.decode(message["extra"], Exchange())
        container: Any = MUTABLE[name]()
        if name == "deque":
            container = deque(maxlen=extra)
        elif name == "defaultdict":
            container.default_factory = extra
        number = exchange.add(container)  # before its items are decoded, which may contain it
        items = [self.decode(item, exchange) for item in message[name]]
        replace_contents(container, items)
        exchange.received.append((number, _item_ids(items), items))
        return container


_to_json = json.JSONEncoder().encode  # not `json.dumps`, which tests may patch


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
    kind = getattr(sys.modules[module], name, None)
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind
    return None
