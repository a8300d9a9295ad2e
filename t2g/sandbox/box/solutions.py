"""What the tests' process has of a solution: the module `solution`, what it prints, and the lines that ran."""

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
from t2g.sandbox.box.remote import FORWARDED, as_plain, no_dict

_HOOKS = (
    "pytest_generate_tests pytest_plugins pytestmark setUpModule setup_function setup_module tearDownModule "
    "teardown_function teardown_module"
)
_OPEN_MODULES = ("tests", "_io")  # of the classes whose instances a solution may change
_READABLE_MODULES = (*_OPEN_MODULES, "unittest.mock")
_NAMES = ("__name__", "__qualname__", "__doc__")
_METHODS = {*FORWARDED, "__eq__", "__hash__", "__repr__", "__str__"}


class LocalSolution(worker.Tracer):
    """A solution in the tests' own process. It can do with the verdict what it likes."""

    gone = False  # its process has ended

    def __init__(self, max_output: int) -> None:
        super().__init__()
        self.output = Output(max_output)

    def load(self, code: str, deadline: float) -> None:
        """Make it the module `solution`; raise what it raises. deadline: of time.monotonic."""
        worker.load_module(code)

    def describe_end(self) -> str:
        """Return how its process ended."""
        return "exited"


class RemoteSolution(Peer):
    """A solution in a process of its own, the worker, at the other end of a socket."""

    def __init__(self, end: socket.socket, worker: int, max_output: int) -> None:
        super().__init__(end)
        self._worker = worker
        self.output = Output(max_output, strict=False)

    def begin(self) -> None:
        self.root("begin")

    def lines(self) -> tuple[list[int], int]:
        return self.root("lines")

    def allows(self, operation: str, target: Any, name: str) -> bool:
        """Return whether the solution may do this: it uses what it was handed, and reads objects of the tests."""
        if id(target) not in self._numbers:
            return False
        if operation in ("call", "signature"):
            return callable(target)
        if operation == "method":
            return name in _METHODS
        if operation == "get" and name in _NAMES and (inspect.isclass(target) or inspect.isroutine(target)):
            return True
        modules = _READABLE_MODULES if operation == "get" else _OPEN_MODULES
        return type(target).__module__ in modules and not name.startswith("_")

    def on_note(self, note: Any) -> None:
        """Print here what the solution printed, and warn of what it warned of."""
        sys.stdout.write(str(note["out"]))
        self.output.flood |= bool(note["flood"])
        for message, category, line in note["warnings"]:
            kind = getattr(builtins, str(category), UserWarning)
            if isinstance(kind, type) and issubclass(kind, Warning):
                warnings.warn_explicit(str(message), kind, worker.FILE, int(line))

    def load(self, code: str, deadline: float) -> None:
        remote, names = self.root("load", code, lambda prompt="": builtins.input(prompt), deadline)

        class Module(types.ModuleType):
            __dict__ = property(no_dict)

            @property
            def __all__(self) -> list[str]:
                """Nothing that already means something in the tests: no `abs`, no `pytest` of the solution's."""
                taken = {"pytest", "unittest", *_HOOKS.split(), *dir(builtins), *vars(sys.modules["tests"])}
                return [name for name in names if name not in taken]

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return getattr(remote, name)

            def __setattr__(self, name: str, value: Any) -> None:
                setattr(remote, name, value)

            def __delattr__(self, name: str) -> None:
                delattr(remote, name)

        sys.modules["solution"] = Module("solution")
        seed = random.seed
        random.seed = lambda *args, **kwargs: (seed(*args, **kwargs), self.root("seed", *args, **kwargs))[0]
        _guard_approx()

    def describe_end(self) -> str:
        for _ in range(50):
            process, status = os.waitpid(self._worker, os.WNOHANG)
            if process:
                return "killed" if os.WIFSIGNALED(status) else "exited"
            time.sleep(0.002)
        return "exited"  # it only closed its end


Solution = LocalSolution | RemoteSolution


def _guard_approx() -> None:
    """Let `pytest.approx` see plain data only: an object of the solution would answer each of its questions."""

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
