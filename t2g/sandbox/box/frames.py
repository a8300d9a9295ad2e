"""Frames, series and indexes of pandas as plain data. pandas is imported by the first message that holds one."""

import importlib
from collections.abc import Callable
from typing import Any


def _pandas() -> Any:
    return importlib.import_module("pandas")


def _split_values(values: Any) -> tuple[Any, ...]:
    """Return the name of an extension type and the content, of an array of pandas or numpy."""
    import numpy

    if isinstance(values, numpy.ndarray):
        return "", values
    if hasattr(values, "categories"):
        return "category", (values.codes, values.categories, bool(values.ordered))
    if hasattr(values, "asi8"):
        return str(values.dtype), values.asi8
    return str(values.dtype), values.astype(object).tolist()


def _join_values(kind: str, content: Any) -> Any:
    pandas = _pandas()
    if kind == "":
        return content
    if kind == "category":
        codes, categories, is_ordered = content
        return pandas.Categorical.from_codes(codes, categories, ordered=is_ordered)
    unit = kind.partition("[")[2].partition(",")[0].rstrip("]")
    if kind.startswith("timedelta64"):
        return pandas.TimedeltaIndex(content.view(f"m8[{unit}]")).array
    if not kind.startswith("datetime64"):
        return pandas.array(content, dtype=kind)
    index = pandas.DatetimeIndex(content.view(f"M8[{unit}]"))
    zone = kind.partition(", ")[2].rstrip("]")
    if zone:
        index = index.tz_localize("UTC").tz_convert(zone)
    return index.array


def _split_column(values: Any) -> tuple[Any, ...]:
    """Return what `_split_values` returns, for the array of an index or a series."""
    if type(values).__name__ == "NumpyExtensionArray":
        values = values.to_numpy()
    return _split_values(values)


def _split_index(index: Any) -> tuple[Any, ...]:
    return (*_split_column(index.array), index.name)


def _join_index(kind: str, content: Any, name: Any) -> Any:
    return _pandas().Index(_join_values(kind, content), name=name)


def _split_dates(index: Any) -> tuple[Any, ...]:
    return (*_split_index(index), index.freqstr)


def _join_dates(kind: str, content: Any, name: Any, frequency: str | None) -> Any:
    return _pandas().DatetimeIndex(_join_values(kind, content), name=name, freq=frequency)


def _split_series(series: Any) -> tuple[Any, ...]:
    return (*_split_column(series.array), series.index, series.name)


def _join_series(kind: str, content: Any, index: Any, name: Any) -> Any:
    return _pandas().Series(_join_values(kind, content), index=index, name=name)


def _split_frame(frame: Any) -> tuple[Any, ...]:
    positions = range(frame.shape[1])
    content = [_split_column(frame.iloc[:, position].array) for position in positions]
    return frame.index, frame.columns, content


def _join_frame(index: Any, columns: Any, content: list[Any]) -> Any:
    values = {position: _join_values(*parts) for position, parts in enumerate(content)}
    frame = _pandas().DataFrame(values, index=index)
    frame.columns = columns
    return frame


def replace_frame(frame: Any, new: Any) -> None:
    """Give a frame or series the content of another one."""
    frame._update_inplace(new)


def _split_range(index: Any) -> tuple[Any, ...]:
    return index.start, index.stop, index.step, index.name


def _join_range(start: int, stop: int, step: int, name: Any) -> Any:
    return _pandas().RangeIndex(start, stop, step, name=name)


def _split_levels(index: Any) -> tuple[Any, ...]:
    return index.tolist(), list(index.names)


def _join_levels(tuples: list[Any], names: list[Any]) -> Any:
    return _pandas().MultiIndex.from_tuples(tuples, names=names)


def _split_timestamp(stamp: Any) -> tuple[str, str | None, str]:
    zone = stamp.tz
    if zone is not None:
        zone = str(zone)
    return stamp.isoformat(), zone, stamp.unit


def _join_timestamp(text: str, zone: str | None, unit: str) -> Any:
    stamp = _pandas().Timestamp(text)
    if zone is not None:
        stamp = stamp.tz_convert(zone)
    return stamp.as_unit(unit)


def _split_timedelta(delta: Any) -> tuple[int, str]:
    return delta.as_unit("ns").value, delta.unit


def _join_timedelta(value: int, unit: str) -> Any:
    return _pandas().Timedelta(value, "ns").as_unit(unit)


def _split_missing(value: object) -> tuple[()]:
    return ()


def _make_nat() -> Any:
    return _pandas().NaT


def _make_na() -> Any:
    return _pandas().NA


PARTS: dict[str, Callable[[Any], Any]] = {
    "pandas.DataFrame": _split_frame,
    "pandas.Series": _split_series,
    "pandas.Index": _split_index,
    "pandas.DatetimeIndex": _split_dates,
    "pandas.RangeIndex": _split_range,
    "pandas.MultiIndex": _split_levels,
    "pandas.Timestamp": _split_timestamp,
    "pandas.Timedelta": _split_timedelta,
    "pandas.NaT": _split_missing,
    "pandas.NA": _split_missing,
}
MAKERS: dict[str, Callable[..., Any]] = {
    "pandas.DataFrame": _join_frame,
    "pandas.Series": _join_series,
    "pandas.Index": _join_index,
    "pandas.DatetimeIndex": _join_dates,
    "pandas.RangeIndex": _join_range,
    "pandas.MultiIndex": _join_levels,
    "pandas.Timestamp": _join_timestamp,
    "pandas.Timedelta": _join_timedelta,
    "pandas.NaT": _make_nat,
    "pandas.NA": _make_na,
}
