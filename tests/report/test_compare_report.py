"""The report of a comparison: its curves, and the picture that stands alone."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from t2g.report.comparison_page import ENTRY, mean_curve, picture, write_comparison
from t2g.report.curves import CHAR, WIDTH, Series, line_chart
from t2g.study.comparison import RunCurve, summarize, summarize_noise

SVG = "{http://www.w3.org/2000/svg}"


def run(*scores: float) -> RunCurve:
    steps = range(len(scores))
    return RunCurve(samples=tuple(steps), scores=scores, seconds=tuple(map(float, steps)), step_seconds=1.0)


def test_a_curve_is_the_mean_over_seeds_with_its_interval() -> None:
    curve = mean_curve("span", {1: run(0.0, 0.4, 1.0), 2: run(0.0, 0.6)})
    assert (list(curve.xs), list(curve.ys)) == ([0, 1], [0.0, 0.5])  # as far as all seeds have come
    assert list(curve.low) == pytest.approx([0.0, 0.5 - 12.706 * 0.1])
    assert list(curve.high) == pytest.approx([0.0, 0.5 + 12.706 * 0.1])
    alone = mean_curve("span", {1: run(0.0, 0.4)})
    assert (list(alone.low), list(alone.high)) == ([], [])


def test_a_band_goes_along_its_upper_edge_and_back_along_the_lower_one() -> None:
    series = Series(name="a", xs=[0, 1], ys=[2, 3], low=[1, 1], high=[3, 5])
    assert series.outline() == [(0, 3), (1, 5), (1, 1), (0, 1)]
    svg = str(line_chart([series], x_label="x", y_label="y"))
    (corners,) = re.findall(r'<polygon class="band s0" points="([^"]*)"', svg)
    points = [tuple(map(float, corner.split(","))) for corner in corners.split()]
    assert len(points) == 4
    assert points[1][1] < points[0][1] < points[2][1] == points[3][1]
    ticks = [float(tick) for tick in re.findall(r'text-anchor="end">([\d.]+)<', svg)]
    assert min(ticks) <= 1 and max(ticks) >= 5  # the axis holds the band


def test_the_picture_stands_alone() -> None:
    names = [f"method {i}" for i in range(8)] + ["<b>&"]
    lines = [Series(name=name, xs=[0, 1], ys=[i, i + 1]) for i, name in enumerate(names)]
    chart = line_chart(lines, x_label="samples", y_label="score", level=0.5)
    tree = ElementTree.fromstring(picture(chart, lines, "sft"))
    assert [text.text for text in tree.findall(f"{SVG}g/{SVG}text")] == [*names, "sft"]
    places = [tuple(map(float, re.findall(r"\d+", g.attrib["transform"]))) for g in tree.findall(f"{SVG}g")]
    assert len(set(places)) == 10
    assert all(x + ENTRY <= WIDTH + 10 for x, _ in places)
    assert all(b[0] - a[0] == ENTRY for a, b in pairwise(places) if a[1] == b[1])
    long = [Series(name="a method with a long name", xs=[0], ys=[1]), *lines]
    entries = ElementTree.fromstring(picture(chart, long, None)).findall(f"{SVG}g")
    ends = [(*map(float, re.findall(r"\d+", g.attrib["transform"])), CHAR * len(g[1].text or "") + 30) for g in entries]
    assert all(a[0] + a[2] < b[0] for a, b in pairwise(ends) if a[1] == b[1])
    inner = tree.find(f"{SVG}svg")
    assert inner is not None
    assert float(inner.attrib["y"]) > max(y for _, y in places)
    assert not [word for word in ("script", "href", "@import", "url(") if word in ElementTree.tostring(tree, "unicode")]


def test_the_page_tells_of_every_method(tmp_path: Path) -> None:
    runs = {"scalar": {1: run(0.1, 0.2)}, "<i>": {1: run(0.1, 0.3)}, "span": {1: run(0.1, 0.4)}}
    summary = {
        "methods": summarize(runs),
        "noise": summarize_noise({"flip": {"span": runs["span"], "scalar": runs["scalar"]}}),
        "search": {"chosen": {"span": 3e-4}},
        "versions": {"torch": "2"},
    }
    write_comparison(tmp_path, summary, runs)
    page = (tmp_path / "report.html").read_text()
    assert "<td>span</td><td>0.0003</td><td>0.400</td>" in page and "<td>flip</td>" in page
    assert "<i>" not in page and "&lt;i&gt;" in page
    assert "1 of 1 seeds" in page and "<script" not in page
