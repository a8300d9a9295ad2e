"""The process of the solution: runs its code and answers requests about its objects. Nothing here is trusted."""

import contextlib
import copy
import os
import random
import socket
import sys
import types
import warnings
from typing import Any

from t2g.sandbox.box.clock import set_alarm
from t2g.sandbox.box.output import Output
from t2g.sandbox.box.peer import Peer
from t2g.sandbox.box.remote import Gone

FILE = "solution.py"
MAX_LINE_EVENTS = 20_000  # of one test; later lines are not recorded, and the code runs at full speed again


class BadSyntax(Exception):
    """The solution does not compile. args: message, line."""


def load_module(code: str, **names: Any) -> types.ModuleType:
    """Execute the code as the module `solution`, which has these names from the start. BadSyntax."""
    try:
        compiled = compile(code, FILE, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        message = getattr(error, "msg", None) or str(error)
        raise BadSyntax(message[:200], getattr(error, "lineno", None) or 1) from None
    module = sys.modules["solution"] = types.ModuleType("solution")
    module.__file__ = FILE
    module.__dict__.update(names)
    exec(compiled, module.__dict__)  # noqa: S102 the purpose of this process
    return module


class Tracer:
    """Records the lines of the solution that run in a test."""

    def __init__(self) -> None:
        self._lines: set[int] = set()
        self._room = 0
        self._returned = 0  # line of the last return from the solution

    def begin(self) -> None:
        """Forget the lines of the last test."""
        self._lines.clear()
        self._room = MAX_LINE_EVENTS
        sys.settrace(self._enter)

    def lines(self) -> tuple[list[int], int]:
        """Return the lines that ran since `begin`, and the line of the last return."""
        return sorted(self._lines), self._returned

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        return self._trace if frame.f_code.co_filename == FILE else None

    def _trace(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._lines.add(frame.f_lineno)
            self._room -= 1
            if self._room <= 0:
                sys.settrace(None)
        elif event == "return":
            self._returned = frame.f_lineno
        return self._trace


class Worker(Tracer):
    """Object 0 of its peer: what the tests' process may ask for before it knows any object of the solution."""

    def seed(self, *args: Any, **kwargs: Any) -> None:
        random.seed(*args, **kwargs)

    def copy(self, value: Any) -> Any:
        return copy.copy(value)

    def deepcopy(self, value: Any) -> Any:
        return copy.deepcopy(value)

    def load(self, code: str, ask: Any, deadline: float) -> tuple[types.ModuleType, list[str]]:
        """Return the module, executed, and its public names. ask: the tests' `input`; deadline: of time.monotonic."""
        set_alarm(Peer.perform, deadline)
        module = load_module(code, input=lambda prompt="": ask(prompt))
        return module, [name for name in vars(module) if not name.startswith("_")]


def main(end: socket.socket, max_output: int) -> None:
    """Serve until the other end is closed. What is printed and warned of goes with the next reply."""
    printed = sys.stdout = Output(max_output)
    noted: list[tuple[str, str, int]] = []
    warnings.simplefilter("always")  # the tests' process decides what becomes of a warning
    warnings.showwarning = lambda message, category, file, line, *_: noted.append(
        (str(message), category.__name__, line)
    )

    def take_note() -> dict[str, Any]:
        note = {"out": printed.take(), "flood": printed.flood, "warnings": noted[:]}
        noted.clear()
        return note

    peer = Peer(end, allow=lambda operation, target, name: True, is_solution=True)
    peer.before_reply = take_note
    peer.offer(Worker())
    with contextlib.suppress(Gone):
        peer.serve()
    os._exit(0)
