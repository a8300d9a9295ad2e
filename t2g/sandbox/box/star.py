"""What `from solution import *` supplies: names of the solution, but nothing that the tests mean otherwise.

Tests that use `np` or `math` without an import of their own expect numpy and the standard library. They get these, not
what a solution calls by that name.
"""

import builtins
import importlib
import sys
from typing import Any
from unittest import mock

_HOOKS = {"setUpModule", "tearDownModule", "setup_function", "setup_module", "teardown_function", "teardown_module"}
_ALIASES = {"np": "numpy", "pd": "pandas", "numpy": "numpy", "pandas": "pandas"}
# Comparing, copying and replacing: a test that uses them means the real ones.
_HELPERS = {"isclose", "allclose", "array_equal", "array_equiv", "approx", "raises", "deepcopy", "pytest", "unittest"}
_HELPERS |= {*mock.__all__, "TestCase", "IsolatedAsyncioTestCase"} - {"call", "seal"}
_CATCH_ALL = ("builtins:AssertionError", "builtins:Exception", "builtins:BaseException")
_PREFIXES = ("pytest", "assert_")
# Their functions and classes are supplied from the tests' process.
_LIBRARY = {
    "abc", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing",
}  # fmt: skip


def resolve_star(names: dict[str, str], modules: frozenset[str], namespace: dict[str, Any]) -> list[str]:
    """Return the names that come from the solution, and add what comes from the library to `namespace`.

    Args:
        names: Public names of the solution, with `worker._describe` of each: a claim of the solution.
        modules: Names that the tests use as modules; see `facts.TestFacts`.
        namespace: Global names of the tests.
    """
    supplied = []
    for name, description in names.items():
        if name in namespace or hasattr(builtins, name) or name in _HOOKS or name.startswith(_PREFIXES):
            continue
        library_object = _find_in_library(name, description)
        if library_object is not None:
            namespace[name] = library_object
        elif name not in _HELPERS and description not in _CATCH_ALL and not _means_module(name, modules):
            supplied.append(name)
    return supplied


def _means_module(name: str, modules: frozenset[str]) -> bool:
    return bool(_find_module_name(name)) and name in modules


def _find_module_name(name: str) -> str:
    if name in sys.stdlib_module_names:
        return name
    return _ALIASES.get(name, "")


def _find_in_library(name: str, description: str) -> Any:
    """Return the module, function or class of the library that the solution imported by this name; None for others."""
    module, _, attribute = description.partition(":")
    if not attribute:
        if not module or module != _find_module_name(name):
            return None
        return importlib.import_module(module)
    if module.partition(".")[0] not in _LIBRARY or attribute != name:
        return None
    return getattr(importlib.import_module(module), attribute, None)
