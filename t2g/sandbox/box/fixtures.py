"""Fixtures and set-up of a test: what `pytest` and `unittest` would do before and after it."""

import contextlib
import inspect
import io
import pathlib
import tempfile
from collections import namedtuple
from collections.abc import Callable
from typing import Any

from t2g.sandbox.box.pytest_shim import Skipped

_Captured = namedtuple("CaptureResult", ["out", "err"])
_SET_UP, _TEAR_DOWN = ("setup_method", "setUp"), ("teardown_method", "tearDown")


class Fixtures:
    """Of one test. make: its instance, or None for a function; first: whether it is the first test of its class."""

    def __init__(self, space: dict[str, Any], make: Callable[[], Any] | None, first: bool = False) -> None:
        self._space, self._make, self._first = space, make, first

    def bind(self, test: Any, arguments: dict[str, Any]) -> Callable[[], None]:
        """The call of a test (a function, or the name of a method) with its fixtures."""

        def call() -> None:
            with contextlib.ExitStack() as stack:
                instance = self._prepare(stack)
                function = test if instance is None else getattr(instance, test)
                if getattr(function, "box_skip", False):
                    raise Skipped
                made: dict[str, Any] = {}
                for name, value in self._all(instance).items():
                    if value.box_fixture.get("autouse"):
                        self._fixture(name, instance, made, stack)
                wanted = [name for name in inspect.signature(function).parameters if name not in arguments]
                if inspect.ismethod(function) or instance is None:
                    arguments.update({name: self._fixture(name, instance, made, stack) for name in wanted})
                result = function(**arguments)
                if inspect.iscoroutine(result):
                    import asyncio

                    asyncio.run(result)

        return call

    def _prepare(self, stack: contextlib.ExitStack) -> Any:
        if self._make is None:
            for name in ("setup_function", "setup_module"):
                if name in self._space:
                    _call_loosely(self._space[name])
            return None
        instance = self._make()
        if self._first:
            for name in ("setup_class", "setUpClass"):
                if hasattr(instance, name):
                    getattr(type(instance), name)()
        for name in _TEAR_DOWN:
            if hasattr(instance, name):
                stack.callback(_call_loosely, getattr(instance, name))
        for name in _SET_UP:
            if hasattr(instance, name):
                _call_loosely(getattr(instance, name))
        if hasattr(instance, "doCleanups"):
            stack.callback(instance.doCleanups)
        return instance

    def _all(self, instance: Any) -> dict[str, Any]:
        found = {name: value for name, value in self._space.items() if hasattr(value, "__dict__") and _marked(value)}
        if instance is not None:
            found |= {n: getattr(instance, n) for n in dir(type(instance)) if _marked(getattr(type(instance), n, None))}
        return found

    def _fixture(self, name: str, instance: Any, made: dict[str, Any], stack: contextlib.ExitStack) -> Any:
        if name in made:
            return made[name]
        own = self._all(instance)
        if name in own:
            function = own[name]
            wanted = inspect.signature(function).parameters
            value = function(**{part: self._fixture(part, instance, made, stack) for part in wanted})
            if inspect.isgenerator(value):
                generator = value
                value = next(generator)
                stack.callback(next, generator, None)
        elif name in _BUILT_IN:
            value = stack.enter_context(_BUILT_IN[name]())
        else:
            raise LookupError(f"there is no fixture {name}")
        made[name] = value
        return value


def _marked(value: Any) -> bool:
    return inspect.isfunction(value) and "box_fixture" in vars(value)


def _call_loosely(function: Callable[..., Any]) -> None:
    """pytest hands the test to a set-up function that has a parameter for it."""
    function(*[None for _ in inspect.signature(function).parameters])


@contextlib.contextmanager
def _capsys() -> Any:
    class Capture:
        def readouterr(self) -> Any:
            text = stream.getvalue()
            stream.seek(0)
            stream.truncate()
            return _Captured(text, "")

    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        yield Capture()


@contextlib.contextmanager
def _tmp_path() -> Any:
    yield pathlib.Path(tempfile.mkdtemp())


@contextlib.contextmanager
def _monkeypatch() -> Any:
    from unittest import mock

    class MonkeyPatch:
        def setattr(self, target: Any, name: Any, *value: Any, raising: bool = True) -> None:
            if value:
                stack.enter_context(mock.patch.object(target, name, value[0]))
            else:
                stack.enter_context(mock.patch(target, name))

    with contextlib.ExitStack() as stack:
        yield MonkeyPatch()


_BUILT_IN = {"capsys": _capsys, "tmp_path": _tmp_path, "monkeypatch": _monkeypatch}
