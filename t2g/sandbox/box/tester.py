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
    arguments += [f"-pno:{name}" for name in _DISABLED.split()]
    config = _prepareconfig(arguments, [])
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
        self._session = session
        self._solution = solution
        self._on_collect = on_collect
        self._deadline = deadline
        self._results: list[Json] = []
        self._running = ""  # name of the current test or phase
        self._num_refusals = 0  # refusals of the solution before this test or phase
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
            if kinds == {True}:
                reason = "unsupported"
        return {"reason": reason, "tests": self._results, "output": output.take()}

    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _run(self, code: str) -> str:
        if not self._attempt("import of the solution", lambda: self._solution.prepare(code, self._deadline)):
            if self._results[-1]["error"] == "SyntaxError":
                return "syntax"
            return "failed"
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
        tests = list(self._collect())[:MAX_TESTS]
        self._on_collect([_name(item.nodeid) for item, _ in tests])
        self._solution.start_tracing()
        for item, next_item in tests:
            if self._solution.output.has_overflowed or self._is_late():
                break
            self._run_test(item, next_item)
        if not self._results:
            return "bad_tests"
        has_run = not all(result["skipped"] for result in self._results)
        if has_run and all(map(_is_good, self._results)):
            return "passed"
        return "failed"

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
                    node.args = [node.func, value]
                    node.func = ast.Name("box_type", ast.Load())
        replace_classes(tree)
        ast.fix_missing_locations(tree)
        vars(builtins).update(box_type=call_type)
        rewrite.rewrite_asserts(tree, self._tests.encode(errors="replace"), FILE)
        return compile(tree, FILE, "exec", dont_inherit=True)

    # -- pytest

    def _collect(self) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
        """Yield each test and the next one."""
        session = self._session
        config = session.config
        config.pluginmanager.register(self)
        config._tmp_path_factory._given_basetemp = Path.cwd() / "pytest"
        module = _Module.from_parent(session, path=Path("/", FILE))
        items = session.items = list(session.genitems(module))
        config.hook.pytest_collection_modifyitems(session=session, config=config, items=items)
        yield from itertools.pairwise([*items, None])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._running = _name(report.nodeid)
            message = str(report.longrepr)[-MAX_TEXT:]
            self._add_result(pytest.Collector.CollectError(message))

    def _run_test(self, item: pytest.Item, next_item: pytest.Item | None) -> None:
        self._running = _name(item.nodeid)
        self._num_refusals = len(self._solution.refusals)
        self._reports.clear()
        self._compared.clear()
        item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
        if self._solution.gone:
            raise Gone("the process has ended")
        first_error = next((error for outcome, error in self._reports if outcome == "failed"), None)
        self._add_result(first_error, skipped=("skipped", None) in self._reports)
        lines, returned = self._solution.take_traced_lines()
        self._results[-1] |= {"lines": lines, "returned": returned}

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run a coroutine function, which pytest itself does not support."""
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        names = pyfuncitem._fixtureinfo.argnames
        arguments = {name: pyfuncitem.funcargs[name] for name in names}
        asyncio.run(pyfuncitem.obj(**arguments))
        return True

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport:
        """Report a phase of a test without pytest's text, which takes more time than most tests."""
        self._error = None
        outcome: Any = "passed"
        text = None
        if call.excinfo is not None:
            self._error = call.excinfo.value
            outcome = "failed"
            if isinstance(self._error, pytest.skip.Exception):
                outcome = "skipped"
                text = ("", 0, "")
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, text, call.when)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        error = None
        if report.failed:
            error = self._error
            if error is None:
                error = AssertionError(str(report.longrepr))
        self._reports.append((report.outcome, error))

    # -- results

    def _add_result(self, error: BaseException | None, *, skipped: bool = False) -> None:
        """Add the result of this test or phase. A refused operation makes it unsupported, caught or not."""
        refusals = self._solution.refusals[self._num_refusals :]
        if refusals and not isinstance(error, Unsupported):
            error = Unsupported(refusals[0])
        result: Json = {
            "name": self._running, "passed": error is None and not skipped, "skipped": error is None and skipped,
            "unsupported": isinstance(error, Unsupported), "lines": [], "returned": 0,
        }  # fmt: skip
        if error is not None:
            result |= self._explain(error)
        self._results.append(result)

    def _explain(self, error: BaseException) -> Json:
        """Return the fields of a result that describe its error."""
        if isinstance(error, SyntaxError) and error.filename == SOLUTION_FILE:
            return {"error": "SyntaxError", "message": str(error.msg)[:MAX_TEXT], "trace": [error.lineno or 1]}
        result = {"error": type(error).__name__, "message": _format(error, str), "trace": _solution_lines(error)}
        lines = traceback_lines(error, FILE)
        if not lines:
            return result
        node = self._find_assert(lines[-1])
        if node is None:
            source = self._tests.split("\n")[lines[-1] - 1]
        else:
            source = ast.get_source_segment(self._tests, node) or ""
        result["statement"] = " ".join(source.split())[:MAX_TEXT]
        is_comparison = type(error) is AssertionError and not hasattr(error, "solution_lines")
        if node is not None and self._compared and is_comparison:
            result |= self._explain_comparison(node, result["message"])
        return result

    def _find_assert(self, line: int) -> ast.Assert | None:
        """Return the assertion of the tests that contains a line; None if there is none."""
        for node in ast.walk(ast.parse(self._tests)):
            if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or 0):
                return node
        return None

    def _explain_comparison(self, node: ast.Assert, message: str) -> Json:
        """Return the fields of a result that describe the last failed comparison of an assertion."""
        operator, left, right = self._compared[-1]
        if operator not in ("==", "is"):
            return {}
        actual = left
        expected = right
        compares = [part for part in ast.walk(node.test) if isinstance(part, ast.Compare)]
        if compares:
            compare = compares[min(len(self._compared), len(compares)) - 1]
            if not _has_call(compare.left) and _has_call(compare.comparators[0]):
                actual = right
                expected = left
        # What follows repeats the values.
        own_message = f"\n{message}".partition("\nassert ")[0].strip()
        return {"got": _format(actual, repr), "expected": _format(expected, repr), "message": own_message}


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
