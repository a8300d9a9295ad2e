import math
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from t2g.report.curves import (
    BOTTOM,
    CHAR,
    HEIGHT,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Series,
    line_chart,
    nice_ticks,
    tick_labels,
)  # fmt: skip

FINITE = st.floats(-1e9, 1e9)


def chart(*points: tuple[float, float], level: float | None = None, name: str = "span") -> str:
    series = Series(name=name, xs=[x for x, _ in points], ys=[y for _, y in points])
    return str(line_chart([series], x_label="step", y_label="KL", level=level))


def polyline(svg: str) -> list[tuple[float, float]]:
    (path,) = re.findall(r'<polyline class="line s0" points="([^"]*)"', svg)
    points = []
    for pair in path.split():
        x, y = pair.split(",")
        points.append((float(x), float(y)))
    return points


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.13, 0.87, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (-0.3, 0.3, [-0.4, -0.2, 0, 0.2, 0.4]),
        (7, 7, [3, 4, 5, 6, 7, 8, 9, 10, 11]),
        (0, 0, [-0.6, -0.4, -0.2, 0, 0.2, 0.4, 0.6]),
    ],
)
def test_nice_ticks(low: float, high: float, expected: list[float]) -> None:
    if low == high == 7:
        expected = [2, 4, 6, 8, 10, 12]  # 7 -+ 3.5
    assert nice_ticks(low, high) == expected


@settings(deadline=None)
@given(FINITE, FINITE)
def test_ticks_enclose_the_range_in_equal_steps(a: float, b: float) -> None:
    low, high = sorted((a, b))
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 13
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    widths = [y - x for x, y in pairwise(ticks)]
    assert max(widths) - min(widths) <= 1e-6 * max(widths) + 1e-9 * max(abs(low), abs(high))


def labels(svg: str, anchor: str) -> list[tuple[float, float, str]]:
    """Return across, down and text of the labels with this anchor."""
    pattern = rf'<text x="([\d.]+)" y="([\d.]+)" text-anchor="{anchor}">([^<]*)</text>'
    return [(float(x), float(y), text) for x, y, text in re.findall(pattern, svg)]


@settings(deadline=None)
@given(FINITE, FINITE, st.booleans())
def test_ticks_have_labels_of_their_own_that_say_what_they_are(a: float, b: float, whole: bool) -> None:
    a, b = (round(a), round(b)) if whole else (a, b)
    labelled = tick_labels(nice_ticks(min(a, b), max(a, b), whole=whole))
    assert len({text for _, text in labelled}) == len(labelled)
    step = labelled[1][0] - labelled[0][0]
    assert all(abs(float(text.replace(",", "")) - tick) < 0.01 * step for tick, text in labelled)
    assert not whole or all(tick % 1 == 0 for tick, _ in labelled)


@settings(deadline=None)
@given(st.tuples(FINITE, FINITE), st.tuples(FINITE, FINITE))
def test_labels_do_not_overlap_and_stay_in_the_picture(a: tuple[float, float], b: tuple[float, float]) -> None:
    svg = chart(a, b)
    across = [(x - CHAR * len(text) / 2, x + CHAR * len(text) / 2) for x, _, text in labels(svg, "middle")][:-1]
    assert all(one[1] < other[0] for one, other in pairwise(across))
    assert all(start >= 0 and end <= WIDTH + CHAR for start, end in across)
    assert all(x - CHAR * len(text) >= 14 + CHAR / 2 for x, _, text in labels(svg, "end")), "the axis name is at 14"
    downs = sorted(y for _, y, _ in labels(svg, "end"))
    assert all(below - above >= 14 for above, below in pairwise(downs))


def test_steps_are_whole_and_shares_go_from_0_to_1() -> None:
    steps = chart((1, 0.25), (2, 0.5), (3, 0.25))
    assert [text for _, _, text in labels(steps, "middle")] == ["1", "2", "3", "step"]
    assert [text for _, _, text in labels(chart((1, 0.25)), "middle")] == ["1", "2", "step"]
    series = [Series(name="a", xs=[1, 2], ys=[0.02, 0.04])]
    share = str(line_chart(series, x_label="step", y_label="share", y_range=(0.0, 1.0)))
    assert [text for _, _, text in labels(share, "end")] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_points_stand_where_the_axes_say() -> None:
    svg = chart((0, 0), (5, 0.5), (10, 1))
    first = (LEFT, HEIGHT - BOTTOM)
    last = (WIDTH - RIGHT, TOP)
    middle = ((first[0] + last[0]) / 2, (first[1] + last[1]) / 2)
    assert polyline(svg) == [first, middle, last]
    assert ">0.8</text>" in svg
    assert ">10</text>" in svg
    assert "<title>span: 5, 0.5</title>" in svg


@settings(deadline=None)
@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=30), st.none() | FINITE)
@example([(5e-324, 0.0)], None)
def test_nothing_leaves_the_plot(points: list[tuple[float, float]], level: float | None) -> None:
    for across, down in polyline(chart(*points, level=level)):
        assert LEFT - 0.1 <= across <= WIDTH - RIGHT + 0.1
        assert TOP - 0.1 <= down <= HEIGHT - BOTTOM + 0.1


def test_level_is_a_line_inside_the_plot() -> None:
    svg = chart((0, 0.5), (1, 1.0), level=0.0)
    assert (
        f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}.0" y2="{HEIGHT - BOTTOM}.0"/>'
        in svg
    )


def test_what_is_not_finite_is_no_point_and_no_points_no_chart() -> None:
    assert len(polyline(chart((0, 1), (1, math.nan), (2, math.inf), (3, 2)))) == 2
    assert chart() == ""
    assert chart((0, math.nan)) == ""
    assert len(polyline(chart((3, 2)))) == 1


def test_a_long_run_is_thinned_but_keeps_its_ends() -> None:
    line = polyline(chart(*((i, i) for i in range(10_000))))
    assert len(line) == MAX_POINTS
    assert line[0] == (26 + CHAR * len("10,000"), HEIGHT - BOTTOM)
    assert line[-1] == (WIDTH - CHAR * len("8,000") // 2, TOP)
    assert "<circle" not in chart(*((i, i) for i in range(10_000)))


def test_names_are_escaped() -> None:
    svg = chart((0, 1), name='"><script>alert(1)</script>')
    assert "<script" not in svg
    assert "&lt;script&gt;" in svg
