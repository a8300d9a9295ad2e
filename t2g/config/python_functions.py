"""Functions that a Python program hands to a job where a config names one: `pkg.mod:function`, or `__main__:NAME`.

A function of a script or notebook, or one inside another function, has no import path. The config then holds
`__main__:NAME`, which means something in the process of that program alone.
"""

import inspect
from functools import partial
from importlib import import_module
from typing import Any

from t2g.errors import UserError

PREFIX = "__main__:"
_functions: dict[str, tuple[Any, str]] = {}  # of the job that runs: __main__:NAME -> the object, its source text


def name_function(function: Any) -> str:
    """Return the value that stands for a function, a class or a callable object in a config.

    Values from outside its text, as those of a closure, do not count for its identity.

    Raises:
        UserError: It has no import path, and no source text or the name of another one.
    """
    inner = function.func if isinstance(function, partial) else function
    defined = inner if hasattr(inner, "__qualname__") else type(inner)  # of a callable object its class has the text
    path = f"{defined.__module__}:{defined.__qualname__}"
    if not path.startswith(PREFIX) and getattr(inspect.getmodule(defined), defined.__qualname__, None) is function:
        return path
    path = PREFIX + defined.__name__
    try:
        text = inspect.getsource(defined)
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
    return _functions[path][1] if path in _functions else None
