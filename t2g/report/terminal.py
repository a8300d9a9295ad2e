"""Print the feedback on one response: the critique, the response with its spans marked, and a line for each span.

Model output is untrusted: control characters are replaced (`t2g.text.segments.printable`).
"""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from t2g.text.folds import Piece, split_folds
from t2g.text.segments import printable, segments
from t2g.types import PolicyTurn, Span, SpanFeedback

MAX_LINE_CHARS = 160
STYLES = {(True, False): "bold green", (False, True): "bold red", (True, True): "bold yellow"}  # (good, poor)
LABEL_SIGNS = {(True, False): "+", (False, True): "-", (True, True): "±"}


def show_feedback(console: Console, response: str, feedback: SpanFeedback, turns: Sequence[PolicyTurn] = ()) -> None:
    """Print the feedback on a response; spans are colored, or between marks on a console without colors.

    A long call of a tool, or a long result, is printed as its title, unless a span covers some of it.

    Without colors "about a laptop by Ann." is "about a [-laptop-] by [+Ann+].", and "about a [-laptop-]{phone} by ..."
    where the laptop has a fix.
    """
    colors = console.color_system is not None and not console.no_color
    critique = printable(feedback.critique) or "(no critique)"
    lines: list[str | Text] = [critique, "", mark_text(response, feedback, colors, turns), ""]
    in_order = sorted(feedback.spans, key=lambda span: span.start)
    lines += [span_line(span, response, feedback) for span in in_order]
    if not feedback.spans:
        lines.append("no spans")
    if feedback.num_located < feedback.num_quotes:
        missing = feedback.num_quotes - feedback.num_located
        lines.append(f"{missing} of {feedback.num_quotes} quotes are not in the response")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True, emoji=False)


def mark_text(response: str, feedback: SpanFeedback, colors: bool, turns: Sequence[PolicyTurn] = ()) -> Text:
    """Return the response with its good and poor spans in colors, or between marks, each followed by its fix.

    A part that is folded is its title between angle brackets.
    """
    text = Text()
    for piece in split_folds(response, feedback.spans, turns):
        if piece.title and not piece.is_judged:
            text.append(f"<{printable(piece.title)}>", "dim")
            continue
        _append_marked(text, piece, colors)
    return text


def _append_marked(text: Text, piece: Piece, colors: bool) -> None:
    for segment in segments(printable(piece.text), piece.spans):
        label = (segment.good, segment.poor)
        if colors or label not in LABEL_SIGNS:
            style = STYLES.get(label)
            if segment.is_struck:
                style = f"{style} strike"
            text.append(segment.text, style)
        else:
            mark = LABEL_SIGNS[label]
            text.append(f"[{mark}{segment.text}{mark}]")
        for fix in filter(None, segment.fixes):
            text.append(f"{{{printable(fix)}}}", "green")


def span_line(span: Span, response: str, feedback: SpanFeedback) -> str:
    """Format one span with its severity, its text and the phrase of the critique about it.

    >>> feedback = SpanFeedback(critique="It says laptop.", spans=(), status="ok", source="", version="")
    >>> span_line(Span(start=2, end=8, label=-1, severity=3, critique_range=(0, 15)), "a laptop", feedback)
    'poor, severity 3: "laptop" (It says laptop.)'
    """
    label = "good" if span.label == 1 else "poor"
    if span.criterion:
        label = f"{span.criterion}: {label}"
    text = response[span.start : span.end]
    strength = f"severity {span.severity}"
    if span.confidence < 1:
        strength += f", confidence {span.confidence:.2f}"
    line = f'{label}, {strength}: "{_one_line(text)}"'
    if span.fix is not None:
        line += f', should be "{_one_line(span.fix)}"'
    if span.critique_range is None:
        return line
    start, end = span.critique_range
    phrase = feedback.critique[start:end]
    return f"{line} ({_one_line(phrase)})"


def _one_line(text: str) -> str:
    line = " ".join(printable(text).split())
    if len(line) <= MAX_LINE_CHARS:
        return line
    return line[: MAX_LINE_CHARS - 1] + "…"
