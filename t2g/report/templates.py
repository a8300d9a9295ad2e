"""Render the templates of this folder. Pages have no scripts and load nothing; every text is untrusted and escaped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from t2g.files import write_atomic
from t2g.runs.progress import format_duration
from t2g.text.segments import Segment, printable, segments
from t2g.types import Span, SpanFeedback

MAX_TEXT_CHARS = 4000

_loader = FileSystemLoader(Path(__file__).parent)
environment = Environment(
    loader=_loader, autoescape=True, undefined=StrictUndefined,
    finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
)  # fmt: skip
plain = Environment(loader=_loader, autoescape=False, undefined=StrictUndefined)  # for Markdown


def render(template: str, **values: Any) -> Markup:
    return Markup(environment.get_template(template).render(**values))


def render_page(path: Path, template: str, **values: Any) -> None:
    """Render a page and write it, atomically replacing an older one."""
    write_atomic(path, render(template, **values).encode(errors="replace"))  # a lone surrogate has no UTF-8


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
    whole = isinstance(value, int) or (abs(value) >= 100 and value % 1 == 0)
    decimals = 0 if whole else 3 if abs(value) < 10 else 1
    return f"{value:,.{decimals}f}"


def split_text(text: str, spans: Sequence[Span] = ()) -> list[Segment]:
    """Return the first MAX_TEXT_CHARS characters, split at the spans."""
    return segments(printable(text[:MAX_TEXT_CHARS]), spans)


def phrases(feedback: SpanFeedback) -> list[Span]:
    """Return the range of the critique about each span, empty if there is none, so that both get the same number."""
    ranges = [(s.critique_range or (0, 0), s.label) for s in feedback.spans]
    return [Span(start=start, end=end, label=label) for (start, end), label in ranges]


environment.filters |= {"number": number, "seconds": format_duration}
plain.filters["number"] = number
environment.tests["figure"] = is_figure
environment.globals |= {"split_text": split_text, "phrases": phrases, "max_chars": MAX_TEXT_CHARS}
