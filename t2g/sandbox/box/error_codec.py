"""Encode exceptions and their classes, and decode them as classes that the receiving process knows or makes.

An exception of the standard library that ends a loop, a task or a test crosses as an ordinary one of the same name.
Otherwise a solution could raise it in place of a wrong result: `all(map(f, xs))`, a task group, `unittest` and a loop
over a queue would take it for the end of their work.
"""

import json
from typing import Any

from t2g.sandbox.box.remote import Remote, Unsupported
from t2g.sandbox.box.values import Codec, Exchange, Json, find_library_exception, traceback_lines

FILE = "solution.py"
MAX_TRACE = 20  # lines of a traceback
MAX_CAUSES = 5
_CONTROL_MODULES = ("_queue", "queue", "asyncio", "concurrent", "unittest", "contextlib", "multiprocessing", "signal")
_to_json = json.JSONEncoder().encode  # not `json.dumps`, which tests may patch


def is_own_error(error: BaseException) -> bool:
    """Return whether the tests or pytest raised this error to decide a test: no solution may handle it."""
    is_ordinary = isinstance(error, Exception | GeneratorExit | SystemExit)
    if is_ordinary and not isinstance(error, AssertionError):
        return False
    return not hasattr(error, "solution_lines")


def is_control(kind: type[BaseException]) -> bool:
    """Return whether the standard library catches this class to end a loop, a task or a test."""
    if kind in (SystemExit, BaseException):
        return False
    root = kind.__module__.partition(".")[0]
    if kind.__name__.startswith("_") or root in _CONTROL_MODULES:
        return True
    return not issubclass(kind, Exception)


class ErrorCodec(Codec):
    """The part of a `Peer` that encodes and decodes exceptions."""

    is_solution: bool
    expected_errors: frozenset[str] = frozenset()  # names of the classes that the tests say they expect
    _proxies: dict[int, Any]

    def request(self, operation: str, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def number(self, value: Any) -> int:
        raise NotImplementedError

    def export_error(self, value: Any, exchange: Exchange) -> Json:
        """Return the message of an exception or of an exception class."""
        if isinstance(value, type):
            return self._export_class(value, exchange)
        args = [self.encode(part, exchange) for part in value.args]
        return {"exception": self.encode(type(value), exchange), "number": self.number(value), "args": args}

    def _export_class(self, value: type[BaseException], exchange: Exchange) -> Json:
        if find_library_exception(value.__module__, value.__qualname__) is value:
            return {"known": [value.__module__, value.__qualname__]}
        bases = [self.encode(base, exchange) for base in value.__bases__ if issubclass(base, BaseException)]
        return {"mirror": self.number(value), "name": value.__name__, "bases": bases}

    def resolve_class(self, message: Json) -> type[BaseException]:
        """Return the exception class that a message refers to by its name.

        Raises:
            Unsupported: An `except` of the tests with this class would catch their own AssertionError.
        """
        kind = self._known_class(message)
        if not self.is_solution and issubclass(AssertionError, kind):
            raise Unsupported(f"a name of the solution is {kind.__name__}, which catches the tests' own AssertionError")
        return kind

    def _known_class(self, message: Json) -> type[BaseException]:
        module, name = message["known"]
        kind = find_library_exception(module, name)
        if kind is None or (not self.is_solution and is_control(kind) and kind.__name__ not in self.expected_errors):
            return type(str(name), (Exception,), {})
        return kind

    def resolve_mirror(self, message: Json, exchange: Exchange) -> type[BaseException]:
        """Return a local class for an exception class of the other end, for `pytest.raises` and `except`."""
        number = message["mirror"]
        if number not in self._proxies:
            bases = tuple(self._exception_class(base, exchange) for base in message["bases"]) or (Exception,)

            def get_attribute(error: Any, name: str) -> Any:
                if error.remote_instance is None or name.startswith("__"):
                    raise AttributeError(name)
                return self.request("get", error.remote_instance, name)

            body = {"remote_number": number, "remote_instance": None, "__getattr__": get_attribute}
            body["__module__"] = "solution"
            self._proxies[number] = type(str(message["name"]), bases, body)
        return self._proxies[number]

    def resolve_exception(self, message: Json, exchange: Exchange) -> BaseException:
        kind = self._exception_class(message["exception"], exchange)
        args = [self.decode(part, exchange) for part in message["args"]]
        try:
            error = kind(*args)
        except Exception:  # noqa: BLE001 a class whose __init__ takes other arguments than its args
            error = kind.__new__(kind, *args)
            error.args = tuple(args)
        if "remote_number" in vars(kind):
            error.remote_number = message["number"]
            error.remote_instance = Remote(self, message["number"])
        return error

    def _exception_class(self, message: Json, exchange: Exchange) -> type[BaseException]:
        kind = self._known_class(message) if "known" in message else self.decode(message, exchange)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError(f"{kind!r:.40} is no exception")
        return kind

    def encode_error(self, error: BaseException, depth: int = 0) -> Json:
        """Return an error with its lines, its notes and the error that it was raised from."""
        try:
            encoded = self.encode(error, Exchange())
            _to_json(encoded)
        except BaseException:  # noqa: BLE001 the arguments are the solution's objects
            kind = self.encode(type(error), Exchange())
            encoded = {"exception": kind, "number": self.number(error), "args": [type(error).__name__]}
        message = {"exception": encoded, "lines": traceback_lines(error, FILE)[-MAX_TRACE:]}
        if notes := getattr(error, "__notes__", None):
            message["notes"] = [str(note) for note in notes]
        for name in ("cause", "context"):
            origin = getattr(error, f"__{name}__")
            if origin is not None and depth < MAX_CAUSES:
                message[name] = self.encode_error(origin, depth + 1)
        return message | {"suppresses": error.__suppress_context__}

    def read_error(self, message: Json) -> BaseException:
        error = self.decode(message["exception"], Exchange())
        if not isinstance(error, BaseException):
            raise TypeError("no exception")
        for note in message.get("notes", ()):
            error.add_note(str(note))
        if "context" in message:
            error.__context__ = self.read_error(message["context"])
        if "cause" in message:
            error.__cause__ = self.read_error(message["cause"])
        error.__suppress_context__ = bool(message["suppresses"])
        # Its presence also marks an error of the other end.
        error.solution_lines = tuple(int(line) for line in message["lines"])
        return error
