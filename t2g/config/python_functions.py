"""Functions that a Python program hands to a job where a config names one: `pkg.mod:function`, or `__main__:NAME`.

A function of a script or notebook, or one inside another function, has no import path. The config then holds
`__main__:NAME`, which means something in the process of that program alone.
"""

import inspect
from importlib import import_module
from typing import Any

from t2g.errors import UserError

PREFIX = "__main__:"
_functions: dict[str, tuple[Any, str]] = {}  # the running job's functions: __main__:NAME -> the object, its source text


def name_function(function: Any) -> str:
    """Return the value that stands for a function or a class in a config.

    Values from outside its text, as those of a closure or of a method's object, do not count for its identity.

    Raises:
        UserError: It has no import path, and no source text or the name of another one.
    """
    if not hasattr(function, "__qualname__"):  # the text would not show with which arguments it was made
        raise UserError(f"got an object of the type {type(function).__name__}: write a function that calls it")
    path = f"{function.__module__}:{function.__qualname__}"
    if not path.startswith(PREFIX) and getattr(inspect.getmodule(function), function.__qualname__, None) is function:
        return path
    path = PREFIX + function.__name__
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        raise UserError(f"{path} has no source text: define it in a file or in a cell of a notebook") from None
    if _functions.setdefault(path, (function, text))[0] != function:  # each access makes a bound method anew
        raise UserError(f"{path}: two functions of this job have this name; rename one")
    return path


def forget_functions() -> None:
    """Forget the functions of an earlier job: a cell that is run again defines other ones with their names."""
    _functions.clear()


def import_object(path: str) -> Any:
    """Return the object that `pkg.mod:name` or `__main__:NAME` in a config names. May raise any error of its module."""
    if path in _functions:
        return _functions[path][0]
    if path.startswith(PREFIX):
        raise ImportError("it belongs to the Python program that started this run; start that program again")
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def source_text(path: str) -> str | None:
    """Return the source text of a `__main__:NAME`, which identifies it; None for import paths."""
    if path not in _functions:
        return None
    _, text = _functions[path]
    return text
