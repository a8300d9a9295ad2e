"""Held-out metrics of a report: the values before training and after each method, with intervals where known."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from t2g import metrics as m

NORMAL_95 = 1.96  # half of a 95 % interval, in standard errors
SCORE = m.HELD_OUT_SCORE.removeprefix(m.EVAL)
SCORE_ERROR = m.HELD_OUT_ERROR.removeprefix(m.EVAL)
Step = Mapping[str, Any]


class MetricEstimate(NamedTuple):
    """A held-out metric of one evaluation."""

    value: float | None
    error: float | None = None  # half its 95 % interval over the prompts; None: not known


class MetricRow(NamedTuple):
    """A held-out metric before training, and at the end of each method."""

    name: str
    base: MetricEstimate
    methods: dict[str, MetricEstimate]

    @property
    def has_error(self) -> bool:
        estimates = [self.base, *self.methods.values()]
        return any(estimate.error is not None for estimate in estimates)


def last_held_out(steps: Sequence[Step]) -> dict[str, float]:
    """Return the held-out metrics of the last step with an evaluation, without their prefix."""
    for step in reversed(steps):
        metrics = m.select_held_out(step)
        if metrics:
            return metrics
    return {}


def headline(base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]]) -> str | None:
    """Return the name of the metric that `score` repeats, else `score`, else the first metric."""
    evaluations = [base, *finals.values()]
    scored = [values for values in evaluations if SCORE in values]
    names = [name for name in chain(*evaluations) if name not in (SCORE, SCORE_ERROR)]
    for name in names:
        if all(values.get(name) == values[SCORE] for values in scored):
            return name
    if scored:
        return SCORE
    return next(iter(names), None)


def metric_rows(
    base: Mapping[str, float], finals: Mapping[str, Mapping[str, float]], *, first: str | None
) -> list[MetricRow]:
    """Return the rows of the metrics, `first` on top with its errors; without `score` if it only repeats `first`."""
    names = dict.fromkeys([first] if first else [])
    names |= dict.fromkeys(chain(base, *finals.values()))
    names.pop(SCORE_ERROR, None)
    if first != SCORE:
        names.pop(SCORE, None)
    rows = []
    for name in names:
        has_error = name == first
        before = estimate(base, name, has_error=has_error)
        after = {method: estimate(values, name, has_error=has_error) for method, values in finals.items()}
        rows.append(MetricRow(name, before, after))
    return rows


def estimate(values: Mapping[str, float], name: str, *, has_error: bool) -> MetricEstimate:
    """Return a metric of an evaluation; only the score's standard error is logged."""
    value = values.get(name)
    if not has_error or SCORE not in values:
        return MetricEstimate(value)
    error = values.get(SCORE_ERROR)
    if error is None:
        return MetricEstimate(value)
    return MetricEstimate(value, NORMAL_95 * error)
