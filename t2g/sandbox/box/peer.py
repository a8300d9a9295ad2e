"""Let two processes use each other's objects.

A `Peer` is one end of a socket pair. `request` sends an operation on an object of the other end, and handles the other
end's requests (callbacks) until the reply arrives. `Peer.is_allowed` decides which requests of the other end are valid.
"""

import inspect
import json
import os
import socket
import sys
import threading
import types
from typing import Any, NoReturn

from t2g.sandbox.box.error_codec import ErrorCodec, is_own_error
from t2g.sandbox.box.operations import OPERATIONS, plain_part
from t2g.sandbox.box.plain_types import is_plain_type, type_name
from t2g.sandbox.box.remote import (
    FORWARDED,
    NON_MUTATING,
    Gone,
    Remote,
    Unsupported,
    check_tainted,
    is_remote,
    proxy_class,
)  # fmt: skip
from t2g.sandbox.box.values import Exchange, Json

MAX_MESSAGE_BYTES = 2**25
_END_OF_ITERATION = {"__next__": StopIteration, "__anext__": StopAsyncIteration}  # exceptions that a method may raise
# What this module calls, however the tests patch the modules that it comes from.
_to_json = json.JSONEncoder().encode
_from_json = json.JSONDecoder().decode
_getpid = os.getpid
_exit = os._exit
_count_threads = threading.active_count
_SIMPLE = (bool, int, float, str, type(None))
_MAX_FIELDS = 64  # attributes of an object, and characters of a text among them


class Peer(ErrorCodec):
    """One end of the connection."""

    is_solution = False  # whether this end runs the solution

    def __init__(self, end: socket.socket) -> None:
        self._send_bytes = end.sendall
        self._read_line = end.makefile("rb").readline
        self._lock = threading.RLock()  # threads of the tests send requests one after the other
        self._objects: list[Any] = []  # objects of this end that the other end knows, for the whole run
        self._numbers: dict[int, int] = {}  # numbers of these objects, by id
        self._proxies: dict[int, Any] = {}  # proxies of the other end's objects, by number
        self._serial = 0
        self._own_error: BaseException | None = None  # that a callback of the tests raised, and the solution received
        self._is_tainted = False  # whether a request with a tainted object is in progress
        self.epoch = 0  # grows whenever code of the other end may run; attributes that it sent are valid until then
        self.num_changes = 0  # requests that may have changed an object of the other end
        self.gone = False

    def is_allowed(self, operation: str, target: Any, name: str, value: Any) -> bool:
        """Return whether this end performs the operation for the other end."""
        return self.is_solution

    def take_note(self) -> Json:
        """Return data for the next reply, in addition to the answer."""
        return None

    def on_note(self, note: Json) -> None:
        """Handle the note of a reply."""

    def refuse(self, reason: str) -> Unsupported:
        """Return the error of an operation that would decide nothing or show too much, after taking note of it."""
        return Unsupported(reason)

    def is_own_error(self, error: object) -> bool:
        """Return whether an error belongs to the tests alone, so that no answer of the other end may suppress it."""
        return not self.is_solution and isinstance(error, BaseException) and is_own_error(error)

    def call_root(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the other end's object 0, which is known from the start."""
        return self.request("method", Remote(self, 0), method, *args, **kwargs)

    # -- requests and replies

    def request(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Perform an operation on an object of the other end and return the result.

        Exceptions of the other end are raised here. StopIteration of the solution becomes RuntimeError unless an
        iterator raised it, as do its subclasses: it would end `all(map(f, xs))`. An error of the tests themselves is
        raised even if the solution caught it.

        Raises:
            Gone: The other process has ended.
        """
        try:
            with self._lock:
                return self._request(operation, target, *args, **kwargs)
        except (StopIteration, StopAsyncIteration) as error:
            may_raise: Any = ()
            if operation == "method":
                may_raise = _END_OF_ITERATION.get(args[0], ())
            if self.is_solution or isinstance(error, may_raise):
                raise
            failure = RuntimeError(f"the solution raised {type(error).__name__}")
            failure.solution_lines = error.solution_lines
            raise failure from None

    def signature(self, target: Any) -> inspect.Signature:
        """Return the signature of the other end's function or class."""
        parts = self.request("signature", target)
        parameters = [inspect.Parameter(name, kind, **rest) for name, kind, rest in parts]
        return inspect.Signature(parameters)

    def _request(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.gone:
            raise Gone("the process has ended")
        self._serial += 1
        self.epoch += 1
        serial = self._serial
        exchange = Exchange()
        is_non_mutating = operation == "method" and args[0] in NON_MUTATING
        self.num_changes += not is_non_mutating and operation not in ("get", "plain", "signature")
        parts = [self.encode(part, exchange) for part in (target, list(args), kwargs)]
        was_tainted = self._is_tainted
        self._is_tainted |= exchange.has_tainted
        self._send({"ask": serial, "operation": operation, "parts": parts})
        try:
            message = self._await_reply(serial)
        finally:
            self._is_tainted = was_tainted
        if not exchange.has_tainted or self.is_solution:
            return self._read_reply(message, exchange, is_non_mutating)
        try:
            value = self._read_reply(message, exchange, is_non_mutating)
        except (StopIteration, StopAsyncIteration, IndexError):
            raise self.refuse("a tainted object ended a loop of the tests") from None
        check_tainted(value, operation, args, self.refuse)
        return value

    def _await_reply(self, serial: int) -> Json:
        while True:
            message = self._receive()
            if "ask" in message:
                self._handle_request(message)
            elif message.get("reply") == serial:
                return message
            else:
                self._fail("it answered a request that was not sent")

    def serve(self) -> None:
        """Handle requests until the other process ends."""
        while True:
            self._handle_request(self._receive())

    def _read_reply(self, message: Json, exchange: Exchange, is_non_mutating: bool) -> Any:
        error: BaseException | None = None
        value = None
        try:
            self.on_note(message["note"])
            if not is_non_mutating:
                for number, content in message["changed"]:
                    self.apply_change(exchange.containers[number], content, exchange)
            if "error" in message:
                error = self.read_error(message["error"])
            else:
                value = self.decode(message["value"], exchange)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            self._fail(f"it answered what cannot be read: {problem!r:.80}")
        error = self._own_error or error
        self._own_error = None
        if error is not None:
            raise error
        return value

    def _handle_request(self, message: Json) -> None:
        self.epoch += 1
        exchange = Exchange()
        owner = _getpid()
        reply = {"reply": message["ask"], "changed": []}
        try:
            target, args, kwargs = (self.decode(part, exchange) for part in message["parts"])
            value = self.perform(message["operation"], target, args, kwargs)
            reply["changed"] = self.encode_changes(exchange)
            reply["value"] = self.encode(value, exchange)
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 any exception of the solution is its answer
            if self.is_own_error(error):
                self._own_error = error
            reply["changed"] = []
            reply["error"] = self.encode_error(error)
        if _getpid() != owner:
            _exit(0)  # a fork that the solution made and that returned to here
        reply["note"] = self.take_note()
        try:
            self._send(reply)
        except (ValueError, RecursionError, MemoryError) as error:  # too large, or too deep
            reply.pop("value", None)
            self._send(reply | {"changed": [], "error": self.encode_error(error)})

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation. In its process, code of the solution runs only inside this method."""
        name = ""
        value = None
        if args:
            value = args[-1]
            if operation not in ("call", "signature"):
                name = args[0]
        if self._is_tainted or not self.is_allowed(operation, target, name, value):
            reason = f"the solution may not {operation} {name} of {type(target).__name__} here"
            raise self.refuse(reason)
        return OPERATIONS[operation](target, args, kwargs)

    # -- messages, one per line

    def _send(self, message: Json) -> None:
        data = _to_json(message).encode() + b"\n"
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large to leave its process")
        try:
            self._send_bytes(data)
        except OSError:
            self._fail("the process has ended")

    def _receive(self) -> Json:
        try:
            line = self._read_line(MAX_MESSAGE_BYTES)
            message = _from_json(line.decode()) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            self._fail("the process has ended")
        return message

    def _fail(self, reason: str) -> NoReturn:
        self.gone = True
        raise Gone(reason)

    # -- objects

    def export(self, value: Any, exchange: Exchange) -> Json:
        if is_remote(value):
            exchange.has_tainted |= value._is_tainted
            return {"yours": value._number}
        if isinstance(value, BaseException | type) and "remote_number" in vars(value):
            return {"yours": value.remote_number}
        if isinstance(value, BaseException) or (isinstance(value, type) and issubclass(value, BaseException)):
            return self.export_error(value, exchange)
        kind = type(value)
        message: Json = {"object": self.number(value), "of": kind.__name__, "class": _stdlib_class(kind)}
        message["methods"] = methods = [name for name in FORWARDED if hasattr(kind, name)]
        if hasattr(value, "__dataclass_fields__"):
            methods.append("__dataclass_fields__")
        message["plain"] = self.encode(plain_part(value), Exchange())
        message["bare"] = isinstance(value, types.FunctionType) and not vars(value)
        message["fields"] = {}
        if self.is_solution:
            message["fields"] = _simple_fields(value)
        return message

    def number(self, value: Any) -> int:
        """Return the number by which the other end knows an object of this end."""
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def resolve(self, tag: str, message: Json, exchange: Exchange) -> Any:
        if tag == "yours":
            return self._objects[message["yours"]]
        if tag == "object":
            return self._proxy(message, exchange)
        if tag == "known":
            return self.resolve_class(message)
        if tag == "mirror":
            return self.resolve_mirror(message, exchange)
        if tag == "exception":
            return self.resolve_exception(message, exchange)
        raise ValueError(f"no value {tag!r:.40}")

    def _proxy(self, message: Json, exchange: Exchange) -> Any:
        number = message["object"]
        if number not in self._proxies:
            kind = proxy_class(str(message["of"]), tuple(message["methods"]), is_guarded=not self.is_solution)
            plain = self.decode(message["plain"], Exchange())
            claimed = None
            if plain is None:
                claimed = _find_class(str(message["class"]))
            self._proxies[number] = kind(self, number, plain, claimed, is_bare=bool(message["bare"]))
        proxy = self._proxies[number]
        if message["fields"]:
            simple = {str(name): value for name, value in message["fields"].items() if type(value) in _SIMPLE}
            proxy.keep_fields(simple)
        return proxy


def _simple_fields(value: Any) -> dict[str, Any]:
    """Return the numbers and short texts among the attributes of an object, so that each needs no request.

    An object whose attributes are computed, or may be changed by another thread, has none.
    """
    kind = type(value)
    is_computed = kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, "__getattr__")
    if is_computed or not hasattr(value, "__dict__") or isinstance(value, type | types.ModuleType | types.FunctionType):
        return {}
    if _count_threads() > 1 or len(vars(value)) > _MAX_FIELDS:
        return {}
    fields: dict[str, Any] = {}
    for name, field in vars(value).items():
        if type(field) not in _SIMPLE or hasattr(kind, name):
            continue
        if type(field) is not str or len(field) < _MAX_FIELDS:
            fields[name] = field
    return fields


def _stdlib_class(kind: type) -> str:
    """Return the name of a class of the standard library whose objects stay in their process; "" for others."""
    root = kind.__module__.partition(".")[0]
    if root not in sys.stdlib_module_names:
        return ""
    return type_name(kind)


def _find_class(name: str) -> type | None:
    """Return the class of an imported module of the standard library that a proxy claims by its `__class__`.

    A function, a method, a generator and other classes that builtins does not name are found in `types`.
    """
    module, _, attribute = name.rpartition(".")
    if module.partition(".")[0] not in sys.stdlib_module_names:
        return None
    kind = getattr(sys.modules.get(module), attribute, None)
    if module == "builtins":
        kind = _UNNAMED.get(attribute)
    if not isinstance(kind, type) or issubclass(kind, type) or is_plain_type(kind):
        return None
    return kind


_UNNAMED = {kind.__name__: kind for kind in vars(types).values() if isinstance(kind, type)}
