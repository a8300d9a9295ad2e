"""Let two processes use each other's objects.

A `Peer` is one end of a socket pair. `request` sends an operation on an object of the other end, and handles the other
end's requests (callbacks) until the reply arrives. `Peer.is_allowed` decides which requests of the other end are valid.
"""

import inspect
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from t2g.sandbox.box.remote import FORWARDED, NON_MUTATING, Gone, Remote, Unsupported, is_remote, proxy_class
from t2g.sandbox.box.values import Codec, Exchange, Json, find_stdlib_exception, replace_contents, traceback_lines

MAX_MESSAGE_BYTES = 2**25
MAX_TRACE = 20  # lines of a traceback
_END_OF_ITERATION = {"__next__": StopIteration, "__anext__": StopAsyncIteration}  # exceptions that a method may raise
_CONTROL = ("SkipTest", "KeyboardInterrupt")  # pytest acts on these; those of the solution are ordinary exceptions
# By plain type: returns the plain value of an instance of a subclass, by the methods of the plain type.
_PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__int__, float: float.__float__, complex: complex.__complex__, str: str.__str__, dict: dict.copy
}  # fmt: skip
for _kind in (bytes, tuple, frozenset, list, set, bytearray):
    _PLAIN[_kind] = lambda value, kind=_kind: kind(kind.__iter__(value))


class Peer(Codec):
    """One end of the connection."""

    is_solution = False  # whether this end runs the solution

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reader = end.makefile("rb")
        self._lock = threading.RLock()  # threads of the tests send requests one after the other
        self._objects: list[Any] = []  # objects of this end that the other end knows, for the whole run
        self._numbers: dict[int, int] = {}  # of these objects, by id
        self._proxies: dict[int, Any] = {}  # of objects of the other end, by number
        self._serial = 0
        self.num_changes = 0  # requests that may have changed an object of the other end
        self.gone = False

    def is_allowed(self, operation: str, target: Any, name: str) -> bool:
        """Return whether this end performs the operation for the other end."""
        return self.is_solution

    def take_note(self) -> Json:
        """Return data for the next reply, in addition to the answer."""
        return None

    def on_note(self, note: Json) -> None:
        """Handle the note of a reply."""

    def call_root(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the other end's object 0, which is known from the start."""
        return self.request("method", Remote(self, 0), method, *args, **kwargs)

    # -- requests and replies

    def request(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Perform an operation on an object of the other end and return the result.

        Exceptions of the other end are raised here. StopIteration of the solution becomes RuntimeError unless an
        iterator raised it, as do its subclasses: it would end `all(map(f, xs))`.

        Raises:
            Gone: The other process has ended.
        """
        try:
            with self._lock:
                return self._request(operation, target, *args, **kwargs)
        except (StopIteration, StopAsyncIteration) as error:
            may_raise = _END_OF_ITERATION.get(args[0], ()) if operation == "method" else ()
            if self.is_solution or isinstance(error, may_raise):
                raise
            failure = RuntimeError(f"the solution raised {type(error).__name__}")
            failure.solution_lines = error.solution_lines
            raise failure from None

    def signature(self, target: Any) -> inspect.Signature:
        """Return the signature of the other end's function or class."""
        parts = self.request("signature", target)
        return inspect.Signature([inspect.Parameter(name, kind, **rest) for name, kind, rest in parts])

    def _request(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.gone:
            raise Gone("the process has ended")
        self._serial += 1
        serial, exchange = self._serial, Exchange()
        is_non_mutating = operation == "method" and args[0] in NON_MUTATING
        self.num_changes += not is_non_mutating and operation not in ("get", "plain", "signature")
        parts = [self.encode(part, exchange) for part in (target, list(args), kwargs)]
        self._send({"ask": serial, "operation": operation, "parts": parts})
        while True:
            message = self._receive()
            if "ask" in message:
                self._handle_request(message)
            elif message.get("reply") == serial:
                return self._read_reply(message, exchange, is_non_mutating)
            else:
                self._fail("it answered a request that was not sent")

    def serve(self) -> None:
        """Handle requests until the other process ends."""
        while True:
            self._handle_request(self._receive())

    def _read_reply(self, message: Json, exchange: Exchange, is_non_mutating: bool) -> Any:
        try:
            self.on_note(message["note"])
            for number, items in [] if is_non_mutating else message["changed"]:
                container = exchange.containers[number]
                replace_contents(container, [self.decode(item, exchange) for item in items])
            if "error" not in message:
                return self.decode(message["value"], exchange)
            error = self._read_error(message["error"], exchange)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError) as problem:
            self._fail(f"it answered what cannot be read: {problem!r:.80}")
        raise error

    def _handle_request(self, message: Json) -> None:
        exchange, owner, reply = Exchange(), os.getpid(), {"reply": message["ask"], "changed": []}
        try:
            target, args, kwargs = (self.decode(part, exchange) for part in message["parts"])
            value = self.perform(message["operation"], target, args, kwargs)
            reply["changed"] = [[n, self.encode_items(exchange.containers[n], exchange)] for n in exchange.changed()]
            reply["value"] = self.encode(value, exchange)
        except Gone:
            raise
        except BaseException as error:  # noqa: BLE001 any exception of the solution is its answer
            reply["changed"], reply["error"] = [], self._encode_error(error)
        if os.getpid() != owner:
            os._exit(0)  # a fork that the solution made and that returned to here
        reply["note"] = self.take_note()
        try:
            self._send(reply)
        except (ValueError, RecursionError, MemoryError) as error:  # too large, or too deep
            reply.pop("value", None)
            self._send(reply | {"changed": [], "error": self._encode_error(error)})

    def perform(self, operation: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation. In its process, code of the solution runs only inside this method."""
        name = args[0] if operation not in ("call", "signature") and args else ""
        if not self.is_allowed(operation, target, name):
            raise Unsupported(f"the solution may not {operation} {name} here")
        return _OPERATIONS[operation](target, args, kwargs)

    # -- messages, one per line

    def _send(self, message: Json) -> None:
        data = json.dumps(message).encode() + b"\n"
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large to leave its process")
        try:
            self._end.sendall(data)
        except OSError:
            self._fail("the process has ended")

    def _receive(self) -> Json:
        try:
            line = self._reader.readline(MAX_MESSAGE_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
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
            return {"yours": value._number}
        if isinstance(value, BaseException | type) and "remote_number" in vars(value):
            return {"yours": value.remote_number}
        if isinstance(value, type) and issubclass(value, BaseException):
            return self._export_exception_class(value, exchange)
        if isinstance(value, BaseException):
            args = [self.encode(part, exchange) for part in value.args]
            return {"exception": self.encode(type(value), exchange), "number": self._number(value), "args": args}
        return {
            "object": self._number(value),
            "of": type(value).__name__,
            "methods": [name for name in FORWARDED if hasattr(type(value), name)]
            + ["__dataclass_fields__"] * hasattr(value, "__dataclass_fields__"),
            "plain": self.encode(_plain_part(value), Exchange()),
        }

    def _export_exception_class(self, value: type[BaseException], exchange: Exchange) -> Json:
        if find_stdlib_exception(value.__module__, value.__qualname__) is value:
            return {"known": [value.__module__, value.__qualname__]}
        bases = [self.encode(base, exchange) for base in value.__bases__ if issubclass(base, BaseException)]
        return {"mirror": self._number(value), "name": value.__name__, "bases": bases}

    def _number(self, value: Any) -> int:
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
            kind = find_stdlib_exception(*message["known"])
            if kind and (self.is_solution or kind.__name__ not in _CONTROL):
                return kind
            return type(str(message["known"][1]), (Exception,), {})
        if tag == "mirror":
            return self._mirror(message, exchange)
        if tag == "exception":
            return self._exception(message, exchange)
        raise ValueError(f"no value {tag!r:.40}")

    def _proxy(self, message: Json, exchange: Exchange) -> Any:
        number = message["object"]
        if number not in self._proxies:
            kind = proxy_class(str(message["of"]), tuple(message["methods"]), is_guarded=not self.is_solution)
            self._proxies[number] = kind(self, number, self.decode(message["plain"], Exchange()))
        return self._proxies[number]

    def _mirror(self, message: Json, exchange: Exchange) -> type:
        """Return a local class for an exception class of the other end, for `pytest.raises` and `except`."""
        number = message["mirror"]
        if number not in self._proxies:
            bases = tuple(self._exception_class(base, exchange) for base in message["bases"]) or (Exception,)

            def get_attribute(error: Any, name: str) -> Any:
                if error.remote_instance is None:
                    raise AttributeError(name)
                return self.request("get", error.remote_instance, name)

            body = {"remote_number": number, "remote_instance": None, "__getattr__": get_attribute}
            self._proxies[number] = type(str(message["name"]), bases, body | {"__module__": "solution"})
        return self._proxies[number]

    def _exception(self, message: Json, exchange: Exchange) -> BaseException:
        kind = self._exception_class(message["exception"], exchange)
        args = [self.decode(part, exchange) for part in message["args"]]
        try:
            error = kind(*args)
        except Exception:  # noqa: BLE001 a class whose __init__ takes other arguments than its args
            error = kind.__new__(kind, *args)
            error.args = tuple(args)
        if "remote_number" in vars(kind):
            error.remote_number, error.remote_instance = message["number"], Remote(self, message["number"])
        return error

    def _exception_class(self, message: Json, exchange: Exchange) -> type[BaseException]:
        kind = self.decode(message, exchange)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"{kind!r:.40} is no exception")
        return kind

    def _encode_error(self, error: BaseException) -> Json:
        try:
            encoded = self.encode(error, Exchange())
            json.dumps(encoded)
        except BaseException:  # noqa: BLE001 the arguments are the solution's objects
            kind = self.encode(type(error), Exchange())
            encoded = {"exception": kind, "number": self._number(error), "args": [type(error).__name__]}
        return {"exception": encoded, "lines": traceback_lines(error, "solution.py")[-MAX_TRACE:]}

    def _read_error(self, message: Json, exchange: Exchange) -> BaseException:
        error = self.decode(message["exception"], Exchange())
        if not isinstance(error, BaseException):
            raise TypeError("no exception")
        # Its presence also marks an error of the other end.
        error.solution_lines = tuple(int(line) for line in message["lines"])
        return error


_OPERATIONS: dict[str, Callable[[Any, list[Any], dict[str, Any]], Any]] = {
    "call": lambda target, args, kwargs: target(*args, **kwargs),
    "method": lambda target, args, kwargs: getattr(type(target), args[0])(target, *args[1:], **kwargs),
    "get": lambda target, args, kwargs: getattr(target, *args),
    "set": lambda target, args, kwargs: setattr(target, *args),
    "delete": lambda target, args, kwargs: delattr(target, *args),
    "plain": lambda target, args, kwargs: _plain_part(target),
    "signature": lambda target, args, kwargs: [*map(_parts_of, inspect.signature(target).parameters.values())],
}


def _parts_of(parameter: inspect.Parameter) -> tuple[Any, ...]:
    """Return name, kind, and default and annotation if the parameter has them; an annotation is a type or text."""
    parts = {"default": parameter.default, "annotation": parameter.annotation}
    if not isinstance(parameter.annotation, type):
        parts["annotation"] = str(parameter.annotation)
    return parameter.name, int(parameter.kind), {k: v for k, v in parts.items() if v is not parameter.empty}


def _plain_part(value: Any) -> Any:
    """Return the plain value of an instance of a subclass of a plain type; None for other objects."""
    return next((to_plain(value) for kind, to_plain in _PLAIN.items() if isinstance(value, kind)), None)
