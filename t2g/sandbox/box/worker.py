"""The process of the solution: runs its code and answers requests about its objects. Nothing here is trusted."""

import contextlib
import io
import os
import socket
import sys
import types
from typing import Any

from t2g.sandbox.box.clock import set_alarm
from t2g.sandbox.box.peer import Peer
from t2g.sandbox.box.pytest_shim import make_module
from t2g.sandbox.box.remote import Gone

FILE = "solution.py"
MAX_LINE_EVENTS = 20_000  # of one test; later lines are not recorded, and the code runs at full speed again


class BadSyntax(Exception):
    """The solution does not compile. args: message, line."""


class Worker:
    """Object 0 of its peer: what the tests' process may ask for before it knows any object of the solution."""

    def __init__(self) -> None:
        self._lines: set[int] = set()
        self._room = 0
        self._returned = 0  # line of the last return from the solution
        self._loop: Any = None

    def load(self, code: str, ask: Any, deadline: float) -> tuple[types.ModuleType, list[str]]:
        """The module, executed, and its public names. ask: the tests' `input`; deadline: of time.monotonic."""
        set_alarm(Peer.perform, deadline)
        try:
            compiled = compile(code, FILE, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            message = getattr(error, "msg", None) or str(error)
            raise BadSyntax(message[:200], getattr(error, "lineno", None) or 1) from None
        module = types.ModuleType("solution")
        module.__file__ = FILE
        sys.modules["solution"] = module
        sys.modules["pytest"] = make_module()
        module.__dict__["input"] = lambda prompt="": ask(prompt)
        exec(compiled, module.__dict__)  # noqa: S102 the purpose of this process
        return module, [name for name in vars(module) if not name.startswith("_")]

    def derive(self, name: str, bases: list[Any], parts: dict[str, tuple[str, list[Any]]]) -> type:
        """A class of the tests under classes of the solution. parts: by attribute, see t2g.sandbox.box.remote."""

        def own(function: Any) -> Any:
            return function and (lambda *args, **kwargs: function(*args, **kwargs))  # a function is bound to its object

        makers: dict[str, Any] = {
            "function": own,
            "classmethod": lambda function: classmethod(own(function)),
            "staticmethod": lambda function: staticmethod(own(function)),
            "property": lambda *functions: property(*map(own, functions)),
            "value": lambda value: value,
        }
        body = {key: makers[kind](*values) for key, (kind, values) in parts.items()}
        return types.new_class(name, tuple(bases), exec_body=lambda space: space.update(body))

    def above(self, owner: type, target: Any, name: str) -> Any:
        return getattr(super(owner, target), name)

    def finish(self, awaitable: Any) -> Any:
        """What an awaitable of the solution comes to; all have one event loop."""
        import asyncio

        async def wait() -> Any:
            return await awaitable

        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(wait())

    def begin(self) -> None:
        """A test begins: forget the lines of the last one."""
        self._lines.clear()
        self._room = MAX_LINE_EVENTS
        sys.settrace(self._enter)

    def lines(self) -> tuple[list[int], int]:
        """Lines that ran since `begin`, and the line of the last return."""
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


class Printed(io.TextIOBase):
    """What the solution prints goes with the next reply. Past the limit printing is an error."""

    def __init__(self, limit: int) -> None:
        self._parts: list[str] = []
        self._room = limit
        self._flood = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._room < len(text):
            self._flood = True
            raise OSError("too much output")
        self._room -= len(text)
        self._parts.append(text)
        return len(text)

    def take(self) -> dict[str, Any]:
        text = "".join(self._parts)
        self._parts.clear()
        return {"out": text, "flood": self._flood}


def main(end: socket.socket, max_output: int) -> None:
    """Serves until the other end is closed."""
    printed = Printed(max_output)
    sys.stdout = printed
    peer = Peer(end, allow=lambda operation, target, name: True)
    peer.before_reply = printed.take
    peer.lends_awaitables = True
    peer.offer(Worker())
    with contextlib.suppress(Gone):
        peer.serve()
    os._exit(0)
