"""Means over seeds and how sure they are: Student's t for a handful of values."""

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 .. 9 degrees of freedom

Interval = dict[str, float | None]


def half_interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of 2 to 10 values: t * s / sqrt(n).

    >>> round(half_interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    return T_975[len(values) - 2] * stdev(values) / sqrt(len(values))


def interval(values: Sequence[float]) -> Interval:
    """`mean`, and `low` and `high` of its 95 % interval; these are None for one value, and all are for none.

    >>> interval([1.0, 1.0])
    {'mean': 1.0, 'low': 1.0, 'high': 1.0}
    """
    if not values:
        return {"mean": None, "low": None, "high": None}
    middle = mean(values)
    if len(values) == 1:
        return {"mean": middle, "low": None, "high": None}
    half = half_interval(values)
    return {"mean": middle, "low": middle - half, "high": middle + half}
