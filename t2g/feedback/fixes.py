"""Correct a response with the fixes of its spans."""

from collections.abc import Iterable

from t2g.types import Span


def apply_fixes(response_text: str, spans: Iterable[Span]) -> str:
    """Return the response with each fix in place of its span's text; of overlapping fixes the first is applied.

    >>> spans = [Span(start=6, end=8, label=-1, fix="24"), Span(start=8, end=15, label=-1, fix="")]
    >>> apply_fixes("It is 42, or so.", spans)
    'It is 24.'
    """
    parts: list[str] = []
    position = 0
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.fix is not None and span.start >= position:
            parts += [response_text[position : span.start], span.fix]
            position = span.end
    return "".join(parts) + response_text[position:]
