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
    if kind.startswith(("datetime64", "timedelta64")):
        unit = kind.partition("[")[2].partition(",")[0].rstrip("]")
        values = content.view(f"{'M' if kind.startswith('d') else 'm'}8[{unit}]")
        zone = kind.partition(", ")[2].rstrip("]")
        index = pandas.DatetimeIndex(values) if kind.startswith("d") else pandas.TimedeltaIndex(values)
        return (index.tz_localize("UTC").tz_convert(zone) if zone else index).array
    return pandas.array(content, dtype=kind)


def _split_index(index: Any) -> tuple[Any, ...]:
    return (*_split_values(index.array.to_numpy() if _is_numpy(index.array) else index.array), index.name)


def _is_numpy(values: Any) -> bool:
    return type(values).__name__ == "NumpyExtensionArray"


def _join_index(kind: str, content: Any, name: Any) -> Any:
    return _pandas().Index(_join_values(kind, content), name=name)


def _split_dates(index: Any) -> tuple[Any, ...]:
    return (*_split_index(index), index.freqstr)


def _join_dates(kind: str, content: Any, name: Any, frequency: str | None) -> Any:
    return _pandas().DatetimeIndex(_join_values(kind, content), name=name, freq=frequency)


def _split_series(series: Any) -> tuple[Any, ...]:
    values = series.array
    return (*_split_values(values.to_numpy() if _is_numpy(values) else values), series.index, series.name)


def _join_series(kind: str, content: Any, index: Any, name: Any) -> Any:
    return _pandas().Series(_join_values(kind, content), index=index, name=name)


def _split_frame(frame: Any) -> tuple[Any, ...]:
    columns = [frame.iloc[:, position] for position in range(frame.shape[1])]
    return frame.index, frame.columns, [_split_series(column)[:2] for column in columns]


def _join_frame(index: Any, columns: Any, content: list[Any]) -> Any:
    values = {position: _join_values(*parts) for position, parts in enumerate(content)}
    frame = _pandas().DataFrame(values, index=index)
    frame.columns = columns
    return frame


def replace_frame(frame: Any, new: Any) -> None:
    """Give a frame or series the content of another one."""
    frame._update_inplace(new)


PARTS: dict[str, Callable[[Any], Any]] = {
    "pandas.DataFrame": _split_frame,
    "pandas.Series": _split_series,
    "pandas.Index": _split_index,
    "pandas.DatetimeIndex": _split_dates,
    "pandas.RangeIndex": lambda v: (v.start, v.stop, v.step, v.name),
    "pandas.MultiIndex": lambda v: (v.tolist(), list(v.names)),
    "pandas.Timestamp": lambda v: (v.isoformat(), None if v.tz is None else str(v.tz), v.unit),
    "pandas.Timedelta": lambda v: (v.as_unit("ns").value, v.unit),
    "pandas.NaT": lambda v: (),
    "pandas.NA": lambda v: (),
}
MAKERS: dict[str, Callable[..., Any]] = {
    "pandas.DataFrame": _join_frame,
    "pandas.Series": _join_series,
    "pandas.Index": _join_index,
    "pandas.DatetimeIndex": _join_dates,
    "pandas.RangeIndex": lambda start, stop, step, name: _pandas().RangeIndex(start, stop, step, name=name),
    "pandas.MultiIndex": lambda tuples, names: _pandas().MultiIndex.from_tuples(tuples, names=names),
    "pandas.Timestamp": lambda text, zone, unit: _make_timestamp(text, zone, unit),
    "pandas.Timedelta": lambda value, unit: _pandas().Timedelta(value, "ns").as_unit(unit),
    "pandas.NaT": lambda: _pandas().NaT,
    "pandas.NA": lambda: _pandas().NA,
}


def _make_timestamp(text: str, zone: str | None, unit: str) -> Any:
    stamp = _pandas().Timestamp(text)
    return (stamp if zone is None else stamp.tz_convert(zone)).as_unit(unit)
