"""Process of the solution: it runs the code and handles requests about its objects. Nothing here is trusted."""

import copy
import random
import socket
import sys
import types
import warnings
from typing import Any

from t2g.sandbox.box.clock import set_alarm
from t2g.sandbox.box.output import Output
from t2g.sandbox.box.peer import Peer

FILE = "solution.py"
MAX_LINE_EVENTS = 20_000  # per test; later lines are not recorded, and the code runs without tracing


def load_module(code: str, **names: Any) -> types.ModuleType:
    """Execute the code as the module `solution`, which has the given names from the start.

    Raises:
        SyntaxError: The code does not compile; any exception of the code is raised, too.
    """
    try:
        compiled = compile(code, FILE, "exec", dont_inherit=True)
    except (ValueError, RecursionError, MemoryError) as error:  # such as null bytes
        raise SyntaxError(str(error), (FILE, 1, 1, "")) from None
    module = sys.modules["solution"] = types.ModuleType("solution")
    module.__file__ = FILE
    module.__dict__.update(names)
    exec(compiled, module.__dict__)  # noqa: S102 the purpose of this process
    return module


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
        sys.settrace(self._enter)

    def lines(self) -> tuple[list[int], int]:
        """Return the lines that ran since `begin`, and the line of the last return."""
        return sorted(self._lines), self._returned

    def _enter(self, frame: types.FrameType, event: str, argument: object) -> Any:
        return self._trace if frame.f_code.co_filename == FILE else None

    def _trace(self, frame: types.FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self._lines.add(frame.f_lineno)
            self._remaining_events -= 1
            if self._remaining_events <= 0:
                sys.settrace(None)
        elif event == "return":
            self._returned = frame.f_lineno
        return self._trace


class Worker(Peer, Tracer):
    """The solution's end. It is its own object 0, the only object that the tests' process knows at the start."""

    is_solution = True

    def __init__(self, end: socket.socket, max_output: int) -> None:
        Peer.__init__(self, end)
        Tracer.__init__(self)
        self._number(self)
        self._printed = sys.stdout = Output(max_output)
        self._warned: list[tuple[str, str, int]] = []
        warnings.simplefilter("always")  # the tests' process applies its own warning filters
        warnings.showwarning = lambda message, category, file, line, *_: self._warned.append(
            (str(message), category.__name__, line)
        )

    def take_note(self) -> dict[str, Any]:
        """Return the printed text and the warnings since the last reply."""
        warned, self._warned = self._warned, []
        return {"out": self._printed.take(), "flood": self._printed.has_overflowed, "warnings": warned}

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the standard library in this process."""
        return {"seed": random.seed, "copy": copy.copy, "deepcopy": copy.deepcopy}[name](*args, **kwargs)

    def load(self, code: str, read_input: Any, deadline: float) -> tuple[types.ModuleType, list[str]]:
        """Execute the code; return the module and its public names.

        Args:
            code: The solution.
            read_input: `input` of the tests' process.
            deadline: Deadline of the whole run, seconds of time.monotonic.
        """
        set_alarm(Peer.perform, deadline)
        module = load_module(code, input=lambda prompt="": read_input(prompt))
        return module, [name for name in vars(module) if not name.startswith("_")]
