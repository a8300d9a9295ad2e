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
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "seed": random.seed, "copy": copy.copy, "deepcopy": copy.deepcopy, "chdir": os.chdir,
    "putenv": lambda key, value: os.environ.__setitem__(os.fsdecode(key), os.fsdecode(value)),
    "unsetenv": lambda key: os.environ.pop(os.fsdecode(key), None),
}  # fmt: skip


class Tracer:
    """Record the lines of the solution that run in a test."""

    def __init__(self) -> None:
        self._lines: set[int] = set()
        self._remaining_events = 0
        self._returned = 0  # line of the last return from the solution

    def begin(self) -> None:
        """Start recording for the next test."""
        self._lines.clear()
        self._remaining_events = MAX_LINE_EVENTS
        _set_trace(self._enter)

    def lines(self) -> tuple[list[int], int]:
        """Return the lines that ran since `begin`, and the line of the last return; then start for the next test."""
        lines = sorted(self._lines)
        self.begin()
        return lines, self._returned

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        return self._trace if frame.f_code.co_filename == FILE else None

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
        self._printed, self._errors = SolutionOutput(max_output), SolutionOutput(max_output, strict=False)
        self._input = SolutionInput()
        sys.stdout, sys.stderr, sys.stdin = self._printed, self._errors, self._input
        builtins.input = self._input.input
        self._warned: list[tuple[str, str, int]] = []
        self._logged: list[tuple[str, int, str, int]] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._logged.append(
            (record.name, record.levelno, record.getMessage(), record.lineno)
        )
        logging.root.addHandler(handler)
        logging.root.setLevel(1)  # the tests' process applies its own levels
        warnings.simplefilter("always")  # the tests' process applies its own warning filters
        warnings.showwarning = lambda message, category, file, line, *_: self._warned.append(
            (str(message), category.__name__, line)
        )

    def take_note(self) -> dict[str, Any]:
        """Return the printed text, the warnings and the unused lines of the input since the last reply."""
        warned, self._warned = self._warned, []
        logged, self._logged = self._logged, []
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
        self._input.ask, self._input.take_back = ask, take_back
        self._finder = CodeFinder(code)
        install_finder(self._finder)

    def load(self, *, again: bool) -> tuple[types.ModuleType, dict[str, str]]:
        """Execute the code, in the same module `again`; return the module, and `_describe` of each public name."""
        if again:
            module = importlib.reload(sys.modules["solution"])
        else:
            sys.modules.pop("solution", None)
            module = importlib.import_module("solution")
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        return module, {str(name): _describe(getattr(module, name, None)) for name in public}

    def run(self, name: str) -> dict[str, Any]:
        """Run the code as a program; see `module.CodeFinder.run`."""
        return self._finder.run(name)


def _describe(value: Any) -> str:
    """Return "MODULE" for a module, "MODULE:NAME" for a function or class, and "" for other values."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}:{name}" if isinstance(name, str) else ""
