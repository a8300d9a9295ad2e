"""Write report.html of a comparison, and its curves as curves.svg. Computes means of curves only."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from markupsafe import Markup

from t2g.files import write_atomic
from t2g.report.curves import CHAR, DASHES, HEIGHT, WIDTH, Series, legend_entries, line_chart
from t2g.report.templates import render, render_page
from t2g.study.comparison import RunCurve
from t2g.study.tables import spread, t_interval

HTML_FILE = "report.html"
SVG_FILE = "curves.svg"
BASE = "sft"
ENTRY = 110  # minimum width of a legend entry, in units of the viewBox
ROW = 22  # height of a legend row


def write_comparison(folder: Path, summary: Mapping[str, Any], runs: Mapping[str, Mapping[int, RunCurve]]) -> None:
    """Write both files.

    Args:
        summary: The content of compare.json.
        runs: method -> seed -> run.
    """
    lines = [mean_curve(method, by_seed) for method, by_seed in runs.items() if method != BASE]
    base = BASE if BASE in runs else None
    level = summary["methods"][base]["score"]["mean"] if base else None
    chart = line_chart(lines, x_label="samples", y_label="held-out score", level=level)
    write_atomic(folder / SVG_FILE, picture(chart, lines, base).encode())
    render_page(
        folder / HTML_FILE,
        "compare.html",
        title="Methods compared",
        chart=chart,
        lines=legend_entries(lines),
        base=base,
        dashes=DASHES,
        spread=spread,
        chosen=summary["search"]["chosen"],
        methods=summary["methods"],
        noise=summary["noise"],
        versions=summary["versions"],
    )


def mean_curve(name: str, by_seed: Mapping[int, RunCurve]) -> Series:
    """Return the mean over seeds at each evaluation, with its 95 % interval as the band if there are several seeds."""
    runs = [*by_seed.values()]
    length = min(len(run.scores) for run in runs)
    points = []
    for index in range(length):
        scores = [run.scores[index] for run in runs]
        points.append(t_interval(scores))
    samples = runs[0].samples[:length]
    means = [point["mean"] for point in points]
    line = Series(name=name, xs=samples, ys=means)
    if len(runs) == 1:
        return line
    low = [point["low"] for point in points]
    high = [point["high"] for point in points]
    return replace(line, low=low, high=high)


def picture(chart: Markup, lines: Sequence[Series], level: str | None) -> str:
    """Return a chart as a standalone SVG file: with its own colors, a white background, and a legend above it."""
    entries = [(f"line {style}", name) for name, style in legend_entries(lines)]
    if level:
        entries.append(("level", level))
    longest = max(len(name) for _, name in entries)
    entry_width = max(ENTRY, CHAR * longest + 44)
    per_row = max(1, WIDTH // entry_width)
    positions = []
    for index in range(len(entries)):
        row, column = divmod(index, per_row)
        positions.append((entry_width * column + 10, ROW * row + 14))
    return render(
        "picture.svg",
        chart=chart,
        entries=zip(positions, entries, strict=True),
        dashes=DASHES,
        top=ROW * ceil(len(entries) / per_row),
        width=WIDTH,
        height=HEIGHT,
    )
