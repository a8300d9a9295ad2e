"""What a comparison shows: report.html, and its curves as a picture of their own. Computes means of curves only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from t2g.files import write_atomic
from t2g.report.curves import DASHES, HEIGHT, STYLES, WIDTH, Series, line_chart
from t2g.report.templates import render_page
from t2g.study.comparison import Run
from t2g.study.tables import interval, spread

HTML_FILE, SVG_FILE = "report.html", "curves.svg"
BASE = "sft"
COLOURS = ("#2563eb", "#d97706", "#7c3aed", "#0d9488", "#db2777", "#64748b", "#4d7c0f", "#9f1239")  # as in page.html
ENTRY = 110  # width of a legend's entry, units of the picture
ROW = 22


def write_comparison(folder: Path, summary: Mapping[str, Any], runs: Mapping[str, Mapping[int, Run]]) -> None:
    """Both files, from compare.json and the runs that it is about."""
    lines = [mean_curve(method, by_seed) for method, by_seed in runs.items() if method != BASE]
    base = summary["methods"].get(BASE)
    level = base["score"]["mean"] if base else None
    chart = line_chart(lines, x_label="samples", y_label="held-out score", level=level)
    names = [line.name for line in lines]
    write_atomic(folder / SVG_FILE, picture(chart, names, BASE if base else None).encode())
    render_page(
        folder / HTML_FILE,
        "compare.html",
        title="Methods compared",
        chart=chart,
        names=names,
        base=BASE if base else None,
        dashes=DASHES,
        methods=summary["methods"],
        chosen=summary["search"]["chosen"],
        noise=summary["noise"],
        spread=spread,
        versions=summary["versions"],
    )


def mean_curve(name: str, by_seed: Mapping[int, Run]) -> Series:
    """Mean over seeds at each evaluation, and the 95 % interval as its band where there are several seeds."""
    runs = [*by_seed.values()]
    length = min(len(run.scores) for run in runs)
    found = [interval([run.scores[i] for run in runs]) for i in range(length)]
    band = {key: [point[key] for point in found] for key in ("low", "high")} if len(runs) > 1 else {}
    return Series(name=name, x=runs[0].samples[:length], y=[point["mean"] for point in found], **band)


def picture(chart: Markup, names: list[str], level: str | None) -> str:
    """A chart as a file that needs no page around it: with its own colours, on white, its legend above it."""
    entries = [(f"line s{i % STYLES}", name) for i, name in enumerate(names)] + ([("level", level)] if level else [])
    per_row = WIDTH // ENTRY
    top = ROW * -(-len(entries) // per_row)
    legend = Markup("").join(
        _ENTRY.format(ENTRY * (i % per_row) + 10, ROW * (i // per_row) + 14, style, name)
        for i, (style, name) in enumerate(entries)
    )
    styles = "".join(
        f".line.s{i}{{stroke:{colour};stroke-dasharray:{dash}}}.dot.s{i},.band.s{i}{{fill:{colour}}}"
        for i, (colour, dash) in enumerate(zip(COLOURS, DASHES, strict=True))
    )
    parts = (Markup(_STYLE + styles), _PAPER, legend, top, Markup(_sized(chart)))
    return str(_PICTURE.format(WIDTH, HEIGHT + top, *parts))


def _sized(chart: Markup) -> str:
    """The chart's element without its first word: within another picture it needs a size."""
    return f'width="{WIDTH}" height="{HEIGHT}" {str(chart).removeprefix("<svg ")}' if chart else "/>"


_PICTURE = Markup(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}"><style>{}</style>{}{}<svg y="{}" {}</svg>\n'
)
_PAPER = Markup('<rect width="100%" height="100%" fill="#fff"/>')
_ENTRY = Markup('<g transform="translate({} {})"><line class="{}" x1="0" x2="24"/><text x="30" y="4">{}</text></g>')
_STYLE = (
    "text{fill:#626b7a;font:12px system-ui,sans-serif}.grid{stroke:#edf0f4}.edge{stroke:#626b7a}"
    ".level{stroke:#626b7a;stroke-dasharray:3 4;stroke-width:1.5}.line{fill:none;stroke-width:2.2}.band{opacity:.12}"
)
