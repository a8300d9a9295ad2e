"""Proxies for objects that stay in the other process."""

import builtins
import contextlib
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

_SPECIAL = (
    "lt le gt ge len getitem setitem delitem contains iter next reversed enter exit call int float index complex abs "
    "neg pos invert bool round trunc floor ceil format bytes length_hint instancecheck subclasscheck "
    "aiter anext aenter aexit"
)
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
FORWARDED = [f"__{name}__" for name in _SPECIAL.split()]
FORWARDED += [f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r", "i")]
_ORDER = {"__lt__", "__le__", "__gt__", "__ge__"}
_NUMBERS = "int float index complex abs neg pos invert bool round trunc floor ceil"
_NUMERIC = {f"__{name}__" for name in _NUMBERS.split()}
# functools.wraps reads them from a function of the tests.
_WRAPPED = {"__annotations__", "__dict__", "__type_params__"}
# pytest reads them from each name that the tests import; a function without attributes of its own has none of them.
_PROBED = {"_mock_name", "__bases__", "__test__", "__wrapped__"}
_CONTENT = {"__bool__", "__len__", "__contains__", "__getitem__"}
_MUTABLE = (list, dict, set, bytearray)
_OPERATORS: dict[str, Callable[..., Any]] = {}  # special method -> the same as a function of (object, other)
for _name in _BINARY.split():
    _operator = getattr(builtins, _name, None) or getattr(operator, f"__{_name}__")
    _OPERATORS |= {f"__{_name}__": _operator, f"__i{_name}__": _operator}
    _OPERATORS[f"__r{_name}__"] = lambda this, other, *rest, op=_operator: op(other, this, *rest)
_OPERATORS |= {name: getattr(operator, name) for name in _ORDER}
_IN_PLACE = {f"__i{name}__" for name in _BINARY.split()}
# Methods by which arrays, frames and sets compare themselves with others. An object in their place decides nothing.
_COMPARING = {"equals", "identical", "allclose", "isclose", "array_equal", "issubset", "issuperset", "isdisjoint"}
_INSPECTION = {"__eq__", "__hash__", "__repr__", "__str__", "__dir__", "__iter__", "__format__"}
NON_MUTATING = (_NUMERIC | _CONTENT | _OPERATORS.keys() | _INSPECTION) - _IN_PLACE  # change neither object nor argument


class Gone(BaseException):
    """The other process ended. Not an `Exception`: no test can take it for the error that it expects."""


class Unsupported(BaseException):
    """The operation is impossible on an object of another process."""


_UNDECIDED = "what an object of the solution's own class makes of plain data of the tests decides nothing here"


def forward_dict(proxy: object) -> Any:
    """Let `__getattr__` handle `x.__dict__`: the attributes of a proxy are those of its object."""
    raise AttributeError("__dict__")


class Remote:
    """Proxy for an object of the other process.

    Compared with plain data, the object has the value of its plain base type: a named tuple equals a tuple. An object
    without such a type never equals plain data, whatever its `__eq__` returns. `_check_answer` applies the same rule to
    the other operators.

    `_plain` is the value at the first transfer of the object. The other process cannot choose it after it has seen the
    operand. Only the content of a container is requested again, after code ran that may have changed it.

    `_is_tainted` marks the result of an operator between an object of the other process and plain data, and all that is
    obtained from such a result. `check_tainted` refuses plain data from there: `abs(f(2) - 4.5) < 1e-6` would hold for
    an object whose difference to every number is 0.
    """

    __dict__ = property(forward_dict)
    _is_tainted = False
    _attribute = ""  # name by which the tests got a method

    def __init__(
        self, peer: Any, number: int, plain: Any = None, claimed: type | None = None, *, is_bare: bool = False
    ) -> None:
        self._store(_peer=peer, _number=number, _plain=plain, _plain_version=peer.num_changes, _claimed=claimed)
        self._store(_is_bare=is_bare, _fields={}, _fields_epoch=-1)

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def keep_fields(self, fields: dict[str, Any]) -> None:
        """Keep attributes that came with the object, until code of the other process may run again."""
        self._store(_fields=fields, _fields_epoch=self._peer.epoch)

    def _current_plain(self) -> Any:
        """Return the current plain value of the object; None if it has no plain type."""
        if isinstance(self._plain, _MUTABLE) and self._plain_version != self._peer.num_changes:
            plain = self._peer.request("plain", self)
            if type(plain) is type(self._plain):
                self._store(_plain=plain, _plain_version=self._peer.num_changes)
        return self._plain

    @property
    def __class__(self) -> type:
        if self._plain is not None:
            return type(self._plain)
        return self._claimed or type(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # numpy would read memory at an address from the object
            raise AttributeError(name)
        if name in self._fields and self._fields_epoch == self._peer.epoch and not self._is_tainted:
            return self._fields[name]
        if name == "send" and self._claimed is types.CoroutineType and not self._peer.is_solution:
            raise self._peer.refuse("the tests run a coroutine of the solution")
        if self._is_bare and name in _PROBED:
            raise AttributeError(name)
        if name in _WRAPPED and (self._peer.is_solution or self._claimed is types.ModuleType):
            raise AttributeError(name)
        answer = self._peer.request("get", self, name)
        if name in _COMPARING and is_remote(answer) and self._claimed is not types.ModuleType:
            answer._store(_attribute=name)
        return answer

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delete", self, name)

    def __eq__(self, other: object) -> Any:
        if is_remote(other):
            return self._peer.request("method", self, "__eq__", other)
        if self._is_tainted:
            raise self._peer.refuse(_UNDECIDED)
        if self._plain is None:
            return NotImplemented
        return self._current_plain() == other

    def __bool__(self) -> bool:
        if self._is_tainted:
            raise self._peer.refuse(_UNDECIDED)
        if not hasattr(type(self), "__len__"):
            return True
        return len(self) > 0  # type: ignore[arg-type]

    def __copy__(self) -> Any:
        return self._peer.call_root("call", "copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return self._peer.call_root("call", "deepcopy", self)

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        raise self._peer.refuse("a class of the tests derives from a class of the other process")

    def __reduce_ex__(self, protocol: object) -> str:
        raise self._peer.refuse("the tests pickle an object of the solution")


for _name in ("__hash__", "__repr__", "__str__", "__dir__"):
    setattr(Remote, _name, lambda self, name=_name: self._peer.request("method", self, name))


def call_type(function: Any, value: Any) -> Any:
    """Replace `type(value)` in the tests: return the solution's class for an object of such a class.

    Args:
        function: The object that the tests call `type`.
    """
    if function is type and is_remote(value):
        remote_class = value._peer.request("get", value, "__class__")
        if is_remote(remote_class):
            return remote_class
    return function(value)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, /, *args: Any, **kwargs: Any) -> Any:
        plain = self._current_plain() if name in _OPERATORS else self._plain
        has_plain_operands = not self._is_tainted and not any(map(is_remote, args))
        if has_plain_operands and name in _OPERATORS and isinstance(plain, _MUTABLE) and name not in _IN_PLACE:
            return _OPERATORS[name](plain, *args)
        answer = self._peer.request("method", self, name, *args, **kwargs)
        return _check_answer(self, plain, name, args, answer)

    return method


def _leave_context(name: str) -> Callable[..., Any]:
    def method(self: Remote, /, kind: Any, error: Any, traceback: object) -> Any:
        """Call `__exit__` or `__aexit__`, without the traceback, which stays in its process."""
        answer = self._peer.request("method", self, name, kind, error, None)
        if self._peer.is_own_error(error):
            return False
        return answer

    return method


def _call(self: Remote, /, *args: Any, **kwargs: Any) -> Any:
    if self._attribute and args and not any(map(is_remote, args)):
        raise self._peer.refuse(_UNDECIDED)
    answer = self._peer.request("call", self, *args, **kwargs)
    # ExitStack calls functions as it calls `__exit__`.
    is_exit = sys._getframe(1).f_globals is vars(contextlib)
    if is_exit and any(map(self._peer.is_own_error, args)):
        return False
    return answer


def check_tainted(answer: Any, operation: str, args: tuple[Any, ...], refuse: Callable[[str], Unsupported]) -> None:
    """Taint the answer to a request that had a tainted object.

    The other process decides in any case whether two of its objects are equal.

    Raises:
        Unsupported: The answer is plain data.
    """
    if is_remote(answer):
        answer._store(_is_tainted=True)
        return
    is_equality = operation == "method" and args[0] == "__eq__" and all(map(is_remote, args[1:]))
    if not is_equality and answer is not NotImplemented and operation not in ("set", "delete"):
        raise refuse(_UNDECIDED)


def _check_answer(proxy: Remote, plain: Any, name: str, args: tuple[Any, ...], answer: Any) -> Any:
    """Return the result of an operator, given the answer of the other process.

    The other process decides an operator between two of its objects. Between its object and plain data, the plain value
    of the proxy gives the result if there is one, unless the answer is another object. Without a plain value the answer
    decides nothing, and an object among the answers is tainted.

    Args:
        plain: Plain value of the proxy, before the other process saw `args`.

    Raises:
        Unsupported: The answer of an operator between an object without a plain value and plain data is plain data.
    """
    if proxy._is_tainted or name not in _NUMERIC | _CONTENT | _OPERATORS.keys():
        return answer
    has_remotes = any(map(is_remote, args))
    is_same = False  # the answer is another object with the plain result
    if plain is not None and not has_remotes:
        needs_object = isinstance(plain, _MUTABLE) and name in _CONTENT  # the current content is in the other process
        apply = _OPERATORS.get(name) or getattr(type(plain), name, None)
        if apply is not None and (name in _ORDER or not (is_remote(answer) or needs_object)):
            return apply(plain, *args)
        with contextlib.suppress(TypeError):
            if name in _OPERATORS and answer._plain is not None:
                is_same = answer._current_plain() == apply(plain, *args)
    if answer is NotImplemented or name not in _OPERATORS or is_same or all(map(is_remote, args)):
        return answer
    if name == "__iadd__" and answer is proxy:  # a change, as by a method
        return answer
    if not is_remote(answer):
        raise proxy._peer.refuse(_UNDECIDED)
    answer._store(_is_tainted=True)
    return answer


def as_plain(value: Any) -> Any:
    """Return the plain data of a value.

    Raises:
        TypeError: The value is an object without a plain type.
    """
    if not is_remote(value):
        return value
    if value._is_tainted:
        raise value._peer.refuse(_UNDECIDED)
    if value._plain is None:
        raise TypeError("an object of the solution's own class is no plain data")
    return value._current_plain()


_METHODS = {name: _forward(name) for name in FORWARDED}
_METHODS |= {"__call__": _call, "__exit__": _leave_context("__exit__"), "__aexit__": _leave_context("__aexit__")}
_METHODS["__dataclass_fields__"] = property(lambda self: self._peer.request("get", self, "__dataclass_fields__"))


def _iterate_by_index(proxy: Any) -> Iterator[Any]:
    """Iterate by index, as Python does over a class without `__iter__`, but refuse an early IndexError.

    Otherwise a test's `all(zip(f(x), expected))` would hold for an object that raises IndexError at once.
    """
    length = 1
    if hasattr(type(proxy), "__len__"):
        length = len(proxy)
    for index in itertools.count():
        try:
            item = proxy[index]
        except IndexError:
            if index < length:
                raise RuntimeError(f"the solution raised IndexError for index {index}") from None
            return
        yield item


@functools.cache
def proxy_class(name: str, methods: tuple[str, ...], *, is_guarded: bool) -> type[Remote]:
    """Return a class of proxies that has the special methods of the class in the other process.

    Args:
        is_guarded: The class is the solution's.
    """
    body = {method: _METHODS[method] for method in methods}
    if is_guarded and "__getitem__" in body:
        body.setdefault("__iter__", _iterate_by_index)
    if name == "coroutine" and is_guarded:
        body["__await__"] = lambda self: self.send(None)
    if "__call__" in body:
        body["__signature__"] = property(lambda self: self._peer.signature(self))
    body["__doc__"] = property(lambda self: self._peer.request("get", self, "__doc__"))
    return type(name, (Remote,), body)


def is_remote(value: object) -> bool:
    return issubclass(type(value), Remote)
