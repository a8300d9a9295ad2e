"""Process of the solution: it runs the code and handles requests about its objects. Nothing here is trusted."""

import builtins
import copy
import importlib
import logging
import os
import random
import socket
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

from t2g.sandbox.box.clock import set_alarm
from t2g.sandbox.box.module import FILE, CodeFinder, install_finder
from t2g.sandbox.box.peer import Peer
from t2g.sandbox.box.streams import SolutionInput, SolutionOutput

MAX_LINE_EVENTS = 20_000  # per test; later lines are not recorded, and the code runs without tracing
# What tests may patch.
_set_trace = sys.settrace


def _put_variable(key: bytes | str, value: bytes | str) -> None:
    os.environ[os.fsdecode(key)] = os.fsdecode(value)


def _unset_variable(key: bytes | str) -> None:
    os.environ.pop(os.fsdecode(key), None)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "seed": random.seed, "copy": copy.copy, "deepcopy": copy.deepcopy, "chdir": os.chdir,
    "putenv": _put_variable, "unsetenv": _unset_variable,
}  # fmt: skip


class Tracer:
    """Record the lines of the solution that run in a test."""

    def __init__(self) -> None:
        self._lines: set[int] = set()
        self._remaining_events = 0
        self._returned = 0  # line of the last return from the solution

    def start_tracing(self) -> None:
        """Start recording for the next test."""
        self._lines.clear()
        self._remaining_events = MAX_LINE_EVENTS
        _set_trace(self._enter)

    def take_traced_lines(self) -> tuple[list[int], int]:
        """Return the lines since `start_tracing` and the line of the last return, and start for the next test."""
        lines = sorted(self._lines)
        self.start_tracing()
        return lines, self._returned

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != FILE:
            return None
        return self._trace

    def _trace(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._lines.add(frame.f_lineno)
            self._remaining_events -= 1
            if self._remaining_events <= 0:
                _set_trace(None)
        elif event == "return":
            self._returned = frame.f_lineno
        return self._trace


class Worker(Peer, Tracer):
    """The solution's end. It is its own object 0, the only object that the tests' process knows at the start."""

    is_solution = True

    def __init__(self, end: socket.socket, max_output: int) -> None:
        Peer.__init__(self, end)
        Tracer.__init__(self)
        self.number(self)
        self._printed = sys.stdout = SolutionOutput(max_output)
        self._errors = sys.stderr = SolutionOutput(max_output, strict=False)
        self._input = sys.stdin = SolutionInput()
        builtins.input = self._input.input
        self._warned: list[tuple[str, str, int]] = []
        self._logged: list[tuple[str, int, str, int]] = []
        handler = logging.Handler()
        handler.emit = self._keep_record
        logging.root.addHandler(handler)
        logging.root.setLevel(1)  # the tests' process applies its own levels
        warnings.simplefilter("always")  # the tests' process applies its own warning filters
        warnings.showwarning = self._keep_warning

    def _keep_record(self, record: logging.LogRecord) -> None:
        self._logged.append((record.name, record.levelno, record.getMessage(), record.lineno))

    def _keep_warning(self, message: Any, category: type[Warning], file: str, line: int, *_: object) -> None:
        self._warned.append((str(message), category.__name__, line))

    def take_note(self) -> dict[str, Any]:
        """Return the printed text, the warnings and the unused lines of the input since the last reply."""
        warned = self._warned
        self._warned = []
        logged = self._logged
        self._logged = []
        return {
            "out": self._printed.take(), "flood": self._printed.has_overflowed, "err": self._errors.take(),
            "warnings": warned, "unused": self._input.take_unused(), "logs": logged,
        }  # fmt: skip

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the standard library in this process."""
        return _FUNCTIONS[name](*args, **kwargs)

    def prepare(self, code: str, ask: Callable[..., Any], take_back: Callable[[int], None], deadline: float) -> None:
        """Compile the code and make it importable.

        Args:
            code: The solution.
            ask: `streams.StdinReader.ask` of the tests' process.
            take_back: `streams.StdinReader.take_back`.
            deadline: Deadline of the whole run, seconds of time.monotonic.
        """
        set_alarm(Peer.perform, deadline)
        self._input.ask = ask
        self._input.take_back = take_back
        self._finder = CodeFinder(code)
        install_finder(self._finder)

    def load(self, *, again: bool) -> tuple[types.ModuleType, dict[str, str]]:
        """Execute the code, in the same module `again`; return the module, and `_describe` of each public name."""
        if again:
            module = importlib.reload(sys.modules["solution"])
        else:
            sys.modules.pop("solution", None)
            module = importlib.import_module("solution")
        names = getattr(module, "__all__", None)
        if not names:
            names = [name for name in vars(module) if not name.startswith("_")]
        descriptions = {str(name): _describe(getattr(module, name, None)) for name in names}
        return module, descriptions

    def run(self, name: str) -> dict[str, Any]:
        """Run the code as a program; see `module.CodeFinder.run`."""
        return self._finder.run(name)


def _describe(value: Any) -> str:
    """Return "MODULE" for a module, "MODULE:NAME" for a function or class, and "" for other values."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str):
        return ""
    return f"{getattr(value, '__module__', '')}:{name}"
