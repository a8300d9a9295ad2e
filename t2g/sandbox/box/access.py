"""What the solution may do with objects that the tests handed to it: use them, but neither inspect nor rewrite them."""

import inspect
import sys
import types
from typing import Any
from unittest.mock import Base

from t2g.sandbox.box.remote import FORWARDED, is_remote

_NAMES = ("__name__", "__qualname__", "__doc__")
_METHODS = {*FORWARDED, "__eq__", "__hash__", "__repr__", "__str__"}
# Their attributes lead to the tests' frames, modules or machinery.
_OPAQUE_TYPES = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)
_OPAQUE_MODULES = {
    "bdb", "code", "codeop", "ctypes", "doctest", "gc", "importlib", "inspect", "multiprocessing", "pdb", "pickle",
    "pkgutil", "runpy", "subprocess", "sys", "trace", "traceback", "unittest", "weakref",
}  # fmt: skip
_LIBRARIES = ("tests", "numpy", "pandas")
_WRITABLE_MODULES = ("tests", "_io", "io")  # a solution may change instances of their classes


def is_allowed(operation: str, target: Any, name: str, value: Any) -> bool:
    """Return whether the solution may perform an operation on an object of the tests.

    Args:
        operation: See `peer.Peer.request`.
        target: The object, which the solution received.
        name: Name of the attribute or method; "" if the operation has none.
        value: Last argument of the operation: the new value of an attribute.
    """
    if operation in ("call", "signature"):
        return callable(target)
    if operation == "method":
        return name in _METHODS
    if operation == "get":
        return _is_readable(target, name)
    return operation in ("set", "delete") and _is_writable(target, name, value)


def _is_readable(target: Any, name: str) -> bool:
    if not isinstance(target, Base) and not hasattr(target, name):
        return True  # an AttributeError
    is_named = inspect.isclass(target) or inspect.isroutine(target)
    if name.startswith("_"):
        return is_named and name in _NAMES
    if isinstance(target, Base):  # a mock: child mocks only, no recorded calls and no assertions
        return name not in dir(type(target))
    if isinstance(target, _OPAQUE_TYPES):
        return False
    if inspect.isclass(target):
        return target.__module__ == "tests"
    module = type(target).__module__
    if module == "builtins":
        return isinstance(target, BaseException) or callable(getattr(target, name, len))
    root = module.partition(".")[0]
    return root in _LIBRARIES or (root in sys.stdlib_module_names and root not in _OPAQUE_MODULES)


def _is_writable(target: Any, name: str, value: Any) -> bool:
    """Return whether the attribute is data: no method, and no function that the tests stored there."""
    if name.startswith("_") or callable(getattr(type(target), name, None)):
        return False
    if isinstance(target, Base):
        return name not in dir(type(target)) and not is_remote(value)
    current = None
    if hasattr(target, "__dict__"):
        current = vars(target).get(name)
    if callable(current) and not is_remote(current):
        return False
    return type(target).__module__ in _WRITABLE_MODULES
