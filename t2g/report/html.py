"""The report of a run or of several arms as one HTML file. Deliberately no numbers of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from t2g.report.curves import DASHES, Series, line_chart
from t2g.report.templates import render_page
from t2g.runs import metrics as m
from t2g.types import SpanFeedback

MAX_EXAMPLES = 24

Step = Mapping[str, Any]


class Answer(NamedTuple):
    """One response; without feedback where nobody judged it."""

    title: str
    text: str
    feedback: SpanFeedback | None = None


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt with responses to it, as before and after training."""

    prompt: str
    answers: Sequence[Answer]


def write_report(
    path: Path,
    *,
    title: str,
    summary: Mapping[str, Any],
    arms: Mapping[str, Sequence[Step]],
    examples: Sequence[Example],
) -> None:
    """Write the report of one run or of several arms, replacing an older one at once.

    summary: its plain values (no mappings) become the figures at the top. Read of it, where it has them: `base`,
    held-out metrics of the policy before training, without `eval/`; `reward_model`, name -> share; `timing`, stage ->
    seconds; `versions`. arms: name -> metrics by step, as in metrics.jsonl. The first chart is of the held-out metric
    that eval/score repeats.
    """
    base, timing = summary.get("base", {}), summary.get("timing", {})
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
        charts=list(charts(arms, base, metric)),
        examples=examples[:MAX_EXAMPLES],
        num_left_out=max(0, len(examples) - MAX_EXAMPLES),
        reward_model=summary.get("reward_model", {}),
        versions=summary.get("versions", {}),
        timing=timing,
        longest_s=max(timing.values(), default=0) or 1,
    )


def charts(
    arms: Mapping[str, Sequence[Step]], base: Mapping[str, float], metric: str | None
) -> Iterator[tuple[str, Markup, str | None]]:
    """Title, picture and name of the dashed line: the held-out metric against samples, then token reward, KL and length
    against steps; those that have points.
    """
    wanted = [
        ("Mean token reward", m.STEP, m.TOKEN_REWARD, "step", "mean token reward"),
        ("KL to the reference", m.STEP, m.KL, "step", "nats per sequence"),
        ("Response length", m.STEP, m.LENGTH, "step", "tokens"),
    ]
    if metric is not None:
        wanted.insert(0, (f"Held-out {metric}", m.SAMPLES, m.EVAL + metric, "samples", metric))
    for title, x, y, x_label, y_label in wanted:
        level = base.get(metric) if y == m.EVAL + str(metric) else None
        svg = line_chart([series(n, s, x, y) for n, s in arms.items()], x_label=x_label, y_label=y_label, level=level)
        if svg:
            yield title, svg, None if level is None else "base"


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
