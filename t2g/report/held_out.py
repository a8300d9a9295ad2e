"""Held-out metrics of a report: the values before training and at the end of each arm, with intervals where known."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from t2g.runs import metrics as m

NORMAL_95 = 1.96  # half of a 95 % interval, in standard errors
SCORE = m.HELD_OUT_SCORE.removeprefix(m.EVAL)
SCORE_ERROR = m.HELD_OUT_ERROR.removeprefix(m.EVAL)
Step = Mapping[str, Any]


class Estimate(NamedTuple):
    """A held-out metric of one evaluation."""

    value: float | None
    error: float | None = None  # half its 95 % interval over the prompts; None: not known


class MetricRow(NamedTuple):
    """A held-out metric before training, and at the end of each arm."""

    name: str
    base: Estimate
    arms: dict[str, Estimate]


def last_held_out(steps: Sequence[Step]) -> dict[str, float]:
    """Return the held-out metrics of the last step with an evaluation, without their prefix."""
    return next((metrics for step in reversed(steps) if (metrics := m.select_held_out(step))), {})


def headline(base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return the name of the metric that `score` repeats, else `score`, else the first metric."""
    evaluations = [base, *finals.values()]
    names = [name for values in evaluations for name in values if name not in (SCORE, SCORE_ERROR)]
    for name in names:
        if all(values.get(name) == values[SCORE] for values in evaluations if SCORE in values):
            return name
    return SCORE if any(SCORE in values for values in evaluations) else next(iter(names), None)


def metric_rows(
    base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]], *, first: str | None
) -> list[MetricRow]:
    """Return the rows of the metrics, `first` on top with its errors; without `score` if it only repeats `first`."""
    names = dict.fromkeys([first] if first else [])
    names |= dict.fromkeys(name for values in (base, *finals.values()) for name in values)
    names.pop(SCORE_ERROR, None)
    if first != SCORE:
        names.pop(SCORE, None)
    rows = []
    for name in names:
        of_arms = {arm: estimate(values, name, has_error=name == first) for arm, values in finals.items()}
        rows.append(MetricRow(name, estimate(base, name, has_error=name == first), of_arms))
    return rows


def estimate(values: Mapping[str, float], name: str, *, has_error: bool) -> Estimate:
    """Return a metric of an evaluation; only the score's standard error is logged."""
    error = values.get(SCORE_ERROR) if has_error and SCORE in values else None
    return Estimate(values.get(name), None if error is None else NORMAL_95 * error)
