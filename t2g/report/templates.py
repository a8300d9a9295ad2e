"""Render the templates of this folder. Pages have no scripts and load nothing; every text is untrusted and escaped."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from t2g.files import write_atomic
from t2g.runs.progress import format_duration
from t2g.text.folds import split_folds
from t2g.text.segments import Segment, printable, segments
from t2g.types import Span, SpanFeedback

MAX_TEXT_CHARS = 4000
MIN_HEADINGS = 3  # headings of a page with a table of contents
_HEADING = re.compile(r"<h2>(.*?)</h2>", re.DOTALL)  # the templates' own: other texts are escaped
_CONTENTS = "<nav></nav>"

_loader = FileSystemLoader(Path(__file__).parent)


def _finalize(value: Any) -> Any:
    """Replace the control characters of every text that is not markup of our own."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return printable(value)


environment = Environment(loader=_loader, autoescape=True, undefined=StrictUndefined, finalize=_finalize)
plain = Environment(loader=_loader, autoescape=False, undefined=StrictUndefined)  # for Markdown


def render(template: str, **values: Any) -> Markup:
    return Markup(environment.get_template(template).render(**values))


def render_page(path: Path, template: str, **values: Any) -> None:
    """Render a page with a table of contents and write it, atomically replacing an older one."""
    page = add_contents(str(render(template, **values)))
    write_atomic(path, page.encode(errors="replace"))  # a lone surrogate has no UTF-8


def add_contents(page: str) -> str:
    """Return the page with an id for each h2, and their links in place of `<nav></nav>`; few headings need none.

    >>> add_contents("<nav></nav><h2>A</h2>")
    '<h2>A</h2>'
    """
    titles = _HEADING.findall(page)
    if len(titles) < MIN_HEADINGS:
        return page.replace(_CONTENTS, "", 1)
    links = ""
    for number, title in enumerate(titles, start=1):
        links += f'<a href="#section-{number}">{title}</a>'
        page = page.replace(f"<h2>{title}</h2>", f'<h2 id="section-{number}">{title}</h2>', 1)
    return page.replace(_CONTENTS, f'<nav aria-label="Contents">{links}</nav>', 1)


def is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> str:
    """Format a number for a page; other values as str, None as a dash.

    >>> number(0.71234), number(38.42), number(12800), number(1.0), number(None), number("span")
    ('0.712', '38.4', '12,800', '1.000', '–', 'span')
    >>> number(975.0), number(975.5)
    ('975', '975.5')
    """
    if value is None:
        return "–"
    if not is_figure(value):
        return str(value)
    is_large_whole = abs(value) >= 100 and value % 1 == 0
    if isinstance(value, int) or is_large_whole:
        return f"{value:,.0f}"
    if abs(value) < 10:
        return f"{value:,.3f}"
    return f"{value:,.1f}"


def split_text(text: str, spans: Sequence[Span] = ()) -> list[Segment]:
    """Return the first MAX_TEXT_CHARS characters, split at the spans."""
    return segments(printable(text[:MAX_TEXT_CHARS]), spans)


def phrases(feedback: SpanFeedback) -> list[Span]:
    """Return the range of the critique about each span, empty if there is none, so that both get the same number."""
    ranges = []
    for span in feedback.spans:
        start, end = span.critique_range or (0, 0)
        ranges.append(Span(start=start, end=end, label=span.label))
    return ranges


environment.filters |= {"number": number, "seconds": format_duration}
plain.filters["number"] = number
environment.tests["figure"] = is_figure
environment.globals |= {"split_text": split_text, "phrases": phrases, "split_folds": split_folds}
environment.globals["max_chars"] = MAX_TEXT_CHARS
