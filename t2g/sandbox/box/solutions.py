"""The solution as the tests' process sees it: the module `solution`, its output and the lines that ran."""

import builtins
import inspect
import logging
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from _pytest import approx

from t2g.sandbox.box import access, worker
from t2g.sandbox.box.facts import TestFacts
from t2g.sandbox.box.module import FILE, CodeFinder, install_finder, write_file
from t2g.sandbox.box.peer import Peer
from t2g.sandbox.box.remote import Unsupported, as_plain
from t2g.sandbox.box.remote_module import RemoteFinder
from t2g.sandbox.box.streams import SolutionOutput, StdinReader

END_S = 0.5  # a busy machine reports the end of a process late; shorter than KILL_S, so that the results are written
_CURRENT_TEST = b"PYTEST_CURRENT_TEST"  # which pytest sets before each phase of a test


class LocalSolution(worker.Tracer):
    """A solution in the tests' own process. It can forge the verdict."""

    gone = False  # whether its process has ended

    def __init__(self, max_output: int) -> None:
        super().__init__()
        self.output = SolutionOutput(max_output)
        self.refusals: list[str] = []

    def prepare(self, code: str, deadline: float) -> None:
        """Compile the code and make it importable as the module `solution`.

        Args:
            code: The solution.
            deadline: Deadline of the whole run, seconds of time.monotonic; `Run` applies it in this process.

        Raises:
            SyntaxError: The code does not compile.
        """
        write_file(code)
        install_finder(CodeFinder(code))

    def guard(self, facts: TestFacts) -> None:
        """Prepare this process for the tests. Here, nothing keeps the solution's code out."""


class RemoteSolution(Peer):
    """A solution in a process of its own, the worker, at the other end of a socket."""

    def __init__(self, end: socket.socket, worker: int, max_output: int, guard: Callable[..., None]) -> None:
        """Connect to a worker.

        Args:
            end: This end of the connection.
            worker: Process id of the worker.
            max_output: Characters that the solution may print.
            guard: Function of the tests' facts and `refuse` that keeps the solution's code out of this process.
        """
        super().__init__(end)
        self._worker = worker
        self._guard = guard
        self._source = StdinReader()
        self._code = ""
        self.output = SolutionOutput(max_output, strict=False)
        self.refusals: list[str] = []  # what the tests or the solution did that decides nothing

    def start_tracing(self) -> None:
        """Record the lines of the first test; `take_traced_lines` does so for the others."""
        self.call_root("start_tracing")

    def take_traced_lines(self) -> tuple[list[int], int]:
        return self.call_root("take_traced_lines")

    def is_allowed(self, operation: str, target: Any, name: str, value: Any) -> bool:
        """Return whether the solution may do this, with an object that it received."""
        return id(target) in self._numbers and access.is_allowed(operation, target, name, value)

    def refuse(self, reason: str) -> Unsupported:
        self.refusals.append(reason)
        return Unsupported(reason)

    def on_note(self, note: Any) -> None:
        """Print the text and issue the warnings of the solution."""
        sys.stdout.write(str(note["out"]))
        if note["err"]:
            sys.stderr.write(str(note["err"]))
        self.output.has_overflowed |= bool(note["flood"])
        self._source.take_back(int(note["unused"]))
        for name, level, message, line in note["logs"]:
            logger = logging.getLogger(str(name))
            if logger.isEnabledFor(int(level)):
                record = logging.LogRecord(str(name), int(level), FILE, int(line), str(message), None, None)
                logger.handle(record)
        for message, category, line in note["warnings"]:
            kind = getattr(builtins, str(category), UserWarning)
            if isinstance(kind, type) and issubclass(kind, Warning):
                warnings.warn_explicit(str(message), kind, FILE, int(line))

    def prepare(self, code: str, deadline: float) -> None:
        """Compile the code in the other process; see `LocalSolution.prepare`."""
        write_file(code)
        self.call_root("prepare", code, self._source.ask, self._source.take_back, deadline)
        self._code = code

        seed = random.seed

        def seed_both(*args: Any, **kwargs: Any) -> None:
            seed(*args, **kwargs)
            self.call_root("call", "seed", *args, **kwargs)

        random.seed = seed_both
        for name in ("putenv", "unsetenv", "chdir"):
            setattr(os, name, self._forward(name, getattr(os, name)))
        _guard_approx()

    def _forward(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `os` that changes the state of both processes."""

        def call_both(*args: Any) -> Any:
            function(*args)
            if args[0] != _CURRENT_TEST:
                self.call_root("call", name, *args)

        return call_both

    def guard(self, facts: TestFacts) -> None:
        """Keep the solution's code out of this process from now on, and make it importable."""
        install_finder(RemoteFinder(self, self._code, facts.modules))
        self.expected_errors = facts.expected_errors
        self._guard(facts, self.refuse)

    def describe_end(self) -> str:
        """Return the reason of the outcome when the process of the solution has ended."""
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:
            process, status = os.waitpid(self._worker, os.WNOHANG)
            if process:
                if os.WIFSIGNALED(status):
                    return "killed"
                break
            time.sleep(0.002)
        return "exited"  # or the process only closed its end


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
