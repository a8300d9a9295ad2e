"""The module `solution` in the tests' process, when its code runs in another process."""

import ast
import doctest
import inspect
import linecache
import runpy
import sys
import types
from typing import Any

from t2g.sandbox.box.module import FILE, Finder, write_file
from t2g.sandbox.box.remote import forward_dict, is_remote
from t2g.sandbox.box.star import resolve_star

_run_path = runpy.run_path
_run_module = runpy.run_module
_get_source = inspect.getsource
_find_examples = doctest.DocTestFinder.find
_ABSENT = {"__path__", "__wrapped__", "__bases__", "__test__", "__dict__"}  # a module has none of them


class RemoteModule(types.ModuleType):
    """The module as the tests see it. Special names are its own, the others are in the other process."""

    __dict__ = property(forward_dict)  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(name)
        return getattr(self.__loader__.remote, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self.__loader__.remote, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__loader__.remote, name)

    def __dir__(self) -> list[str]:
        return dir(self.__loader__.remote)

    @property
    def __all__(self) -> list[str]:
        """Return what `from solution import *` takes from the solution."""
        return resolve_star(self.__loader__.names, self.__loader__.modules, vars(sys.modules["tests"]))

    @property
    def __file__(self) -> str:  # type: ignore[override]
        """Return the path of the code, and write the file again: the solution could have changed it."""
        write_file(self.__loader__.code)
        return self.__loader__.path

    @__file__.setter
    def __file__(self, path: str) -> None:
        """Ignore the path that the import system sets."""


class RemoteFinder(Finder):
    """Finder and loader of `RemoteModule`."""

    def __init__(self, solution: Any, code: str, modules: frozenset[str]) -> None:
        """Replace the functions of the standard library that would run or read the code in this process.

        Args:
            solution: The `solutions.RemoteSolution`.
            code: Its text.
            modules: See `star.resolve_star`.
        """
        super().__init__()
        self._solution = solution
        self.code = code
        self.modules = modules
        self.remote: Any = None  # the module in the other process
        self.names: dict[str, str] = {}  # see `star.resolve_star`
        lines = code.splitlines(keepends=True)
        for name in (FILE, self.path):
            linecache.cache[name] = (len(code), None, lines, name)
        runpy.run_path = self._run_path
        runpy.run_module = self._run_module
        inspect.getsource = self._read_source
        finder = self

        def find_examples(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            if is_remote(obj) or isinstance(obj, RemoteModule):
                raise finder._solution.refuse("the tests run the examples of the solution's docstrings")
            return _find_examples(self, obj, *args, **kwargs)

        doctest.DocTestFinder.find = find_examples

    def create_module(self, spec: Any) -> types.ModuleType:
        module = RemoteModule(spec.name)
        module.__loader__ = self
        self.remote = None
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Execute the code; in the same module of the other process if this module is loaded again."""
        has_loaded = self.remote is not None
        self.remote, self.names = self._solution.call_root("load", again=has_loaded)

    def get_source(self, name: str) -> str:
        return self.code

    def _run_path(self, path: Any, *args: Any, run_name: str = "<run_path>", **kwargs: Any) -> Any:
        if str(path) in (self.path, FILE):
            return self._solution.call_root("run", run_name)
        return _run_path(path, *args, run_name=run_name, **kwargs)

    def _run_module(self, name: str, *args: Any, run_name: str | None = None, **kwargs: Any) -> Any:
        if name == "solution":
            return self._solution.call_root("run", run_name or name)
        return _run_module(name, *args, run_name=run_name, **kwargs)

    def _read_source(self, obj: Any) -> str:
        """Return the text of a function or class of the solution, by its name."""
        if isinstance(obj, RemoteModule):
            return self.code
        if not is_remote(obj):
            return _get_source(obj)
        node: Any = ast.parse(self.code)
        for name in str(obj.__qualname__).split("."):
            definitions = [child for child in node.body if getattr(child, "name", None) == name]
            if not definitions:
                raise OSError("could not get source code")
            node = definitions[-1]
        first = min([node.lineno, *(part.lineno for part in node.decorator_list)])
        return "".join(self.code.splitlines(keepends=True)[first - 1 : node.end_lineno])
