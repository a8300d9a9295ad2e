"""Process that runs the tests with real pytest.

A solution in a process of its own is used through proxies only. It can neither read nor write the compared values and
the results. The supervisor makes the verdict of them.
"""

import ast
import asyncio
import builtins
import importlib
import inspect
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite, util
from _pytest.config import _prepareconfig

from t2g.sandbox.box.clock import REPEAT_S, TESTS_ALARM_S, OutOfTime, set_alarm
from t2g.sandbox.box.facts import read_tests
from t2g.sandbox.box.module import FILE as SOLUTION_FILE
from t2g.sandbox.box.patterns import replace_classes
from t2g.sandbox.box.remote import Gone, Unsupported, call_type
from t2g.sandbox.box.solutions import Solution
from t2g.sandbox.box.values import traceback_lines

MAX_TESTS = 1000
MAX_TEXT = 300  # characters of a message or a value in a result
FILE = "tests.py"
_DISABLED = (
    "assertion cacheprovider doctest faulthandler pastebin stepwise terminal threadexception unraisableexception"
)
Json = dict[str, Any]


def prepare_session() -> pytest.Session:
    """Return a pytest session without tests. It loads no external plug-in, no cache and no configuration."""
    arguments = ["-c", "/dev/null", "--rootdir=/", "--noconftest", "--capture=no"]
    config = _prepareconfig([*arguments, *(f"-pno:{name}" for name in _DISABLED.split())], [])
    config._do_configure()
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    return session


class _Module(pytest.Module):
    """Module of the tests, which have no file."""

    def _getobj(self) -> types.ModuleType:
        return sys.modules["tests"]


class Run:
    """One run of tests against a solution. It is a plug-in of pytest."""

    def __init__(
        self, session: pytest.Session, solution: Solution, on_collect: Callable[[list[str]], None], deadline: float
    ) -> None:
        """Prepare a run.

        Args:
            session: See `prepare_session`.
            solution: The solution, not loaded yet.
            on_collect: Receives the names of the tests before the first one runs.
            deadline: Seconds of time.monotonic.
        """
        self._session, self._solution, self._on_collect, self._deadline = session, solution, on_collect, deadline
        self._results: list[Json] = []
        self._running = ""  # name of the current test or phase
        self._num_refusals = 0  # of the solution, before this test or phase
        self._tests = ""
        self._error: BaseException | None = None  # error of the last phase of a test
        self._reports: list[tuple[str, BaseException | None]] = []  # (outcome, error) of each phase of this test
        self._compared: list[tuple[str, Any, Any]] = []  # (operator, left, right) of the test's failed comparisons
        util._reprcompare = lambda *compared: self._compared.append(compared)

    def report(self, code: str, tests: str) -> Json:
        """Return the results: {"reason": ..., "tests": [result, ...], "output": ...}.

        Reasons: passed, failed, unsupported (no test failed, but some decide nothing here), syntax (of the solution),
        bad_tests (not compilable, or without a test), timeout, exited or killed (the solution's process ended during
        the run), and too_much_output. A run that ends past the deadline is a timeout, whatever was noticed first.
        """
        output = sys.stdout = self._solution.output
        self._tests = tests
        reason = "failed"
        set_alarm(Run._run, self._deadline + TESTS_ALARM_S, REPEAT_S)
        try:
            reason = self._run(code)
        except BaseException as error:  # noqa: BLE001 also errors of the solution's process between the tests
            if not self._results or self._results[-1]["name"] != self._running:
                self._add_result(error)
        if output.has_overflowed:
            reason = "too_much_output"
        elif self._is_late():
            reason = "timeout"
        elif self._solution.gone:
            reason = self._solution.describe_end()
        elif reason == "failed":
            kinds = {result["unsupported"] for result in self._results if not _is_good(result)}
            reason = "unsupported" if kinds == {True} else reason
        return {"reason": reason, "tests": self._results, "output": output.take()}

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _run(self, code: str) -> str:
        if not self._attempt("import of the solution", lambda: self._solution.prepare(code, self._deadline)):
            return "syntax" if self._results[-1]["error"] == "SyntaxError" else "failed"
        try:
            tree = ast.parse(self._tests, FILE)
            facts = read_tests(tree)
            compiled = self._compile(tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "bad_tests"
        self._solution.guard(facts)
        module = sys.modules["tests"] = types.ModuleType("tests")
        if facts.imports_solution and not self._attempt("import of the solution", _import_solution):
            return "failed"
        if not self._attempt("import of the tests", lambda: exec(compiled, module.__dict__)):  # noqa: S102
            return "failed"
        tests = list(self._collect())
        self._on_collect([_name(item.nodeid) for item, _ in tests[:MAX_TESTS]])
        self._solution.begin()
        for item, next_item in tests[:MAX_TESTS]:
            if self._solution.output.has_overflowed or self._is_late():
                break
            self._run_test(item, next_item)
        if not self._results:
            return "bad_tests"
        has_run = not all(result["skipped"] for result in self._results)
        return "passed" if has_run and all(map(_is_good, self._results)) else "failed"

    def _attempt(self, name: str, call: Callable[[], Any]) -> bool:
        """Return whether a call raises nothing; else add its error as a result of this name."""
        self._running = name
        self._num_refusals = len(self._solution.refusals)
        try:
            call()
        except (OutOfTime, Gone):
            raise
        except BaseException as error:  # noqa: BLE001 any exception is the result of the phase
            self._add_result(error, skipped=isinstance(error, pytest.skip.Exception))
            return False
        return True

    def _compile(self, tree: ast.Module) -> types.CodeType:
        """Compile the tests as pytest does, with `call_type` for each call of `type` with one argument."""
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id="type"), args=[value]):
                    node.func, node.args = ast.Name("box_type", ast.Load()), [node.func, value]
        replace_classes(tree)
        ast.fix_missing_locations(tree)
        vars(builtins).update(box_type=call_type)
        rewrite.rewrite_asserts(tree, self._tests.encode(errors="replace"), FILE)
        return compile(tree, FILE, "exec", dont_inherit=True)

    # -- pytest

    def _collect(self) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
        """Yield each test and the next one."""
        session, config = self._session, self._session.config
        config.pluginmanager.register(self)
        config._tmp_path_factory._given_basetemp = Path.cwd() / "pytest"
        items = session.items = list(session.genitems(_Module.from_parent(session, path=Path("/", FILE))))
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=items)
        yield from itertools.pairwise([*items, None])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._running = _name(report.nodeid)
            self._add_result(pytest.Collector.CollectError(str(report.longrepr)[-MAX_TEXT:]))

    def _run_test(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        self._running = _name(item.nodeid)
        self._num_refusals = len(self._solution.refusals)
        self._reports.clear()
        self._compared.clear()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        if self._solution.gone:
            raise Gone("the process has ended")
        errors = [error for outcome, error in self._reports if outcome == "failed"]
        self._add_result(errors[0] if errors else None, skipped=("skipped", None) in self._reports)
        lines, returned = self._solution.lines()
        self._results[-1] |= {"lines": lines, "returned": returned}

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a coroutine function, which pytest itself does not support."""
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Report a phase of a test without pytest's text, which takes more time than most tests."""
        self._error = call.excinfo.value if call.excinfo else None
        skipped = isinstance(self._error, pytest.skip.Exception)
        outcome, text = ("skipped", ("", 0, "")) if skipped else ("failed" if self._error else "passed", None)
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, text, call.when)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        error = (self._error or AssertionError(str(report.longrepr))) if report.failed else None
        self._reports.append((report.outcome, error))

    # -- results

    def _add_result(self, error: BaseException | None, *, skipped: bool = False) -> None:
        """Add the result of this test or phase. A refused operation makes it unsupported, caught or not."""
        refusals = self._solution.refusals[self._num_refusals :]
        if refusals and not isinstance(error, Unsupported):
            error = Unsupported(refusals[0])
        result: Json = {
            "name": self._running, "passed": not (error or skipped), "skipped": skipped and not error,
            "unsupported": isinstance(error, Unsupported), "lines": [], "returned": 0,
        }  # fmt: skip
        self._results.append(result | (self._explain(error) if error else {}))

    def _explain(self, error: BaseException) -> Json:
        """Return the fields of a result that describe its error."""
        if isinstance(error, SyntaxError) and error.filename == SOLUTION_FILE:
            return {"error": "SyntaxError", "message": str(error.msg)[:MAX_TEXT], "trace": [error.lineno or 1]}
        result = {"error": type(error).__name__, "message": _format(error, str), "trace": _solution_lines(error)}
        if not (lines := traceback_lines(error, FILE)):
            return result
        nodes = (node for node in ast.walk(ast.parse(self._tests)) if isinstance(node, ast.Assert))
        node = next((node for node in nodes if node.lineno <= lines[-1] <= (node.end_lineno or 0)), None)
        source = ast.get_source_segment(self._tests, node) if node else self._tests.split("\n")[lines[-1] - 1]
        result["statement"] = " ".join((source or "").split())[:MAX_TEXT]
        if node and self._compared and type(error) is AssertionError and not hasattr(error, "solution_lines"):
            operator, *values = self._compared[-1]
            compares = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
            part = compares[min(len(self._compared), len(compares)) - 1] if compares else None
            if part and not _has_call(part.left) and _has_call(part.comparators[0]):
                values.reverse()
            if operator in ("==", "is"):
                message = f"\n{result['message']}".partition("\nassert ")[0].strip()  # what follows repeats the values
                result |= {"got": _format(values[0], repr), "expected": _format(values[1], repr), "message": message}
        return result


def _is_good(result: Json) -> bool:
    return result["passed"] or result["skipped"]


def _import_solution() -> None:
    importlib.import_module("solution")


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2].replace("::", ".") or FILE


def _solution_lines(error: BaseException) -> list[int]:
    """Return the solution's lines in the traceback of an error, or else of the error that it was raised from."""
    current: BaseException | None = error
    for _ in range(10):
        if current is None:
            break
        if lines := getattr(current, "solution_lines", ()) or traceback_lines(current, SOLUTION_FILE):
            return list(lines)
        current = current.__cause__ or current.__context__
    return []


def _format(value: Any, function: Callable[[Any], str]) -> str:
    """Return `str` or `repr` of a value, or the name of its type if that raises an error."""
    try:
        return function(value)[:MAX_TEXT]
    except Exception:  # noqa: BLE001 an object of the tests or the solution
        return f"<{type(value).__name__}>"


def _has_call(node: ast.expr) -> bool:
    return any(isinstance(child, ast.Call) for child in ast.walk(node))
