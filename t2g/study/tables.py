"""Means over seeds with Student's t intervals, formatted numbers and Markdown tables."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import NormalDist, mean, stdev

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 1 .. 9 degrees of freedom
NOTHING = "–"

Interval = dict[str, float | None]


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean of the values, and the ends of its 95 % interval: mean -+ t * s / sqrt(n).

    The ends are None for a single value. All three are None without values.

    >>> t_interval([1.0, 1.0])
    {'mean': 1.0, 'low': 1.0, 'high': 1.0}
    """
    middle = mean(values) if values else None
    if middle is None or len(values) == 1:
        return {"mean": middle, "low": None, "high": None}
    half = t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return {"mean": middle, "low": middle - half, "high": middle + half}


def t_quantile(freedom: int) -> float:
    """Return the .975 quantile of Student's t with f degrees of freedom to three digits; by Cornish-Fisher from 10 on.

    z + (z^3 + z) / 4f + (5 z^5 + 16 z^3 + 3 z) / 96f^2, with z the same quantile of the normal distribution.

    >>> t_quantile(1), t_quantile(9), round(t_quantile(49), 3), round(t_quantile(999), 3)
    (12.706, 2.262, 2.01, 1.962)
    """
    if freedom <= len(_T_975):
        return _T_975[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first_order = (z**3 + z) / (4 * freedom)
    second_order = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first_order + second_order


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


def format_figure(value: float | None, form: str) -> str:
    """Format a number, or the lack of one.

    >>> format_figure(0.525, "+.0%"), format_figure(1280, ",.0f"), format_figure(None, ".3f")
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
