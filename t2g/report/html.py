"""The report as one HTML file: no script, nothing fetched, every text escaped. Deliberately no numbers of its own.

Model output and critiques are untrusted: jinja2 escapes them, and the page's own policy forbids scripts and requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from t2g.files import write_atomic
from t2g.report.curves import DASHES, Series, line_chart
from t2g.report.segments import Segment, printable, segments
from t2g.runs import metrics as m
from t2g.runs.progress import duration
from t2g.types import Span, SpanFeedback

MAX_TEXT_CHARS = 4000
MAX_EXAMPLES = 24

Step = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with the response before and after training; None where there is no such response or no critique."""

    prompt: str
    before: str | None
    after: str | None
    feedback_before: SpanFeedback | None = None
    feedback_after: SpanFeedback | None = None


@dataclass(frozen=True, kw_only=True)
class Chart:
    title: str
    svg: Markup
    names: tuple[str, ...]  # in the order of the line styles
    level: str | None  # name of the dashed line


@dataclass(frozen=True, kw_only=True)
class Pane:
    """A text with marked spans; `cut` is the number of characters that are not shown."""

    segments: list[Segment]
    cut: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response with its critique, ready for the template."""

    title: str
    response: Pane
    critique: Pane | None  # None: nobody judged this response
    status: str
    source: str


def write_report(
    path: Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    arms: Mapping[str, Sequence[Step]],
    base: Mapping[str, float],
    examples: Sequence[Example],
    reward_model: Mapping[str, Any] | None,
    versions: Mapping[str, str],
    timing: Mapping[str, float],
) -> None:
    """Write the report of one run or of several arms, replacing an older one at once.

    summary: its plain values (no mappings) become the figures at the top. arms: name -> metrics by step, as in
    metrics.jsonl. base: held-out metrics of the policy before training, without `eval/`. reward_model: name -> share.
    timing: stage -> seconds. The first chart is of the held-out metric that eval/score repeats.
    """
    finals = {name: last_held_out(steps) for name, steps in arms.items()}
    metric = headline(base, finals)
    render_page(
        path,
        "template.html",
        title=title,
        dashes=DASHES,
        figures={name: value for name, value in summary.items() if not isinstance(value, Mapping | list | tuple)},
        metric=metric,
        base=base,
        finals=finals,
        rows=metric_rows(base, finals, first=metric),
        charts=charts(arms, base, metric),
        examples=[(pane(e.prompt, ()), answers(e)) for e in examples[:MAX_EXAMPLES]],
        num_left_out=max(0, len(examples) - MAX_EXAMPLES),
        reward_model=reward_model or {},
        versions=versions,
        timing=timing,
        longest_s=max(timing.values(), default=0) or 1,
    )


def render_page(path: Path, template: str, **values: Any) -> None:
    """Write the page that a template of this folder makes of `values`, replacing an older one at once."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["number"] = number
    environment.filters["seconds"] = duration
    environment.tests["figure"] = is_figure
    page = environment.get_template(template).render(**values)
    write_atomic(path, page.encode(errors="replace"))  # a lone surrogate has no UTF-8


def charts(arms: Mapping[str, Sequence[Step]], base: Mapping[str, float], metric: str | None) -> list[Chart]:
    """Held-out metric against samples, then token reward, KL and length against steps; those that have points."""
    wanted = [
        ("Mean token reward", m.STEP, m.TOKEN_REWARD, "step", "mean token reward"),
        ("KL to the reference", m.STEP, m.KL, "step", "nats per sequence"),
        ("Response length", m.STEP, m.LENGTH, "step", "tokens"),
    ]
    if metric is not None:
        wanted.insert(0, (f"Held-out {metric}", m.SAMPLES, m.EVAL + metric, "samples", metric))
    result = []
    for title, x, y, x_label, y_label in wanted:
        level = base.get(metric) if y == m.EVAL + str(metric) else None
        svg = line_chart([series(n, s, x, y) for n, s in arms.items()], x_label=x_label, y_label=y_label, level=level)
        if svg:
            result.append(Chart(title=title, svg=svg, names=tuple(arms), level=None if level is None else "base"))
    return result


def series(name: str, steps: Sequence[Step], x: str, y: str) -> Series:
    """One arm's line; step 0 has no samples yet, and a null is no point."""
    found = [(step.get(x, 0.0), step[y]) for step in steps if step.get(y) is not None]
    return Series(name=name, x=[a for a, _ in found], y=[b for _, b in found])


def last_held_out(steps: Sequence[Step]) -> dict[str, float]:
    """Held-out metrics of the last step that evaluated, without their prefix."""
    return next((found for step in reversed(steps) if (found := m.held_out(step))), {})


def headline(base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]]) -> str | None:
    """The metric that `score` repeats, else `score`, else the first there is."""
    known = [base, *finals.values()]
    names = [name for values in known for name in values if name != "score"]
    for name in names:
        if all(values.get(name) == values["score"] for values in known if "score" in values):
            return name
    return "score" if any("score" in values for values in known) else next(iter(names), None)


def metric_rows(
    base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]], *, first: str | None
) -> list[tuple[str, float | None, list[float | None]]]:
    """(metric, base, one value per arm), `first` on top; `score` is left out where it only repeats `first`."""
    names = dict.fromkeys([first] if first else [])
    names |= dict.fromkeys(name for values in (base, *finals.values()) for name in values)
    if first != "score":
        names.pop("score", None)
    return [(name, base.get(name), [values.get(name) for values in finals.values()]) for name in names]


def answers(example: Example) -> list[Answer]:
    both = (("Before", example.before, example.feedback_before), ("After", example.after, example.feedback_after))
    return [answer(title, text, feedback) for title, text, feedback in both if text is not None]


def answer(title: str, text: str, feedback: SpanFeedback | None) -> Answer:
    """Response and critique; a span and the phrase of the critique that speaks of it carry the same number."""
    if feedback is None:
        return Answer(title=title, response=pane(text, ()), critique=None, status="", source="")
    phrases = [
        Span(start=s.critique_range[0], end=s.critique_range[1], label=s.label) if s.critique_range else _NOWHERE
        for s in feedback.spans
    ]
    return Answer(
        title=title,
        response=pane(text, feedback.spans),
        critique=pane(feedback.critique, phrases),
        status=feedback.status,
        source=feedback.source,
    )


_NOWHERE = Span(start=0, end=0, label=1)


def pane(text: str, spans: Sequence[Span]) -> Pane:
    """The first MAX_TEXT_CHARS characters."""
    return Pane(segments=segments(printable(text[:MAX_TEXT_CHARS]), spans), cut=max(0, len(text) - MAX_TEXT_CHARS))


def is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(value: Any) -> str:
    """
    >>> number(0.71234), number(38.42), number(12800), number(1.0), number(None), number("span")
    ('0.712', '38.4', '12,800', '1.000', '–', 'span')
    """
    if value is None:
        return "–"
    if not is_figure(value):
        return str(value)
    decimals = 0 if isinstance(value, int) else 3 if abs(value) < 10 else 1
    return f"{value:,.{decimals}f}"
