"""The process that runs the tests. The solution lives in another one and is reached through proxies only: what is
compared here, with what, and what the verdict is, the solution can neither read nor write.
"""

import builtins
import inspect
import io
import os
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from t2g.sandbox.box import pytest_shim as shim
from t2g.sandbox.box.asserts import Asserts
from t2g.sandbox.box.clock import AGAIN_S, TESTS_RING_S, OutOfTime, set_alarm
from t2g.sandbox.box.fixtures import Fixtures
from t2g.sandbox.box.peer import Peer
from t2g.sandbox.box.remote import FORWARDED, Gone

MAX_TESTS = 1000
MAX_TEXT = 300  # characters of a message or a value in a result
_OPEN_MODULES = ("tests", "_io")  # of the classes whose instances a solution may look into
_METHODS = {*FORWARDED, "__eq__", "__hash__", "__repr__", "__str__"}
Json = dict[str, Any]


class Tail(io.StringIO):
    """Standard output of the tests and, through its replies, of the solution: the first `limit` characters."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._room = limit

    def write(self, text: str) -> int:
        super().write(text[: self._room])
        self._room -= min(len(text), self._room)
        return len(text)


def run(
    end: socket.socket, worker: int, supervisor: socket.socket, code: str, tests: str, deadline: float, max_output: int
) -> Json:
    """The verdict: {"reason": ..., "tests": [result, ...], "output": ...}; passed means the reason "passed".

    reason: passed, failed, syntax (of the solution), bad_tests (they do not compile, or hold no test), timeout,
    exited or killed (the solution's process, in the middle), too_much_output, left_processes (all tests passed).
    A run that ends past the deadline (seconds of time.monotonic) is a timeout, whoever noticed it first.
    """
    output = sys.stdout = Tail(max_output)
    session = _Session(end, deadline, supervisor)
    results: list[Json] = []
    reason = "failed"
    set_alarm(_Session.run, deadline + TESTS_RING_S, AGAIN_S)
    try:
        reason = session.run(code, tests, results)
    except BaseException as error:  # noqa: BLE001 also what the solution's process raises between the tests
        if not results or results[-1]["name"] != session.running:
            results.append(session.result(session.running, error))
    if session.flood:
        reason = "too_much_output"
    elif session.late():
        reason = "timeout"
    elif session.peer.gone:
        reason = _ended(worker)
    return {"reason": reason, "tests": results, "output": output.getvalue()}


def _ended(worker: int) -> str:
    """How the worker's process ended."""
    for _ in range(50):
        process, status = os.waitpid(worker, os.WNOHANG)
        if process:
            return "killed" if os.WIFSIGNALED(status) else "exited"
        time.sleep(0.002)
    return "exited"  # it only closed its end


class _Session:
    def __init__(self, end: socket.socket, deadline: float, supervisor: socket.socket) -> None:
        self._deadline, self._supervisor = deadline, supervisor
        self.peer = Peer(end, self._allow)
        self.peer.on_note = self._note
        self.flood = False
        self.running = ""  # name of what runs now
        self.asserts = Asserts()

    def late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _allow(self, operation: str, target: Any, name: str) -> bool:
        """A solution may use what the tests handed to it, and look into instances of the tests' own classes."""
        if not self.peer.knows(target):
            return False
        if operation == "call":
            return callable(target)
        if operation == "method":
            return name in _METHODS
        return type(target).__module__ in _OPEN_MODULES and not name.startswith("_")

    def _note(self, note: Any) -> None:
        sys.stdout.write(str(note["out"]))
        self.flood |= bool(note["flood"])

    def run(self, code: str, tests: str, results: list[Json]) -> str:
        sys.modules["pytest"] = shim.make_module()
        self.running = "import of the solution"
        error = self._attempt(lambda: self._load(code))
        if error is not None:
            results.append(self.result(self.running, error))
            return "syntax" if getattr(error, "solution_name", "") == "BadSyntax" else "failed"
        try:
            compiled = self.asserts.compile(tests)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "bad_tests"
        module = types.ModuleType("tests")
        sys.modules["tests"] = module
        self.running = "import of the tests"
        error = self._attempt(lambda: exec(compiled, module.__dict__))  # noqa: S102 in a process for this purpose
        if error is not None:
            results.append(self.result(self.running, error))
            return "failed"
        for name, test in _collect(module):
            if len(results) == MAX_TESTS or self.flood or self.late():
                break
            results.append(self._one(name, test))
        ran = [result for result in results if not result["skipped"]]
        if not results:
            return "bad_tests"
        if not ran or not all(result["passed"] for result in ran):
            return "failed"
        self.running = "search for processes that are left"
        self._supervisor.send(b"?")
        return "passed" if self._supervisor.recv(1) == b"-" else "left_processes"

    def _load(self, code: str) -> None:
        remote, names = self.peer.root("load", code, lambda prompt="": builtins.input(prompt), self._deadline)

        class Solution(types.ModuleType):
            @property
            def __all__(self) -> list[str]:
                """Nothing that already means something in the tests: no `abs`, no `pytest` of the solution's."""
                taken = {"pytest", "unittest", *dir(builtins), *vars(sys.modules["tests"])}
                return [name for name in names if name not in taken]

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return getattr(remote, name)

            def __setattr__(self, name: str, value: Any) -> None:
                setattr(remote, name, value)

            def __delattr__(self, name: str) -> None:
                delattr(remote, name)

        sys.modules["solution"] = Solution("solution")

    def _one(self, name: str, test: Callable[[], None]) -> Json:
        self.running = name
        self.peer.root("begin")
        self.asserts.last.clear()
        error = self._attempt(test)
        if self.peer.gone:
            raise Gone("the process has ended")
        lines, returned = self.peer.root("lines")
        return self.result(name, error) | {"lines": lines, "returned": returned}

    def _attempt(self, call: Callable[[], Any]) -> BaseException | None:
        try:
            call()
        except (OutOfTime, Gone):
            raise
        except BaseException as error:  # noqa: BLE001 whatever a test raises is its result
            return error
        return None

    def result(self, name: str, error: BaseException | None) -> Json:
        skipped = error is not None and _is_skip(error)
        result: Json = {"name": name, "passed": error is None, "skipped": skipped, "lines": [], "returned": 0}
        if error is None or skipped:
            return result
        result["error"] = str(getattr(error, "solution_name", type(error).__name__))
        result["message"] = _text(error, str)
        result["trace"] = _solution_lines(error)
        if result["error"] == "BadSyntax":
            result |= {"error": "SyntaxError", "message": str(error.args[0])[:MAX_TEXT], "trace": [error.args[1]]}
        return result | self.asserts.explain(error)


def _solution_lines(error: BaseException) -> list[int]:
    """Lines of the solution in the traceback of the error, or else of the one in whose handling it was raised."""
    current: BaseException | None = error
    for _ in range(10):
        if current is None:
            break
        if lines := getattr(current, "solution_lines", ()):
            return list(lines)
        current = current.__cause__ or current.__context__
    return []


def _is_skip(error: BaseException) -> bool:
    """A solution cannot skip a test: what it raises is never a skip."""
    if hasattr(error, "solution_lines"):
        return False
    unittest = sys.modules.get("unittest")
    return isinstance(error, shim.Skipped) or (unittest is not None and isinstance(error, unittest.SkipTest))


def _text(value: Any, show: Callable[[Any], str]) -> str:
    try:
        return show(value)[:MAX_TEXT]
    except Exception:  # noqa: BLE001 an object of the tests or the solution
        return f"<{type(value).__name__}>"


def _collect(module: types.ModuleType) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, call) of every test: functions test*, methods test* of classes Test* and of unittest.TestCase."""
    space = vars(module)
    for name, value in list(space.items()):
        if inspect.isclass(value) and value.__module__ == "tests":
            case = any(base.__name__ == "TestCase" for base in value.__mro__)
            if case or name.startswith("Test"):
                yield from _collect_class(name, value, case, space)
        elif name.startswith("test") and inspect.isfunction(value):
            fixtures = Fixtures(space, None)
            for suffix, arguments in shim.cases(value):
                yield name + suffix, fixtures.bind(value, arguments)


def _collect_class(
    name: str, owner: type, case: bool, space: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], None]]]:
    names = [test for test in dir(owner) if test.startswith("test") and callable(getattr(owner, test))]
    order = {test: place for place, test in enumerate(key for base in reversed(owner.__mro__) for key in vars(base))}
    first = True
    for test in sorted(names, key=lambda test: order[test]):
        for suffix, arguments in shim.cases(getattr(owner, test), owner):
            make = (lambda test=test: owner(test)) if case else owner
            yield f"{name}.{test}{suffix}", Fixtures(space, make, first).bind(test, arguments)
            first = False
