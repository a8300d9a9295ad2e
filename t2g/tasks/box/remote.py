"""Proxies for objects that stay in the other process."""

from collections.abc import Callable
from typing import Any, Protocol


class Asker(Protocol):
    """One end of the connection, t2g.tasks.box.peer."""

    def request(self, operation: str, target: Any, *args: Any, **kwargs: Any) -> Any: ...


_UNARY = (
    "lt le gt ge len getitem setitem delitem contains iter next reversed enter exit call int float index complex abs "
    "neg pos invert bool round trunc floor ceil format bytes length_hint instancecheck subclasscheck"
)
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
FORWARDED = [f"__{name}__" for name in _UNARY.split()]
FORWARDED += [f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r", "i")]


class Gone(BaseException):
    """The other process ended. No `Exception`, so that a test does not take it for what it expects."""


class Unsupported(BaseException):
    """A test asks for something that cannot be done with an object of another process."""


class Remote:
    """Stands for an object of the other process. Compared with plain data it is what its plain base type says it is
    (a named tuple is a tuple); an object of no such type never equals plain data, whatever its `__eq__` says.
    """

    def __init__(self, peer: Asker, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number, _plain=None)

    @property
    def __class__(self) -> type:
        return type(self) if self._plain is None else type(self._plain)

    def __getattr__(self, name: str) -> Any:
        return self._peer.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._peer.request("delete", self, name)

    def __eq__(self, other: object) -> Any:
        if is_remote(other):
            return self._peer.request("method", self, "__eq__", other)
        return NotImplemented if self._plain is None else self._plain == other

    def __ne__(self, other: object) -> Any:
        same = self.__eq__(other)
        return same if same is NotImplemented else not same

    def __hash__(self) -> int:
        return self._peer.request("method", self, "__hash__")

    def __repr__(self) -> str:
        return self._peer.request("method", self, "__repr__")

    def __str__(self) -> str:
        return self._peer.request("method", self, "__str__")

    def __dir__(self) -> list[str]:
        return self._peer.request("method", self, "__dir__")

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        raise Unsupported("a class of the tests derives from a class of the solution")

    def __reduce_ex__(self, protocol: object) -> str:
        raise Unsupported("the tests copy or pickle an object of the solution")


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        if name == "__exit__":
            args = (args[0], args[1], None)  # tracebacks stay at home
        return self._peer.request("method", self, name, *args, **kwargs)

    return method


_METHODS = {name: _forward(name) for name in FORWARDED}


def proxy_class(name: str, methods: tuple[str, ...]) -> type[Remote]:
    """A class of proxies with the special methods of the class there, so that the same things can be done with it."""
    body: dict[str, Any] = {method: _METHODS[method] for method in methods}
    return type(name, (Remote,), body | {"__doc__": property(lambda self: self._peer.request("get", self, "__doc__"))})


def is_remote(value: object) -> bool:
    return issubclass(type(value), Remote)


class Numbered(Remote):
    """Names an object of the other end by its number, nothing more."""

    def __init__(self, number: int) -> None:
        self.__dict__.update(_number=number, _plain=None)
