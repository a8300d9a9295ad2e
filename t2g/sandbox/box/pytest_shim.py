"""What tests use of pytest, so that a sandbox needs no pytest and a test means the same on every machine.

raises, approx, fail, skip, importorskip, fixture, param, and the marks parametrize, skip, skipif, xfail; all other
marks do nothing. Fixtures: capsys, tmp_path, monkeypatch (attributes) and those of the tests.
"""

import inspect
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from t2g.sandbox.box.remote import as_plain


class Failed(AssertionError):
    """`pytest.fail`, and an expected exception that was not raised."""


class Skipped(BaseException):
    """`pytest.skip`."""


class Exit(BaseException):
    """`pytest.exit`."""


class ExceptionInfo:
    value: BaseException

    @property
    def type(self) -> type[BaseException]:
        return type(self.value)

    @property
    def typename(self) -> str:
        return self.type.__name__

    def match(self, pattern: str) -> bool:
        if not re.search(pattern, str(self.value)):
            raise Failed(f"{str(self.value)!r:.200} does not match {pattern!r:.200}")
        return True


class raises:  # noqa: N801 pytest's name
    def __new__(cls, expected: Any, *args: Any, match: str | None = None, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        made.expected, made.pattern, made.info = expected, match, ExceptionInfo()
        if not args:
            return made
        with made as info:
            args[0](*args[1:], **kwargs)
        return info

    def __enter__(self) -> ExceptionInfo:
        return self.info

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None:
            names = self.expected if isinstance(self.expected, tuple) else (self.expected,)
            raise Failed(f"did not raise {' or '.join(name.__name__ for name in names)}")
        if not isinstance(error, self.expected):
            return False
        self.info.value = error
        return self.pattern is None or self.info.match(self.pattern)


class approx:  # noqa: N801 pytest's name
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None, nan_ok: bool = False) -> None:  # noqa: A002
        self.expected, self.nan_ok = expected, nan_ok
        self.rel = 1e-6 if rel is None and abs is None else rel or 0.0
        self.abs = 1e-12 if abs is None else abs

    def __eq__(self, actual: object) -> bool:
        try:
            return self._near(actual, self.expected)
        except TypeError:
            return False

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"

    def _near(self, actual: Any, expected: Any) -> bool:
        actual, expected = as_plain(actual), as_plain(expected)
        if isinstance(expected, dict):
            return set(actual) == set(expected) and all(self._near(actual[key], expected[key]) for key in expected)
        if isinstance(expected, list | tuple):
            return len(actual) == len(expected) and all(map(self._near, actual, expected))
        if actual == expected:
            return True
        if self.nan_ok and math.isnan(actual) and math.isnan(expected):
            return True
        return abs(actual - expected) <= max(self.rel * abs(expected), self.abs) < math.inf


class _Param(tuple):
    """`pytest.param`: the values of one case."""


class _Mark:
    """pytest.mark: `cases` and `skip` of a test function are all that is kept."""

    def __getattr__(self, name: str) -> Any:
        def mark(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and not kwargs and (inspect.isfunction(args[0]) or inspect.isclass(args[0])):
                return apply(args[0]) if name in ("skip", "xfail") else args[0]  # a mark without brackets
            return lambda test: apply(test, *args, **kwargs)

        def apply(test: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "parametrize":
                names = args[0].replace(",", " ").split() if isinstance(args[0], str) else list(args[0])
                single = isinstance(args[0], str) and len(names) == 1  # else every row is unpacked
                rows = [(row,) if single and not isinstance(row, _Param) else row for row in args[1]]
                test.box_cases = [*vars(test).get("box_cases", []), (names, rows)]
            elif name in ("skip", "xfail") or (name == "skipif" and args[0]):
                test.box_skip = True
            return test

        return mark


def _fixture(function: Any = None, **options: Any) -> Any:
    def mark(function: Any) -> Any:
        function.box_fixture = options
        return function

    return mark if function is None else mark(function)


def _raise(kind: type[BaseException]) -> Callable[..., Any]:
    def function(reason: str = "", *args: Any, **kwargs: Any) -> Any:
        raise kind(reason or kwargs.get("msg") or kwargs.get("reason") or "")

    return function


def _import_or_skip(name: str, *args: Any, **kwargs: Any) -> Any:
    try:
        __import__(name)
    except ImportError as error:
        raise Skipped(str(error)) from error
    return sys.modules[name]


def make_module() -> types.ModuleType:
    module = types.ModuleType("pytest")
    module.__dict__.update(
        raises=raises, approx=approx, mark=_Mark(), fixture=_fixture, importorskip=_import_or_skip,
        fail=_raise(Failed), skip=_raise(Skipped), exit=_raise(Exit), xfail=_raise(Skipped),
        param=lambda *values, **kwargs: _Param(values),
    )  # fmt: skip
    return module


def cases(test: Any, owner: Any = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(suffix of the name, arguments) of every case that `parametrize` makes of a test; one empty case without it."""
    marks = [*getattr(test, "box_cases", []), *getattr(owner, "box_cases", [])]
    for index, values in enumerate(itertools.product(*(rows for _, rows in reversed(marks)))):
        arguments: dict[str, Any] = {}
        for (names, _), row in zip(reversed(marks), values, strict=True):
            arguments.update(zip(names, row, strict=True))
        yield (f"[{index}]" if marks else ""), arguments
