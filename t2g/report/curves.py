"""Line charts as inline SVG: numbers in, markup out. The page styles the classes s0..s7, good and poor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from markupsafe import Markup

from t2g.report.templates import render

WIDTH = 560  # width of the viewBox; the page scales it
HEIGHT = 300
# Margins for tick labels and axis names; longer labels widen LEFT and RIGHT.
LEFT = 62
RIGHT = 14
TOP = 12
BOTTOM = 46
CHAR = 7  # width of a character of a label
MAX_AXIS_CHARS = 34  # characters of an axis name
MAX_POINTS = 400  # per line: more are indistinguishable, and a long run would make a large page
MARKED_POINTS = 30  # a line with more points has no markers
DASHES = ("none", "8 4", "2 4", "10 3 2 3", "4 3", "12 5", "1 3", "6 2 1 2")  # dashes of the classes s0..s7

Point = tuple[float, float]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart. Points whose x or y is not finite are left out.

    Attributes:
        low, high: Ends of a band around the line, finite, one for each point. Empty: no band.
        style: Class of its color, good or poor. Empty: s0..s7 by its index.
    """

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = ""

    def outline(self) -> list[Point]:
        """Return the corners of the band, along the upper edge and back along the lower edge; [] without a band."""
        upper = [*zip(self.xs, self.high, strict=False)]
        lower = [*zip(self.xs, self.low, strict=False)]
        return upper + lower[::-1]

    def points(self) -> list[Point]:
        """Return the finite points, at most MAX_POINTS of them."""
        points = zip(self.xs, self.ys, strict=True)
        finite = [point for point in points if all(map(math.isfinite, point))]
        return thin_points(finite)


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """An axis of a chart: the values at its ends, and its labels."""

    low: float
    high: float
    step: float  # from tick to tick
    labels: Sequence[tuple[float, str]]

    @cached_property
    def num_chars(self) -> int:
        """Return the length of the longest label."""
        return max(len(text) for _, text in self.labels)


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Where values are drawn, in units of the viewBox."""

    x_axis: _Axis
    y_axis: _Axis

    @cached_property
    def left(self) -> int:
        """Return the margin with the labels of the y axis."""
        return max(LEFT, CHAR * self.y_axis.num_chars + 26)

    @cached_property
    def right(self) -> int:
        """Return the margin into which the last label of the x axis extends."""
        return max(RIGHT, CHAR * self.x_axis.num_chars // 2)

    @property
    def width(self) -> int:
        """Return the length of the x axis."""
        return WIDTH - self.left - self.right

    def x_position(self, value: float) -> float:
        across = (value - self.x_axis.low) / (self.x_axis.high - self.x_axis.low)
        return round(self.left + across * self.width, 1)

    def y_position(self, value: float) -> float:
        up = (value - self.y_axis.low) / (self.y_axis.high - self.y_axis.low)
        height = HEIGHT - TOP - BOTTOM
        return round(TOP + (1 - up) * height, 1)

    def positions(self, points: Sequence[Point]) -> list[Point]:
        return [(self.x_position(across), self.y_position(up)) for across, up in points]

    def x_ticks(self) -> list[tuple[float, str]]:
        """Return positions and texts on the x axis, of as many labels as have room."""
        extent = self.x_axis.high - self.x_axis.low
        tick_width = self.width * self.x_axis.step / extent
        label_width = CHAR * (self.x_axis.num_chars + 1)
        every = math.ceil(label_width / tick_width)
        labels = self.x_axis.labels[::every]
        return [(self.x_position(value), text) for value, text in labels]

    def y_ticks(self) -> list[tuple[float, str]]:
        return [(self.y_position(value), text) for value, text in self.y_axis.labels]


def legend_entries(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Return the name and the class of each line."""
    entries = []
    for index, line in enumerate(series):
        style = line.style or f"s{index % len(DASHES)}"
        entries.append((line.name, style))
    return entries


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
    lines = [line.points() for line in series]
    points = [*chain.from_iterable(lines)]
    if not points:
        return Markup("")

    xs = [point[0] for point in points]
    ys = [point[1] for point in points]
    for line in series:
        ys += [*line.low, *line.high]
    ys += y_range
    if level is not None:
        ys.append(level)
    frame = _Frame(x_axis=_x_axis(xs), y_axis=_y_axis(ys))
    level_position = None if level is None else frame.y_position(level)
    line_values = _line_values(series, lines, frame)
    margins = {"left": frame.left, "right": frame.right, "top": TOP, "bottom": BOTTOM}
    names = ", ".join(line.name for line in series)
    return render(
        "chart.svg",
        width=WIDTH,
        height=HEIGHT,
        margins=margins,
        label=f"{y_label} against {x_label}: {names}",
        x_label=x_label,
        y_label=_shorten(y_label),
        x_ticks=frame.x_ticks(),
        y_ticks=frame.y_ticks(),
        level=level_position,
        lines=line_values,
        marked=MARKED_POINTS,
    )


def _x_axis(xs: Sequence[float]) -> _Axis:
    """Return an axis from the least to the greatest value, at least a tick long."""
    are_whole = all(value % 1 == 0 for value in xs)
    ticks = nice_ticks(min(xs), max(xs), whole=are_whole)
    low = min(xs)
    high = max(max(xs), low + ticks[1] - ticks[0])
    slack = 1e-9 * (high - low)  # allows for rounding: otherwise a single point near 0 has no label
    labels = []
    for tick, text in tick_labels(ticks):
        if low - slack <= tick <= high + slack:
            labels.append((tick, text))
    return _Axis(low=low, high=high, step=ticks[1] - ticks[0], labels=labels)


def _y_axis(ys: Sequence[float]) -> _Axis:
    """Return an axis from tick to tick."""
    ticks = nice_ticks(min(ys), max(ys))
    step = ticks[1] - ticks[0]
    return _Axis(low=ticks[0], high=ticks[-1], step=step, labels=tick_labels(ticks))


def _line_values(series: Sequence[Series], lines: Sequence[list[Point]], frame: _Frame) -> list[dict[str, Any]]:
    """Return what the template draws of each line."""
    values = []
    for line, points, (name, style) in zip(series, lines, legend_entries(series), strict=True):
        positions = frame.positions(points)
        band = frame.positions(line.outline())
        values.append({"style": style, "name": name, "points": points, "positions": positions, "band": band})
    return values


def _shorten(label: str) -> str:
    """Return the name of an axis with at most MAX_AXIS_CHARS characters."""
    if len(label) <= MAX_AXIS_CHARS:
        return label
    return label[: MAX_AXIS_CHARS - 1] + "…"


def nice_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about five multiples of 1, 2 or 5 times a power of ten that enclose [low, high].

    Args:
        whole: Without fractions, for steps and counts.

    >>> nice_ticks(0.13, 0.87), nice_ticks(1, 3, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 2.0, 3.0])
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        pad = abs(low) / 2 or 0.5
        low -= pad
        high += pad
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    least = rough * (1 - 1e-9)
    multiples = [power, 2 * power, 5 * power, 10 * power]
    step = next(multiple for multiple in multiples if multiple >= least)
    if whole:
        step = max(step, 1.0)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[tuple[float, str]]:
    """Return the ticks with their texts, with as many digits as neighbors need to differ.

    >>> [text for _, text in tick_labels([0.25, 0.26])], [text for _, text in tick_labels([1e8, 1.01e8])]
    (['0.25', '0.26'], ['1.00e8', '1.01e8'])
    """
    smallest = math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9)
    largest = math.floor(math.log10(max(map(abs, ticks))) + 1e-9)
    if smallest >= -4 and largest < 7:
        decimals = max(0, -smallest)
        return [(tick, f"{tick:,.{decimals}f}") for tick in ticks]
    decimals = max(0, largest - smallest)
    return [(tick, _scientific(tick, decimals)) for tick in ticks]


def _scientific(tick: float, decimals: int) -> str:
    """Format a tick as a number with a power of ten, without zeros before the power."""
    if not tick:
        return "0"
    digits, _, power = f"{tick:.{decimals}e}".partition("e")
    return f"{digits}e{int(power)}"


def thin_points(points: Sequence[Item], limit: int = MAX_POINTS) -> list[Item]:
    """Return at most `limit` of the points, evenly spaced, including the first and the last."""
    if len(points) <= limit:
        return [*points]
    distance = len(points) - 1
    indices = [round(number * distance / (limit - 1)) for number in range(limit)]
    return [points[index] for index in indices]
