"""Means over seeds with Student's t intervals, formatted numbers and Markdown tables."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import mean, stdev

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 1 .. 9 degrees of freedom
NOTHING = "–"

Interval = dict[str, float | None]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of at most 10 values, and the ends of its 95 % interval: mean -+ t * s / sqrt(n).

    The ends are None for a single value. All three are None without values.

    >>> interval([1.0, 1.0])
    {'mean': 1.0, 'low': 1.0, 'high': 1.0}
    """
    middle = mean(values) if values else None
    if middle is None or len(values) == 1:
        return {"mean": middle, "low": None, "high": None}
    half = T_975[len(values) - 2] * stdev(values) / sqrt(len(values))
    return {"mean": middle, "low": middle - half, "high": middle + half}


def spread(value: Interval | None) -> str:
    """Format a mean and half the width of its interval.

    >>> spread({"mean": 0.5, "low": 0.4, "high": 0.6}), spread({"mean": 0.5, "low": None, "high": None}), spread(None)
    ('0.500 ± 0.100', '0.500', '–')
    """
    if value is None or value["mean"] is None:
        return NOTHING
    middle = f"{value['mean']:.3f}"
    if value["high"] is None:
        return middle
    half = value["high"] - value["mean"]
    return f"{middle} ± {half:.3f}"


def figure(value: float | None, form: str) -> str:
    """Format a number, or the lack of one.

    >>> figure(0.525, "+.0%"), figure(1280, ",.0f"), figure(None, ".3f")
    ('+52%', '1,280', '–')
    """
    return NOTHING if value is None else format(value, form)


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, without a line break at its end."""
    lines: list[str] = []
    for row in (head, ["---"] * len(head), *rows):
        cells = " | ".join(map(str, row))
        lines.append(f"| {cells} |")
    return "\n".join(lines)
