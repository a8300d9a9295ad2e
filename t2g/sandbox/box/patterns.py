"""Class patterns of the tests, `case P(x=1)`, with classes of the solution, which are proxies and no types here."""

import ast
import builtins
import sys
from typing import Any

from t2g.sandbox.box.remote import is_remote

_NAME = "box_classes"


class _Names:
    """Looks up the names of a pattern, and gives a type for a class of the solution."""

    def __init__(self, *namespaces: Any) -> None:
        self._namespaces = namespaces

    def __getattr__(self, name: str) -> Any:
        if self._namespaces:
            return _for_pattern(getattr(self._namespaces[0], name))
        frame = sys._getframe(1)
        for names in (frame.f_locals, frame.f_globals, vars(builtins)):
            if name in names:
                return _for_pattern(names[name])
        raise NameError(f"name '{name}' is not defined")


class _PatternType(type):
    """Type of the classes that stand for a class of the solution."""

    remote: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.remote)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.remote, name)


def _for_pattern(value: Any) -> Any:
    if not is_remote(value) and isinstance(value, type):
        return value
    if is_remote(value) and hasattr(type(value), "__instancecheck__"):
        return _PatternType(type(value).__name__, (), {"remote": value})
    return _Names(value)


def replace_classes(tree: ast.Module) -> None:
    """Let each class pattern of the tests look up its class through `_Names`."""
    vars(builtins)[_NAME] = _Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.MatchClass):
            first: Any = node.cls
            while isinstance(first, ast.Attribute) and not isinstance(first.value, ast.Name):
                first = first.value
            root = ast.Name(_NAME, ast.Load())
            if isinstance(first, ast.Name):
                node.cls = ast.Attribute(root, first.id, ast.Load())
            else:
                first.value = ast.Attribute(root, first.value.id, ast.Load())
