"""Arrays and scalars of numpy as plain data: the parts that cross between two processes, and how they are joined."""

import base64
from collections.abc import Callable
from typing import Any

try:
    import numpy
except ImportError:  # then neither the solution nor the tests have arrays
    numpy = None  # type: ignore[assignment]

_PLAIN_KINDS = "biufcSUmM"  # kinds of numpy.dtype: no objects, no structures


def is_plain_scalar(value: Any) -> bool:
    """Return whether a value is a scalar of numpy that crosses by value."""
    if numpy is None or not isinstance(value, numpy.generic):
        return False
    return value.dtype.kind in _PLAIN_KINDS and type(value) is value.dtype.type


def _split_scalar(value: Any) -> tuple[Any, ...]:
    return value.dtype.str, _to_text(value)


def _join_scalar(dtype: str, text: str) -> Any:
    return numpy.frombuffer(base64.b64decode(text), _plain_dtype(dtype))[0]


def _split_array(array: Any) -> tuple[Any, ...]:
    """Return type, shape, whether the array is writable, and its bytes or its objects."""
    if array.dtype.hasobject:
        return "O", array.shape, array.flags.writeable, array.ravel().tolist()
    dtype = array.dtype.str if array.dtype.fields is None else array.dtype.descr
    return dtype, array.shape, array.flags.writeable, _to_text(array)


def _join_array(dtype: Any, shape: tuple[int, ...], is_writable: bool, content: Any) -> Any:
    if dtype == "O":
        flat = numpy.empty(len(content), object)
        for position, item in enumerate(content):
            flat[position] = item
        array = flat.reshape(shape)
    else:
        flat = numpy.frombuffer(base64.b64decode(content), _plain_dtype(dtype))
        array = flat.reshape(shape).copy()
    array.flags.writeable = bool(is_writable)
    return array


def replace_array(array: Any, new: Any) -> None:
    """Give an array the content of another one; numpy has no way to change the type of an array in place."""
    if array.shape != new.shape:
        array.resize(new.shape, refcheck=False)
    if array.flags.writeable:
        array[...] = new


def _split_dtype(dtype: Any) -> tuple[Any]:
    if dtype.fields:
        return (dtype.descr,)
    return (dtype.str,)


def _join_dtype(description: Any) -> Any:
    return numpy.dtype(description)


def _plain_dtype(dtype: Any) -> Any:
    """Return a type without objects.

    Raises:
        ValueError: Its values would be addresses.
    """
    resolved = numpy.dtype(dtype)
    if resolved.hasobject:
        raise ValueError("an array of addresses")
    return resolved


def _to_text(value: Any) -> str:
    return base64.b64encode(value.tobytes()).decode("ascii")


PARTS: dict[str, Callable[[Any], Any]] = {
    "numpy.generic": _split_scalar,
    "numpy.ndarray": _split_array,
    "numpy.dtype": _split_dtype,
}
MAKERS: dict[str, Callable[..., Any]] = {
    "numpy.generic": _join_scalar,
    "numpy.ndarray": _join_array,
    "numpy.dtype": _join_dtype,
}


def scalar_type() -> type:
    """Return the base of numpy's scalar types; without numpy, a type that has no subclass."""
    if numpy is None:
        return bool
    return numpy.generic
