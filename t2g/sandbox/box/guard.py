"""Keep the solution's code out of the tests' process: refuse to compile, load or unpickle what it wrote or returned.

Every way for new code to enter a Python process raises an audit event. The hook allows the tests' own texts, modules of
visible packages, code that the standard library generates from names, and expressions without names.
"""

import ast
import collections
import dataclasses
import os
import sys
import timeit
import types
import typing
import unittest.mock
from collections.abc import Callable, Iterable
from typing import Any

from t2g.sandbox.box.facts import TestFacts
from t2g.sandbox.box.remote import Unsupported

_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: unpickled data cannot change such a class
_PLAIN_MODULES = ("builtins", "collections", "datetime", "decimal", "fractions", "numpy", "uuid")
_ARRAY_FUNCTIONS = ("_reconstruct", "scalar", "_frombuffer")  # functions of numpy for arrays in a pickle
_PARSE = ast.parse.__code__  # makes a syntax tree, no code
_INTERPRETER = "pandas.core.computation."  # modules that execute such a tree: DataFrame.eval, query and pandas.eval
_LOCAL_PREFIX = "__pd_eval_local_"  # with which pandas replaces "@"
# They make code from names and fields, which they check; an object of the solution can answer such a check.
_GENERATORS = {
    dataclasses._create_fn.__code__,
    collections.namedtuple.__code__,
    unittest.mock._set_signature.__code__,
}
_GENERATED_CALLS = {"_tuple_new", "_checksig_", "hash", "super", "type", "FrozenInstanceError", "__setattr__"}
_GENERATED_CALLS |= {"__delattr__", "__post_init__", "_HAS_DEFAULT_FACTORY"}
_GENERATED_PREFIXES = ("_dflt_", "_type_", "__dataclass_")
_CONTAINERS = (ast.Tuple, ast.List, ast.Set, ast.Dict)
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
_OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
_LITERALS = (ast.Expression, ast.Constant, ast.expr_context, *_CONTAINERS, *_OPERATIONS, *_OPERATORS)
_TYPE_NODES = (*_LITERALS, ast.Name, ast.Attribute, ast.Subscript, ast.Starred)  # an annotation calls nothing
_Check = Callable[[tuple[Any, ...], types.FrameType], bool]  # takes an event's arguments and its frame


class Guard:
    """The audit hook of one tests' process, which cannot be removed."""

    def __init__(self, facts: TestFacts, visible: Iterable[str], refuse: Callable[[str], Unsupported]) -> None:
        """Prepare a hook for `sys.addaudithook`.

        Args:
            facts: Facts of the tests.
            visible: Files and folders that the solution cannot write to.
            refuse: Makes the error that a refused operation raises.
        """
        self._texts = facts.constants
        self._visible = tuple(os.path.join(path, "") for path in visible)
        self._refuse = refuse
        self._checks: dict[str, _Check] = {
            "compile": self._may_compile,
            "marshal.loads": self._may_load,
            "marshal.load": _refuse_always,
            "code.__new__": _refuse_always,
            "pickle.find_class": _may_unpickle,
            "import": self._may_import,
            "ctypes.dlopen": self._may_open_library,
        }

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        check = self._checks.get(event)
        if check is not None and not check(args, sys._getframe(1)):
            raise self._refuse(f"the tests {event.partition('.')[0]} what may be the solution's code")

    def _is_visible(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        return "/" not in path or os.path.normpath(path).startswith(self._visible)

    def _may_compile(self, args: tuple[Any, ...], frame: types.FrameType) -> bool:
        source, filename = args
        if isinstance(source, bytes):
            source = source.decode(errors="replace")
        if frame.f_code is _PARSE:
            return self._may_parse(source, frame.f_back)
        if frame.f_globals.get("__name__") == "_pytest.outcomes":  # compiled, never run
            return True
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return self._is_visible(filename) and str(filename).startswith("/")
        if not isinstance(source, str):
            return False
        if frame.f_code in _GENERATORS:
            return _is_generated(source)
        if frame.f_code is timeit.Timer.__init__.__code__ and source.startswith("\ndef inner("):
            return True  # its parts were compiled one by one before
        if frame.f_code is typing.ForwardRef.__init__.__code__:
            return _is_expression(source, _TYPE_NODES)
        if frame.f_globals.get("__name__") == "doctest":
            return any(f">>> {source.strip()}" in text for text in self._texts)
        if "coding" in source and source.strip() not in self._texts:
            return False  # a comment could give the bytes another meaning
        is_name = _is_expression(source, _TYPE_NODES)  # such as "expected", which a solution can guess
        if source.strip() in self._texts and not is_name:
            return True
        return _is_expression(source, _LITERALS)

    def _may_parse(self, source: object, caller: types.FrameType | None) -> bool:
        """Allow syntax trees; where pandas executes them, those of the tests' own texts and of literals alone."""
        if caller is None or not str(caller.f_globals.get("__name__")).startswith(_INTERPRETER):
            return True
        if not isinstance(source, str):
            return False
        own_texts = {_squeeze(text) for text in self._texts}
        return _squeeze(source) in own_texts or _is_expression(source, _LITERALS)

    def _may_load(self, args: tuple[Any, ...], frame: types.FrameType) -> bool:
        """Allow the import system to read the compiled modules of visible packages."""
        is_import = frame.f_globals.get("__name__") == "importlib._bootstrap_external"
        return is_import and self._is_visible(frame.f_locals.get("bytecode_path"))

    def _may_import(self, args: tuple[Any, ...], frame: types.FrameType) -> bool:
        file = args[1]  # file of an extension module
        return file is None or self._is_visible(file)

    def _may_open_library(self, args: tuple[Any, ...], frame: types.FrameType) -> bool:
        file = args[0]
        return file is None or self._is_visible(file)


def _squeeze(text: str) -> str:
    """Return an expression without what pandas changes before it parses it: blanks, "and", "or", the mark of locals."""
    words = text.replace(_LOCAL_PREFIX, "@").replace("&", " and ").replace("|", " or ")
    return "".join(words.split())


def _refuse_always(args: tuple[Any, ...], frame: types.FrameType) -> bool:
    return False


def _may_unpickle(args: tuple[Any, ...], frame: types.FrameType) -> bool:
    """Allow types of plain data that no pickle can change."""
    module, name = args
    if module.partition(".")[0] == "numpy" and name in _ARRAY_FUNCTIONS:
        return True
    if module not in _PLAIN_MODULES:
        return False
    kind = getattr(sys.modules.get(module), name, None)
    if not isinstance(kind, type) or issubclass(kind, type):
        return False
    return bool(kind.__flags__ & _IMMUTABLE)


def _is_expression(source: str, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Return whether a text is an expression of these kinds of nodes."""
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, kinds) for node in ast.walk(tree))


def _is_generated(source: str) -> bool:
    """Return whether code calls nothing but what the generators of the standard library call, and itself."""
    nodes = list(ast.walk(ast.parse(source)))
    defined_names = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                if name not in _GENERATED_CALLS | defined_names and not name.startswith(_GENERATED_PREFIXES):
                    return False
            case ast.Call() | ast.Import() | ast.ImportFrom():
                return False
    return True
