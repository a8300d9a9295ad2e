"""Proxies for objects that stay in the other process."""

import builtins
import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

_UNARY = (
    "lt le gt ge len getitem setitem delitem contains iter next reversed enter exit call int float index complex abs "
    "neg pos invert bool round trunc floor ceil format bytes length_hint instancecheck subclasscheck "
    "aiter anext aenter aexit"
)
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
FORWARDED = [f"__{name}__" for name in _UNARY.split()]
FORWARDED += [f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r", "i")]
_ORDER = {"__lt__", "__le__", "__gt__", "__ge__"}
_NUMBERS = "int float index complex abs neg pos invert bool round trunc floor ceil"
_NUMERIC = {f"__{name}__" for name in _NUMBERS.split()}
# functools.wraps copies them from a function of the tests.
_WRAPPED = {"__annotations__", "__dict__", "__type_params__"}
_CONTENT = {"__bool__", "__len__", "__contains__", "__getitem__"}
_CHANGING = (list, dict, set, bytearray)
_OPERATORS: dict[str, Callable[..., Any]] = {}  # by special method: what it does to (object, other)
for _name in _BINARY.split():
    _operator = getattr(builtins, _name, None) or getattr(operator, f"__{_name}__")
    _OPERATORS |= {f"__{_name}__": _operator, f"__i{_name}__": _operator}
    _OPERATORS[f"__r{_name}__"] = lambda a, b, *c, op=_operator: op(b, a, *c)
_OPERATORS |= {name: getattr(operator, name) for name in _ORDER}
_IN_PLACE = {f"__i{name}__" for name in _BINARY.split()}
_SHOWN = {"__eq__", "__hash__", "__repr__", "__str__", "__dir__", "__iter__", "__format__"}
QUIET = (_NUMERIC | _CONTENT | _OPERATORS.keys() | _SHOWN) - _IN_PLACE  # these change neither object nor argument


class Gone(BaseException):
    """The other process ended. No `Exception`, so that a test does not take it for what it expects."""


class Unsupported(BaseException):
    """A test asks for something that cannot be done with an object of another process."""


_TAKES_NO_ANSWER = "an operator between an object of the solution's own class and plain data decides nothing here"


def no_dict(proxy: object) -> Any:
    """Pass `x.__dict__` on to `__getattr__`: the attributes of a proxy are those of its object."""
    raise AttributeError("__dict__")


class Remote:
    """Stands for an object of the other process. Compared with plain data it is what its plain base type says it is
    (a named tuple is a tuple); an object of no such type never equals plain data, whatever its `__eq__` says. `_settle`
    does the same for the other operators.

    `_plain` is the value at the first transfer of the object: the other end must not choose it after it saw what it is
    compared with. Only the content of a container is requested again, after code ran that may have changed it.
    """

    __dict__ = property(no_dict)
    _mixed = False  # made by an operator from an object of the other process and plain data

    def __init__(self, peer: Any, number: int, plain: Any = None) -> None:
        self._store(_peer=peer, _number=number, _plain=plain, _as_of=peer.num_changes)

    def _store(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _now(self) -> Any:
        """The plain data that it is now; None: it is none."""
        if isinstance(self._plain, _CHANGING) and self._as_of != self._peer.num_changes:
            plain = self._peer.request("plain", self)
            if type(plain) is type(self._plain):
                self._store(_plain=plain, _as_of=self._peer.num_changes)
        return self._plain

    @property
    def __class__(self) -> type:
        return type(self) if self._plain is None else type(self._plain)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array"):  # numpy would read memory at an address that the object names
            raise AttributeError(name)
        if self._peer.is_solution and name in _WRAPPED:
            raise AttributeError(name)
        return self._peer.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delete", self, name)

    def __eq__(self, other: object) -> Any:
        if is_remote(other):
            return self._peer.request("method", self, "__eq__", other)
        if self._plain is None:
            return NotImplemented
        if self._mixed:
            raise Unsupported(_TAKES_NO_ANSWER)
        return self._now() == other

    def __bool__(self) -> bool:
        if self._mixed:
            raise Unsupported(_TAKES_NO_ANSWER)
        return len(self) > 0 if hasattr(type(self), "__len__") else True  # type: ignore[arg-type]

    def __copy__(self) -> Any:
        return self._peer.root("copy", self)

    def __deepcopy__(self, memo: object) -> Any:
        return self._peer.root("deepcopy", self)

    def __reduce_ex__(self, protocol: object) -> str:
        raise Unsupported("the tests pickle an object of the solution")


for _name in ("__hash__", "__repr__", "__str__", "__dir__"):
    setattr(Remote, _name, lambda self, name=_name: self._peer.request("method", self, name))


def type_of(cls: Any, value: Any) -> Any:
    """What the tests' `type(value)` is: of an object of the solution's own class that class."""
    if cls is type and is_remote(value):
        found = value._peer.request("get", value, "__class__")
        if is_remote(found):
            return found
    return cls(value)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        if name in ("__exit__", "__aexit__"):
            args = (args[0], args[1], None)  # tracebacks stay at home
        plain = self._now() if name in _OPERATORS else self._plain
        alone = not self._mixed and not any(map(is_remote, args))
        if alone and name in _OPERATORS and isinstance(plain, _CHANGING) and name not in _IN_PLACE:
            return _OPERATORS[name](plain, *args)
        answer = self._peer.request("method", self, name, *args, **kwargs)
        return _settle(self, plain, name, args, answer)

    return method


def _settle(proxy: Remote, plain: Any, name: str, args: tuple[Any, ...], answer: Any) -> Any:
    """What an operator gives. With plain data, what the plain value under the proxy gives, where there is one, unless
    the answer is another object. No other answer decides anything: `abs(f(2) - 4.5) < 1e-6` would hold for an object
    whose difference to everything is 0. So such a difference is `_mixed`, and so is what is made of it, and a plain
    value of it is Unsupported. An operator between two objects of the other process is theirs to answer.

    plain: of the proxy, before the other end saw `args`.
    """
    if name not in _NUMERIC | _CONTENT | _OPERATORS.keys():
        return answer
    remotes = [value for value in args if is_remote(value)]
    mixed = proxy._mixed or any(value._mixed for value in remotes)
    is_same = False  # the answer is another object that has the plain value
    if plain is not None and not remotes and not mixed:
        asks = isinstance(plain, _CHANGING) and name in _CONTENT  # what it holds, only the other end knows
        own = _OPERATORS.get(name) or getattr(type(plain), name, None)
        if own is not None and (name in _ORDER or not (is_remote(answer) or asks)):
            return own(plain, *args)
        with contextlib.suppress(TypeError):
            is_same = name in _OPERATORS and answer._plain is not None and answer._now() == own(plain, *args)
    mixed |= name in _OPERATORS and len(remotes) < len(args) and not is_same
    if answer is NotImplemented:
        return answer
    if name in _ORDER and len(remotes) < len(args):
        raise Unsupported(_TAKES_NO_ANSWER)
    if mixed and name in _NUMERIC | (_OPERATORS.keys() - _ORDER):
        if not is_remote(answer):
            raise Unsupported(_TAKES_NO_ANSWER)
        answer._store(_mixed=True)
    return answer


def as_plain(value: Any) -> Any:
    """The plain data that a value is. Raises TypeError for an object of no plain type."""
    if is_remote(value) and (value._plain is None or value._mixed):
        raise TypeError("an object of the solution's own class is no plain data")
    return value._now() if is_remote(value) else value


_METHODS = {name: _forward(name) for name in FORWARDED}
_METHODS["__call__"] = lambda self, *args, **kwargs: self._peer.request("call", self, *args, **kwargs)
_METHODS["__dataclass_fields__"] = property(lambda self: self._peer.request("get", self, "__dataclass_fields__"))


def _iterate_by_index(proxy: Any) -> Iterator[Any]:
    """Iterate as Python does where a class has no `__iter__`, but let IndexError end nothing that is not at its end.

    Else a test's `all(zip(f(x), expected))` would hold for an object that raises it at once.
    """
    length = len(proxy) if hasattr(type(proxy), "__len__") else 1
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
    """Make a class of proxies with the special methods of the class there, so that the same can be done with it.

    is_guarded: whether the class is the solution's.
    """
    body: dict[str, Any] = {method: _METHODS[method] for method in methods}
    if is_guarded and "__getitem__" in body:
        body.setdefault("__iter__", _iterate_by_index)
    if "__call__" in body:
        body["__signature__"] = property(lambda self: self._peer.signature(self))
    body["__doc__"] = property(lambda self: self._peer.request("get", self, "__doc__"))
    return type(name, (Remote,), body)


def is_remote(value: object) -> bool:
    return issubclass(type(value), Remote)
