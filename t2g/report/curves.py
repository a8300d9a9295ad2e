"""Line charts as inline SVG: numbers in, markup out. The page styles the classes s0..s7, good and poor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from t2g.report.templates import render

WIDTH, HEIGHT = 560, 300  # of the viewBox; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 46  # margins for tick labels and axis names; longer labels widen LEFT and RIGHT
CHAR = 7  # width of a character of a label
MAX_AXIS_CHARS = 34  # of an axis name
MAX_POINTS = 400  # per line: more are indistinguishable, and a long run would make a large page
MARKED_POINTS = 30  # a line with more points has no markers
DASHES = ("none", "8 4", "2 4", "10 3 2 3", "4 3", "12 5", "1 3", "6 2 1 2")  # of the classes s0..s7

Point = tuple[float, float]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart. Points whose x or y is not finite are left out.

    Attributes:
        low, high: Ends of a band around the line, finite, one for each point. Empty: no band.
        style: Class of its colour, good or poor. Empty: s0..s7 by its index.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = ""

    def outline(self) -> list[Point]:
        """Return the corners of the band, along the upper edge and back along the lower edge; [] without a band."""
        return [*zip(self.x, self.high, strict=False), *reversed([*zip(self.x, self.low, strict=False)])]

    def points(self) -> list[Point]:
        """Return the finite points, at most MAX_POINTS of them."""
        points = zip(self.x, self.y, strict=True)
        return thinned([(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)])


def legend_entries(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Return the name and the class of each line."""
    return [(line.name, line.style or f"s{index % len(DASHES)}") for index, line in enumerate(series)]


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    level: float | None = None,
    y_range: Sequence[float] = (),
) -> Markup:
    """Return a chart as an SVG element, or "" without points.

    The chart has axes, ticks, a line for each series and a dashed horizontal line at `level`. The y axis includes
    `y_range`.
    """
    lines = [s.points() for s in series]
    xs = [x for points in lines for x, _ in points]
    ys = [y for points in lines for _, y in points] + [y for s in series for y in (*s.low, *s.high)]
    if not xs:
        return Markup("")
    ys += [*y_range] if level is None else [*y_range, level]
    x_ticks = nice_ticks(min(xs), max(xs), whole=all(x % 1 == 0 for x in xs))
    y_ticks = nice_ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(max(xs), min(xs) + x_ticks[1] - x_ticks[0])
    slack = 1e-9 * (x_high - x_low)  # of rounding, without which a single point near 0 has no label
    x_labels = [(x, text) for x, text in tick_labels(x_ticks) if x_low - slack <= x <= x_high + slack]
    x_chars, y_chars = (max(len(text) for _, text in labels) for labels in (x_labels, tick_labels(y_ticks)))
    left, right = max(LEFT, CHAR * y_chars + 26), max(RIGHT, CHAR * x_chars // 2)

    def at(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(left + across * (WIDTH - left - right), 1), round(TOP + (1 - up) * (HEIGHT - TOP - BOTTOM), 1)

    tick_width = (WIDTH - left - right) * (x_ticks[1] - x_ticks[0]) / (x_high - x_low)
    every = math.ceil(CHAR * (x_chars + 1) / tick_width)
    return render(
        "chart.svg",
        width=WIDTH,
        height=HEIGHT,
        margins={"left": left, "right": right, "top": TOP, "bottom": BOTTOM},
        label=f"{y_label} against {x_label}: " + ", ".join(s.name for s in series),
        x_label=x_label,
        y_label=y_label if len(y_label) <= MAX_AXIS_CHARS else y_label[: MAX_AXIS_CHARS - 1] + "…",
        x_ticks=[(at(x, y_ticks[0])[0], text) for x, text in x_labels[::every]],
        y_ticks=[(at(x_low, y)[1], text) for y, text in tick_labels(y_ticks)],
        level=None if level is None else at(x_low, level)[1],
        lines=[
            {
                "style": style,
                "name": name,
                "points": points,
                "positions": [at(*point) for point in points],
                "band": [at(*point) for point in line.outline()],
            }
            for line, points, (name, style) in zip(series, lines, legend_entries(series), strict=True)
        ],
        marked=MARKED_POINTS,
    )


def nice_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten that enclose [low, high].

    Args:
        whole: Without fractions, for steps and counts.

    >>> nice_ticks(0.13, 0.87), nice_ticks(1, 3, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 2.0, 3.0])
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    step = max(step, 1.0) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return the ticks with their texts, with as many digits as neighbours need to differ.

    >>> [text for _, text in tick_labels([0.25, 0.5])], [text for _, text in tick_labels([1e8, 1.01e8])]
    (['0.25', '0.50'], ['1.00e8', '1.01e8'])
    """
    smallest = math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)
    largest = math.floor(math.log10(max(map(abs, ticks))) + 1e-9)
    if smallest >= -4 and largest < 7:
        return [(tick, f"{tick:,.{max(0, -smallest)}f}") for tick in ticks]
    parts = [f"{tick:.{max(0, largest - smallest)}e}".partition("e") for tick in ticks]
    return [
        (tick, f"{digits}e{int(power)}" if tick else "0") for tick, (digits, _, power) in zip(ticks, parts, strict=True)
    ]


def thinned(points: Sequence[Item], limit: int = MAX_POINTS) -> list[Item]:
    """Return at most `limit` of the points, evenly spaced, including the first and the last."""
    if len(points) <= limit:
        return [*points]
    return [points[round(i * (len(points) - 1) / (limit - 1))] for i in range(limit)]
