"""Compute the figures of a comparison from what its runs wrote. Pure: curves in, summary and tables out.

A run's score is the mean of its last three held-out evaluations. A point of a smoothed curve is the mean of an
evaluation and the two before it, or of fewer at the start. The base policy's evaluation at step 0 is in no mean.
Scalar's best is the highest point of the smoothed curve of the scalar run with the same seed. Intervals are Student's t
over seeds, 95 %.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median
from typing import Any

import numpy as np

from t2g.errors import Diverged, UserError
from t2g.metrics import HELD_OUT_SCORE, KL, LENGTH, SAMPLES, STEP, STEP_S
from t2g.study.tables import NOTHING, Interval, format_figure, markdown, spread, t_interval

WINDOW = 3  # evaluations in a score, and in a point of a smoothed curve
SCALAR = "scalar"
TARGETING = ("criticised", "praised", "unmentioned", "difference", "matched", "returns", "retention", "choices_change")
KL_LEVELS = (0.5, 1.0, 2.0)  # nats a response at which scores are compared


@dataclass(frozen=True, kw_only=True)
class RunCurve:
    """A run's held-out evaluations in order, from step 0, and the durations of its steps."""

    samples: tuple[int, ...]  # responses sampled for training before each evaluation
    scores: tuple[float, ...]
    seconds: tuple[float, ...]  # seconds of the steps before each evaluation, without the evaluations
    step_seconds: float | None  # median duration of a step; None for a run without steps
    targeting: Mapping[str, Any] | None = None  # see t2g.study.targeting; None if not measured
    kls: tuple[float, ...] = ()  # KL of the policy to the reference at the first evaluations, nats a response
    lengths: tuple[float, ...] = ()  # lengths of the responses of the same steps, tokens

    @property
    def score(self) -> float:
        """Return the last point of the smoothed curve."""
        return self.smoothed[-1]

    @property
    def smoothed(self) -> tuple[float, ...]:
        base, *later = self.scores
        smoothed = [base]
        for end in range(1, len(later) + 1):
            window = later[max(0, end - WINDOW) : end]
            smoothed.append(mean(window))
        return tuple(smoothed)

    def first_at(self, level: float) -> int | None:
        """Return the index of the first evaluation at which the smoothed curve reaches `level`, or None."""
        for index, score in enumerate(self.smoothed):
            if score >= level:
                return index
        return None

    def score_at(self, level: float, values: Sequence[float]) -> float | None:
        """Return the score where `values`, kls or lengths, first reach `level`, or None if they never do.

        Evaluations are connected by lines:

            scores .6, .8, .9 at KL 0, 1, 3 -> .85 at 2
        """
        for (value, score), (next_value, next_score) in pairwise(zip(values, self.scores, strict=False)):
            is_crossed = value < level <= next_value or next_value <= level < value
            if is_crossed:
                share = (level - value) / (next_value - value)
                return score + (next_score - score) * share
        return None


def _check_evaluations(records: Sequence[Mapping[str, Any]], every: int) -> None:
    """Raise UserError if the last step, or a multiple of `every`, has no evaluation."""
    for record in records:
        step = record[STEP]
        is_evaluated = step % every == 0 or record is records[-1]
        if is_evaluated and HELD_OUT_SCORE not in record:
            raise UserError(
                f"a run was stopped in the evaluation of step {step} and lacks it, so that its score would be a mean "
                "of fewer evaluations than others: remove its folder, and the same command makes it again"
            )


def read_run(
    records: Sequence[Mapping[str, Any]], targeting: Mapping[str, Any] | None = None, *, every: int | None = None
) -> RunCurve:
    """Return a run from the lines of its metrics.jsonl.

    A baseline that trains once, on the samples of all steps, has one line for all steps. A step's KL is measured before
    its update, so that it belongs to the evaluation after the previous step; the last evaluation has none.

    Args:
        every: Steps between evaluations, to check that none is missing.

    Raises:
        UserError: The run has no held-out score, or lacks an evaluation.
        Diverged: An evaluation has none.
    """
    if every:
        _check_evaluations(records, every)
    samples: list[int] = []
    scores: list[float] = []
    times: list[float] = []
    kls: list[float] = []
    lengths: list[float] = []
    step_durations: list[float] = []
    seconds = 0.0
    last_step = 0
    for record in records:
        if len(kls) < len(scores) and record.get(KL) is not None:
            kls.append(float(record[KL]))
            lengths.append(float(record.get(LENGTH, 0.0)))
        if record.get(STEP_S) is not None:
            seconds += record[STEP_S]
            num_steps = record[STEP] - last_step
            step_durations.append(record[STEP_S] / num_steps)
        last_step = record[STEP]
        if HELD_OUT_SCORE in record:
            if record[HELD_OUT_SCORE] is None:  # without it the run would have fewer evaluations than others
                raise Diverged(
                    f"step {last_step} of a run has no {HELD_OUT_SCORE}, since no response had usable feedback: "
                    "compare by a task that can measure its responses, or with other feedback"
                )
            samples.append(int(record.get(SAMPLES, 0)))
            scores.append(float(record[HELD_OUT_SCORE]))
            times.append(seconds)
    if not scores:
        raise UserError("a run has no held-out score that can be compared: check its eval_data")
    return RunCurve(
        samples=tuple(samples),
        scores=tuple(scores),
        seconds=tuple(times),
        step_seconds=median(step_durations) if step_durations else None,
        targeting=targeting,
        kls=tuple(kls),
        lengths=tuple(lengths),
    )


def base_run(run: RunCurve) -> RunCurve:
    """Return the run of the base policy: step 0 of any run, at which no log-probability has changed."""
    curves = ("samples", "scores", "seconds", "kls", "lengths")
    first_points = {name: getattr(run, name)[:1] for name in curves}
    targeting = dict.fromkeys(TARGETING, 0.0) | {"returns": None}
    return replace(run, **first_points, step_seconds=None, targeting=targeting)


def summarize(runs: Mapping[str, Mapping[int, RunCurve]]) -> dict[str, dict[str, Any]]:
    """Return `methods` of compare.json, from method -> seed -> run."""
    scalar = runs.get(SCALAR)
    return {method: summarize_method(by_seed, scalar) for method, by_seed in runs.items()}


def summarize_method(by_seed: Mapping[int, RunCurve], scalar: Mapping[int, RunCurve] | None) -> dict[str, Any]:
    """Return the figures of one method, compared with the scalar runs of the same seeds if there are any."""
    runs = list(by_seed.values())
    scores_at_kl: dict[str, Interval | None] = {}
    for level in KL_LEVELS:
        scores = [run.score_at(level, run.kls) for run in runs]
        scores_at_kl[f"{level:g}"] = interval_of_all(scores)
    final_scores = [run.score for run in runs]
    summary: dict[str, Any] = {"score": t_interval(final_scores), "score_at_kl": scores_at_kl}
    summary["samples"] = max(run.samples[-1] for run in runs)
    summary["step_seconds"] = mean_known(run.step_seconds for run in runs)
    summary["targeting"] = summarize_targeting([run.targeting for run in runs])
    summary["by_seed"] = {seed: describe_run(run) for seed, run in by_seed.items()}
    if scalar is None:
        return summary
    reached: dict[int, dict[str, float | None]] = {}
    for seed, run in by_seed.items():
        reached[seed] = reach_scalar_best(run, scalar[seed])
        figures = summary["by_seed"][seed]
        figures["samples_to_scalar_best"] = reached[seed]["samples"]
        figures["seconds_to_scalar_best"] = reached[seed]["seconds"]
    return summary | subtract_scalar(by_seed, scalar) | summarize_reached(by_seed, reached)


def describe_run(run: RunCurve) -> dict[str, Any]:
    """Return `by_seed` of compare.json for one run."""
    return {
        "score": run.score,
        "step_seconds": run.step_seconds,
        "curve": {"samples": run.samples, "scores": run.scores, "kls": run.kls, "lengths": run.lengths},
        "targeting": run.targeting,
    }


def subtract_scalar(by_seed: Mapping[int, RunCurve], scalar: Mapping[int, RunCurve]) -> dict[str, Any]:
    """Return the differences of a method from the scalar runs of the same seeds."""
    differences = [run.score - scalar[seed].score for seed, run in by_seed.items()]
    at_equal: dict[str, Interval | None] = {}
    for name in ("kls", "lengths"):
        matched = [subtract_matched(run, scalar[seed], name) for seed, run in by_seed.items()]
        at_equal[name] = interval_of_all(matched)
    own_s = mean_known(run.step_seconds for run in by_seed.values())
    scalar_s = mean_known(run.step_seconds for run in scalar.values())
    overhead = own_s / scalar_s - 1 if own_s and scalar_s else None
    return {"minus_scalar": t_interval(differences), "minus_scalar_at_equal": at_equal, "overhead": overhead}


def summarize_reached(
    by_seed: Mapping[int, RunCurve], reached: Mapping[int, Mapping[str, float | None]]
) -> dict[str, Any]:
    """Return the means over seeds of `reach_scalar_best`."""
    samples = [value["samples"] for value in reached.values()]
    seconds = [value["seconds"] for value in reached.values()]
    shares = [value["share"] for value in reached.values()]
    return {
        "samples_to_scalar_best": mean_known(samples),
        "seconds_to_scalar_best": mean_known(seconds),
        "share_of_scalar_samples": mean_known(shares),
        "samples_to_scalar_best_censored": t_interval(restrict_samples(by_seed, reached)),
        "seeds_at_scalar_best": len(samples) - samples.count(None),
    }


def interval_of_all(values: Sequence[float | None]) -> Interval | None:
    """Return the interval of the values, or None if one of them is None."""
    numbers = [value for value in values if value is not None]
    return t_interval(numbers) if len(numbers) == len(values) else None


def subtract_matched(run: RunCurve, scalar: RunCurve, name: str) -> float | None:
    """Return the score less scalar's where each first has moved as far from the start as both ever do.

    None if the two end in different directions from the start, or a run does not move.

        scores .6, .9 at KL 0, 2; scalar's .6, .8 at KL 0, 1 -> .75 - .8

    Args:
        name: What is equal: kls or lengths.
    """
    own_values = np.array(getattr(run, name))
    scalar_values = np.array(getattr(scalar, name))
    sign = _direction(own_values)
    if sign == 0 or sign != _direction(scalar_values):
        return None
    own_distance = (sign * (own_values - own_values[0])).max()
    scalar_distance = (sign * (scalar_values - scalar_values[0])).max()
    distance = sign * min(own_distance, scalar_distance)
    own_score = _score_at_distance(run, own_values, distance)
    scalar_score = _score_at_distance(scalar, scalar_values, distance)
    if own_score is None or scalar_score is None:
        return None
    return own_score - scalar_score


def _direction(values: np.ndarray) -> float:
    """Return the sign of the last value less the first one, 0 without values."""
    if not len(values):
        return 0.0
    return float(np.sign(values[-1] - values[0]))


def _score_at_distance(run: RunCurve, values: np.ndarray, distance: float) -> float | None:
    # A rounded sum may lie beyond the farthest value.
    level = np.clip(values[0] + distance, values.min(), values.max())
    return run.score_at(float(level), values.tolist())


def restrict_samples(by_seed: Mapping[int, RunCurve], reached: Mapping[int, Mapping[str, float | None]]) -> list[float]:
    """Return each trained seed's samples to scalar's best, or all samples of its run if it never reaches that.

    Their mean is a restricted mean: a lower bound over all seeds. A mean over the seeds that reach it leaves seeds out.

        800 of 1,280 samples, and never in 1,280 -> 800, 1,280
    """
    samples: list[float] = []
    for seed, run in by_seed.items():
        if run.step_seconds is None:  # not trained
            continue
        reached_at = reached[seed]["samples"]
        samples.append(run.samples[-1] if reached_at is None else reached_at)
    return samples


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are."""
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None


def reach_scalar_best(run: RunCurve, scalar: RunCurve) -> dict[str, float | None]:
    """Return when `run` first reaches the best of the scalar run with its seed.

    Returns:
        samples, seconds, and share: the samples divided by those that the scalar run took. All are None if the run
        never reaches it, or is not trained.
    """
    best = max(scalar.smoothed)
    at = run.first_at(best)
    scalar_at = scalar.first_at(best)
    assert scalar_at is not None
    if run.step_seconds is None or at is None:
        return {"samples": None, "seconds": None, "share": None}
    samples = run.samples[at]
    scalar_samples = scalar.samples[scalar_at]
    share = samples / scalar_samples if scalar_samples else 1.0
    return {"samples": samples, "seconds": run.seconds[at], "share": share}


def summarize_targeting(measurements: Sequence[Mapping[str, Any] | None]) -> dict[str, Interval] | None:
    """Return means over seeds of the measurements of t2g.study.targeting, or None if a run has none."""
    known = [measurement for measurement in measurements if measurement is not None]
    if len(known) < len(measurements):
        return None
    means: dict[str, Any] = {}
    for name in TARGETING:
        values = [measurement.get(name) for measurement in known]
        numbers = [value for value in values if value is not None]
        means[name] = t_interval(numbers) if numbers else None
    return means


def summarize_noise(runs: Mapping[str, Mapping[str, Mapping[int, RunCurve]]]) -> dict[str, dict[str, Any]]:
    """Return `noise` of compare.json, from noise -> method -> seed -> run: scores, and their paired difference."""
    summary: dict[str, dict[str, Any]] = {}
    for name, by_method in runs.items():
        figures: dict[str, Any] = {}
        for method, by_seed in by_method.items():
            figures[method] = t_interval([run.score for run in by_seed.values()])
        span = by_method["span"]
        scalar = by_method[SCALAR]
        differences = [span[seed].score - scalar[seed].score for seed in span]
        figures["span_minus_scalar"] = t_interval(differences)
        summary[name] = figures
    return summary


# -------------------------------------------------------------------------------------------------------------- tables
COLUMNS = (
    "method", "lr", "held-out score", "less scalar", "at equal KL", "at 1 nat of KL", "samples to scalar's best",
    "share of scalar's", "seconds to it", "s a step", "overhead", "Δ log p criticised", "unmentioned",
    "matched difference", "criticism returns",
)  # fmt: skip
CONFIGURED_COLUMNS = {"retention": "retention", "choices_change": "right choices, change"}  # by figure
LEGEND = """\
Means over {seeds}, ± half the width of the 95 % interval (Student's t): over seeds of training prompts and sampling,
with one base policy, one set of held-out prompts, and the same feedback. Score: mean of a run's last three held-out
evaluations, {samples:,} samples of training each; dpo, ilf and reflection are evaluated once, at the end. lr: chosen
on other seeds and, where the held-out file has more than are reported on, on other prompts; * marks an end of what was
tried. Samples and seconds to scalar's best: until the smoothed curve (mean of three evaluations) is first as high as
scalar's of the same seed ever was, without evaluations. Of samples it is the restricted mean: a seed that never got
there (in brackets, how many did) counts with all the samples of its run, so that the figure is a lower bound; the
share of the samples that scalar took and the seconds are means over the seeds that got there. Seconds of dpo and ilf
hold the start of their training process. At equal KL: the difference to scalar, each where its KL first reaches the
smaller of the two runs' largest. At 1 nat of KL: the score where the KL to the base first is 1 nat a response, linear
between evaluations; none if a run never is there. Δ log p: change by training of the log-probability of the base's own
held-out responses, nats a token, where they were criticised and where they were not mentioned (praised tokens are in
neither). Matched difference: between those of the two that the base thought about as likely. A criticism returns when
the same quote is criticised in the new response to that prompt."""
REWARD_COLUMNS = (
    "labelled_share", "good_precision", "good_recall", "good_f1", "poor_precision", "poor_recall", "poor_f1",
    "decisive_good_f1", "decisive_poor_f1", "located_rate", "parse_rate",
)  # fmt: skip
REWARD_LEGEND = """\
Reward models, means over {seeds} ± half the width of the 95 % interval (Student's t). Labelled share: of the held-out
tokens, those with a gold label. Good and poor: on all tokens, against gold labels of the model's own kind, sparse or
dense. Decisive: on the tokens that the *sparse* gold calls good or poor (stated values, inventions), where all models
can be compared. Located: quotes that stand in the response. Parse rate: answers without guided decoding that are
JSON."""


def tables(summary: Mapping[str, Any]) -> str:
    """Return compare.json as Markdown: tables of methods, noise and reward models, each if there are any."""
    parts: list[str] = []
    if summary["methods"]:
        parts += _method_table(summary["methods"], summary["search"])
    if summary["noise"]:
        parts.append(_noise_table(summary["noise"], summary["methods"]))
    if summary["rewards"]:
        parts += _reward_table(summary["rewards"])
    return "\n\n".join(parts)


def _method_table(methods: Mapping[str, Any], search: Mapping[str, Any]) -> list[str]:
    """Return the table of methods and its legend."""
    measured = find_configured(methods)
    rows = []
    for name, figures in methods.items():
        lr = _format_lr(name, search)
        targeting = figures["targeting"] or {}
        configured = [spread(targeting.get(column)) for column in measured]
        rows.append((name, lr, *_cells(figures), *configured))
    samples = max(figures["samples"] for figures in methods.values())
    first = next(iter(methods.values()))
    legend = LEGEND.format(seeds=_count_seeds(first["by_seed"]), samples=samples)
    columns = (*COLUMNS, *(CONFIGURED_COLUMNS[name] for name in measured))
    return [markdown(columns, rows), legend]


def find_configured(methods: Mapping[str, Any]) -> list[str]:
    """Return those CONFIGURED_COLUMNS of which a trained method has figures."""
    measured: list[str] = []
    for name in CONFIGURED_COLUMNS:
        trained = [figures["targeting"] or {} for figures in methods.values() if figures["step_seconds"] is not None]
        if any(targeting.get(name) is not None for targeting in trained):
            measured.append(name)
    return measured


def _format_lr(method: str, search: Mapping[str, Any]) -> str:
    """Return a method's chosen learning rate, marked with * at an end of the grid."""
    lr = search["chosen"].get(method)
    if lr is None:
        return NOTHING
    grid = [float(tried) for tried in search["scores"].get(method, ())]
    is_end = bool(grid) and lr in (min(grid), max(grid))
    return f"{lr:g}*" if is_end else f"{lr:g}"


def _noise_table(noise: Mapping[str, Any], methods: Mapping[str, Any]) -> str:
    clean = {
        "span": methods["span"]["score"],
        SCALAR: methods[SCALAR]["score"],
        "span_minus_scalar": methods["span"]["minus_scalar"],
    }
    rows: list[list[str]] = []
    for name, scores in {"none": clean, **noise}.items():
        cells = [spread(scores[key]) for key in clean]
        rows.append([name, *cells])
    return markdown(("noise in the feedback", "span", "scalar", "span less scalar"), rows)


def _reward_table(rewards: Mapping[str, Any]) -> list[str]:
    """Return the table of reward models and its legend."""
    rows: list[list[str]] = []
    for model, by_seed in rewards.items():
        row = [model]
        for key in REWARD_COLUMNS:
            values = [metrics[key] for metrics in by_seed.values()]
            row.append(spread(t_interval(values)))
        rows.append(row)
    head = ("reward model", *(key.replace("_", " ") for key in REWARD_COLUMNS))
    first = next(iter(rewards.values()))
    return [markdown(head, rows), REWARD_LEGEND.format(seeds=_count_seeds(first))]


def _count_seeds(by_seed: Mapping[Any, Any]) -> str:
    return f"{len(by_seed)} seeds" if len(by_seed) > 1 else "1 seed"


def _format_reached(figures: Mapping[str, Any]) -> str:
    """Return the samples to scalar's best, with the number of seeds that got there."""
    censored_samples = figures.get("samples_to_scalar_best_censored") or {}
    reached = format_figure(censored_samples.get("mean"), ",.0f")
    if "seeds_at_scalar_best" not in figures:
        return reached
    num_reached = figures["seeds_at_scalar_best"]
    num_seeds = len(figures["by_seed"])
    if reached != NOTHING and num_reached < num_seeds:
        reached = f"at least {reached}"
    return f"{reached} ({num_reached} of {num_seeds})"


def _cells(figures: Mapping[str, Any]) -> list[str]:
    at_equal_kl = figures.get("minus_scalar_at_equal", {}).get("kls")
    scores = (figures["score"], figures.get("minus_scalar"), at_equal_kl, figures["score_at_kl"]["1"])
    cells = [spread(score) for score in scores]
    cells.append(_format_reached(figures))
    cells.append(format_figure(figures.get("share_of_scalar_samples"), ".0%"))
    cells.append(format_figure(figures.get("seconds_to_scalar_best"), ",.0f"))
    cells.append(format_figure(figures["step_seconds"], ",.2f"))
    cells.append(format_figure(figures.get("overhead"), "+.0%"))
    targeting = figures["targeting"] or {}
    cells += [spread(targeting.get(key)) for key in ("criticised", "unmentioned", "matched", "returns")]
    return cells
