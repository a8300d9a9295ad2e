"""The charts of the report of a run: which metrics they show, with which lines and axes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from t2g import metrics as m
from t2g.report.curves import Series, legend_entries, line_chart
from t2g.report.held_out import Step

HIGH_SHARE = 0.5  # the axis of a share from here on ends at 1
LEAST_AXIS = 0.01  # no axis of a share is shorter


class Plot(NamedTuple):
    """Metrics that share a chart over the steps, with the unit of the first.

    The axis of a unit that begins with "share" includes 0, and 1 for a high share.
    """

    title: str
    metrics: tuple[str, ...]

    @property
    def unit(self) -> str:
        metric = m.find_metric(self.metrics[0])
        assert metric is not None
        return metric.unit or "mean over responses"


REWARDS = (
    Plot("Mean token reward", (m.TOKEN_REWARD,)),
    Plot("Mean reward of a response", (m.TOTAL_REWARD,)),
    Plot("Labelled tokens", (m.POOR_SHARE, m.GOOD_SHARE)),
    Plot("Prompts whose samples all earn the same", (m.ZERO_VARIANCE,)),
)
POLICY = (
    Plot("KL to the reference", (m.KL,)),
    Plot("Entropy of the policy", (m.ENTROPY,)),
    Plot("PPO-clipped tokens", (m.CLIP_SHARE,)),
)
RESPONSES = (
    Plot("Response length", (m.LENGTH,)),
    Plot("Turns", (m.TURNS,)),
    Plot("Truncated responses", (m.TRUNCATED_SHARE,)),
)
DURATIONS = (
    Plot("Idle", (m.IDLE_LEARNER, m.IDLE + "rollout", m.IDLE + "reward")),
    Plot("Time", (m.STEP_S, m.GENERATE_S, m.FEEDBACK_S, m.LEARN_S, m.SYNC_S)),
)
OVER_STEPS = (*REWARDS, *POLICY, *RESPONSES, *DURATIONS)


class Chart(NamedTuple):
    """A chart with points."""

    title: str
    svg: Markup
    level: str | None  # name of the dashed line
    legend: list[tuple[str, str]]  # names and classes of the lines


def charts(methods: Mapping[str, Sequence[Step]], base: Mapping[str, float], metric: str | None) -> Iterator[Chart]:
    """Yield each chart with points.

    The first charts are the held-out metric against samples and against the training reward: a line that falls on its
    right shows reward hacking. The charts of OVER_STEPS follow, with a line for each method, or for each metric of a
    single method, then those of outcome rewards and of the feedback function's metrics.
    """
    if metric is not None:
        yield from _held_out_charts(methods, metric, base.get(metric))
    logged = dict[str, None]()
    for steps in methods.values():
        for step in steps:
            logged |= dict.fromkeys(step)
    for plot in (*OVER_STEPS, *_criterion_plots(logged, len(methods)), *_number_plots(logged)):
        if len(methods) == 1:
            lines = _lines_of_metrics(plot, methods)
        else:
            plot, lines = _lines_of_methods(plot, methods)
        lines = [line for line in lines if line.ys]
        y_range: tuple[float, ...] = ()
        if plot.unit.startswith("share"):
            y_range = share_range(_values(lines))
        svg = line_chart(lines, x_label="step", y_label=plot.unit, y_range=y_range)
        if svg:
            yield Chart(plot.title, svg, None, legend_entries(lines))


def _held_out_charts(methods: Mapping[str, Sequence[Step]], metric: str, level: float | None) -> Iterator[Chart]:
    """Yield the held-out metric against samples, with the base policy as a dashed line, and against the reward."""
    key = m.EVAL + metric
    lines = [series(name, steps, m.SAMPLES, key) for name, steps in methods.items()]
    values = _values(lines)
    if level is not None:
        values.append(level)
    is_share = all(0 <= value <= 1 for value in values)
    y_range = share_range(values) if is_share else ()
    svg = line_chart(lines, x_label="samples of training", y_label=metric, level=level, y_range=y_range)
    if svg:
        level_name = None if level is None else "base"
        yield Chart(f"Held-out {metric}", svg, level_name, legend_entries(lines))

    by_reward = []
    for name, steps in methods.items():
        pairs = m.pair_evaluations(steps, key)
        by_reward.append(_line(name, pairs))
    svg = line_chart(by_reward, x_label="mean training reward of a response", y_label=metric)
    if svg:
        yield Chart(f"Held-out {metric} by training reward", svg, None, legend_entries(by_reward))


def _criterion_plots(logged: Iterable[str], num_methods: int) -> list[Plot]:
    """Return the plots of rewards by criterion: one for each criterion if there are several methods."""
    keys = [key for key in logged if key.startswith(m.CRITERION_REWARD)]
    if num_methods > 1:
        return [Plot(f"Reward of {_short_name(key)}", (key,)) for key in keys]
    if keys:
        return [Plot("Reward by criterion", tuple(keys))]
    return []


def _number_plots(logged: Iterable[str]) -> Iterator[Plot]:
    """Yield a plot for each outcome reward and for each metric of a feedback function."""
    for prefix, title in ((m.OUTCOME_REWARD, "Outcome reward"), (m.FEEDBACK_METRICS, "Metric")):
        for key in logged:
            if key.startswith(prefix):
                yield Plot(f"{title} {key.removeprefix(prefix)}", (key,))


def _lines_of_metrics(plot: Plot, methods: Mapping[str, Sequence[Step]]) -> list[Series]:
    """Return a line for each metric of a single method."""
    [(method, steps)] = methods.items()
    lines = []
    for key in plot.metrics:
        name = _short_name(key) if len(plot.metrics) > 1 else method
        lines.append(series(name, steps, m.STEP, key, by_label=True))
    return lines


def _lines_of_methods(plot: Plot, methods: Mapping[str, Sequence[Step]]) -> tuple[Plot, list[Series]]:
    """Return a line for each method, of the plot's first metric, and the plot with this metric in its title."""
    first = plot.metrics[0]
    lines = [series(name, steps, m.STEP, first) for name, steps in methods.items()]
    if len(plot.metrics) > 1:
        plot = plot._replace(title=f"{plot.title}: {_short_name(first)}")
    return plot, lines


def _short_name(key: str) -> str:
    """Return the name of a metric without its group.

    >>> _short_name("idle/learner")
    'learner'
    """
    return key.partition("/")[2]


def _values(lines: Sequence[Series]) -> list[float]:
    values: list[float] = []
    for line in lines:
        values += line.ys
    return values


def share_range(values: Iterable[float]) -> tuple[float, float]:
    """Return what the axis of a share includes: 0, and 1 for a high share. A small share has an axis of its own size.

    >>> share_range([0.2, 0.75]), share_range([0.01, 0.03]), share_range([])
    ((0.0, 1.0), (0.0, 0.03), (0.0, 0.01))
    """
    largest = max(values, default=0.0)
    if largest >= HIGH_SHARE:
        return 0.0, 1.0
    return 0.0, max(largest, LEAST_AXIS)


def series(name: str, steps: Sequence[Step], x_metric: str, y_metric: str, by_label: bool = False) -> Series:
    """Return the line of a method. Step 0 has no samples; a step without a value on either axis has no point.

    Args:
        by_label: A share of good tokens is green, a share of poor tokens red.
    """
    points = []
    for step in steps:
        point = (step.get(x_metric, 0.0), step.get(y_metric))
        if None not in point:
            points.append(point)
    label = _short_name(y_metric).partition("_")[0]
    style = label if by_label and label in ("good", "poor") else ""
    return _line(name, points, style)


def _line(name: str, points: Sequence[tuple[float, float]], style: str = "") -> Series:
    xs = [point[0] for point in points]
    ys = [point[1] for point in points]
    return Series(name=name, xs=xs, ys=ys, style=style)
