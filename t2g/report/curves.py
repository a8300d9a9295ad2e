"""Line charts as inline SVG: numbers in, markup out. The page gives the classes s0..s7 colour and dashes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from markupsafe import Markup

from t2g.report.templates import render

WIDTH, HEIGHT = 560, 300  # of the viewBox; the page scales it
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 12, 44  # margins for tick labels and axis names
MAX_POINTS = 400  # per line: more cannot be told apart, and a long run would make a heavy page
MARKED_POINTS = 30  # a line with more points carries no markers
DASHES = ("none", "8 4", "2 4", "10 3 2 3", "4 3", "12 5", "1 3", "6 2 1 2")  # by style
STYLES = len(DASHES)

Point = tuple[float, float]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line; points whose x or y is not finite are left out.

    low, high: of a band around it, one for each point, finite; no band where they are empty.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    def outline(self) -> list[Point]:
        """The band's corners: along its upper edge and back along its lower one; [] without a band."""
        return [*zip(self.x, self.high, strict=False), *reversed([*zip(self.x, self.low, strict=False)])]

    def points(self) -> list[Point]:
        both = zip(self.x, self.y, strict=True)
        return thinned([(x, y) for x, y in both if math.isfinite(x) and math.isfinite(y)])


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, level: float | None = None) -> Markup:
    """An SVG element: axes, ticks, one line per series and a dashed horizontal line at `level`; "" without points."""
    lines = [s.points() for s in series]
    xs = [x for points in lines for x, _ in points]
    ys = [y for points in lines for _, y in points] + [y for s in series for y in (*s.low, *s.high)]
    if not xs:
        return Markup("")
    if level is not None:
        ys.append(level)
    x_ticks, y_ticks = nice_ticks(min(xs), max(xs)), nice_ticks(min(ys), max(ys))
    x_step, y_step = x_ticks[1] - x_ticks[0], y_ticks[1] - y_ticks[0]
    x_low, x_high = min(xs), max(max(xs), min(xs) + x_step)

    def at(x: float, y: float) -> Point:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return round(LEFT + across * (WIDTH - LEFT - RIGHT), 1), round(TOP + (1 - up) * (HEIGHT - TOP - BOTTOM), 1)

    return render(
        "chart.svg",
        width=WIDTH,
        height=HEIGHT,
        margins={"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        label=f"{y_label} against {x_label}: " + ", ".join(s.name for s in series),
        x_label=x_label,
        y_label=y_label,
        x_ticks=[(at(t, y_ticks[0])[0], _tick_text(t, x_step)) for t in x_ticks if x_low <= t <= x_high],
        y_ticks=[(at(x_low, t)[1], _tick_text(t, y_step)) for t in y_ticks],
        level=None if level is None else at(x_low, level)[1],
        lines=[
            {
                "style": index % STYLES,
                "name": one.name,
                "points": points,
                "places": [at(*point) for point in points],
                "band": [at(*point) for point in one.outline()],
            }
            for index, (one, points) in enumerate(zip(series, lines, strict=True))
        ],
        marked=MARKED_POINTS,
    )


def nice_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about five of them, that enclose [low, high].

    >>> nice_ticks(0.13, 0.87)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def thinned(points: Sequence[Item], most: int = MAX_POINTS) -> list[Item]:
    """At most so many of them, evenly chosen, first and last kept."""
    if len(points) <= most:
        return [*points]
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _tick_text(value: float, step: float) -> str:
    """As many decimals as the step between ticks needs: 0.25 beside 0.5 reads 0.50."""
    if abs(value) >= 1e6 or step < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
