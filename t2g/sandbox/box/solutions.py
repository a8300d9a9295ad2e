"""The solution as the tests' process sees it: the module `solution`, its output and the lines that ran."""

import builtins
import inspect
import os
import random
import socket
import sys
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from _pytest import approx

from t2g.sandbox.box import worker
from t2g.sandbox.box.output import Output
from t2g.sandbox.box.peer import Peer
from t2g.sandbox.box.remote import FORWARDED, as_plain, forward_dict

_HOOKS = (
    "pytest_generate_tests pytest_plugins pytestmark setUpModule setup_function setup_module tearDownModule "
    "teardown_function teardown_module"
)
_WRITABLE_MODULES = ("tests", "_io")  # a solution may change instances of their classes
_READABLE_MODULES = (*_WRITABLE_MODULES, "unittest.mock")
_NAMES = ("__name__", "__qualname__", "__doc__")
_METHODS = {*FORWARDED, "__eq__", "__hash__", "__repr__", "__str__"}


class LocalSolution(worker.Tracer):
    """A solution in the tests' own process. It can forge the verdict."""

    gone = False  # whether its process has ended

    def __init__(self, max_output: int) -> None:
        super().__init__()
        self.output = Output(max_output)

    def load(self, code: str, deadline: float) -> None:
        """Execute the code as the module `solution`; its exceptions are raised.

        Args:
            deadline: Deadline of the whole run, seconds of time.monotonic; `Run` applies it in this process.
        """
        worker.load_module(code)


class RemoteSolution(Peer):
    """A solution in a process of its own, the worker, at the other end of a socket."""

    def __init__(self, end: socket.socket, worker: int, max_output: int) -> None:
        super().__init__(end)
        self._worker = worker
        self.output = Output(max_output, strict=False)

    def begin(self) -> None:
        self.call_root("begin")

    def lines(self) -> tuple[list[int], int]:
        return self.call_root("lines")

    def is_allowed(self, operation: str, target: Any, name: str) -> bool:
        """Return whether the solution may do this: use objects that it received, and read attributes of the tests'."""
        if id(target) not in self._numbers:
            return False
        if operation in ("call", "signature"):
            return callable(target)
        if operation == "method":
            return name in _METHODS
        if operation == "get" and name in _NAMES and (inspect.isclass(target) or inspect.isroutine(target)):
            return True
        modules = _READABLE_MODULES if operation == "get" else _WRITABLE_MODULES
        return type(target).__module__ in modules and not name.startswith("_")

    def on_note(self, note: Any) -> None:
        """Print the text and issue the warnings of the solution."""
        sys.stdout.write(str(note["out"]))
        self.output.has_overflowed |= bool(note["flood"])
        for message, category, line in note["warnings"]:
            kind = getattr(builtins, str(category), UserWarning)
            if isinstance(kind, type) and issubclass(kind, Warning):
                warnings.warn_explicit(str(message), kind, worker.FILE, int(line))

    def load(self, code: str, deadline: float) -> None:
        remote, names = self.call_root("load", code, lambda prompt="": builtins.input(prompt), deadline)

        class Module(types.ModuleType):
            __dict__ = property(forward_dict)

            @property
            def __all__(self) -> list[str]:
                """Public names, without those that already have a meaning in the tests: no `abs`, no `pytest`."""
                reserved = {"pytest", "unittest", *_HOOKS.split(), *dir(builtins), *vars(sys.modules["tests"])}
                return [name for name in names if name not in reserved]

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return getattr(remote, name)

            def __setattr__(self, name: str, value: Any) -> None:
                setattr(remote, name, value)

            def __delattr__(self, name: str) -> None:
                delattr(remote, name)

        sys.modules["solution"] = Module("solution")

        def seed_both(*args: Any, **kwargs: Any) -> None:
            seed(*args, **kwargs)
            self.call_root("call", "seed", *args, **kwargs)

        seed, random.seed = random.seed, seed_both
        _guard_approx()

    def describe_end(self) -> str:
        """Return the reason of the outcome when the process of the solution has ended."""
        for _ in range(50):
            process, status = os.waitpid(self._worker, os.WNOHANG)
            if process:
                return "killed" if os.WIFSIGNALED(status) else "exited"
            time.sleep(0.002)
        return "exited"  # the process only closed its end


Solution = LocalSolution | RemoteSolution


def _guard_approx() -> None:
    """Let `pytest.approx` compare plain data only: an object of the solution could answer each comparison with true."""

    def guard(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def guarded(self: Any, actual: Any) -> bool:
            try:
                return equals(self, as_plain(actual))
            except TypeError:
                return False

        return guarded

    for kind in vars(approx).values():
        if inspect.isclass(kind) and issubclass(kind, approx.Approx) and "__eq__" in vars(kind):
            kind.__eq__ = guard(kind.__eq__)
    make = pytest.approx
    pytest.approx = lambda expected, *args, **kwargs: make(as_plain(expected), *args, **kwargs)
