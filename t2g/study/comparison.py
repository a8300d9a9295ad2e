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

from t2g.errors import UserError
from t2g.study.tables import NOTHING, Interval, figure, interval, markdown, spread

WINDOW = 3  # evaluations in a score, and in a point of a smoothed curve
SCALAR = "scalar"
TARGETING = ("criticised", "praised", "unmentioned", "difference", "matched", "returns", "retention")
STEP, SAMPLES, SCORE, STEP_S = "step", "samples", "eval/score", "time/step_s"  # of t2g.runs.metrics
KL, LENGTH = "policy/kl", "response/length_mean"
KL_LEVELS = (0.5, 1.0, 2.0)  # nats a response at which scores are compared


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's held-out evaluations in order, from step 0, and the durations of its steps."""

    samples: tuple[int, ...]  # responses sampled for training before each evaluation
    scores: tuple[float, ...]
    seconds: tuple[float, ...]  # of the steps before each evaluation, without the evaluations
    step_seconds: float | None  # median duration of a step; None for a run without steps
    targeting: Mapping[str, Any] | None = None  # see t2g.study.targeting; None if not measured
    kls: tuple[float, ...] = ()  # of the policy at the first evaluations, to the reference, nats a response
    lengths: tuple[float, ...] = ()  # of the responses of the same steps, tokens

    @property
    def score(self) -> float:
        """Return the last point of the smoothed curve."""
        return self.smoothed[-1]

    @property
    def smoothed(self) -> tuple[float, ...]:
        base, *later = self.scores
        return base, *(mean(later[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(later)))

    def first_at(self, level: float) -> int | None:
        """Return the index of the first evaluation at which the smoothed curve reaches `level`, or None."""
        return next((i for i, score in enumerate(self.smoothed) if score >= level), None)

    def score_at(self, level: float, values: Sequence[float]) -> float | None:
        """Return the score where `values`, kls or lengths, first reach `level`, or None if they never do.

        Evaluations are connected by lines:

            scores .6, .8, .9 at KL 0, 1, 3 -> .85 at 2
        """
        for (value, score), (next_value, next_score) in pairwise(zip(values, self.scores, strict=False)):
            if value < level <= next_value or next_value <= level < value:
                return score + (next_score - score) * (level - value) / (next_value - value)
        return None


def read_run(records: Iterable[Mapping[str, Any]], targeting: Mapping[str, Any] | None = None) -> Run:
    """Return a run from the lines of its metrics.jsonl.

    A baseline that trains once, on the samples of all steps, has one line for all steps. A step's KL is measured before
    its update, so that it belongs to the evaluation after the previous step; the last evaluation has none.

    Raises:
        UserError: The run has no held-out score.
    """
    points, steps, kls, lengths, seconds, last = [], list[float](), list[float](), list[float](), 0.0, 0
    for record in records:
        if len(kls) < len(points) and record.get(KL) is not None:
            kls.append(float(record[KL]))
            lengths.append(float(record.get(LENGTH, 0.0)))
        if record.get(STEP_S) is not None:
            seconds += record[STEP_S]
            steps.append(record[STEP_S] / (record[STEP] - last))
        last = record[STEP]
        if record.get(SCORE) is not None:
            points.append((int(record.get(SAMPLES, 0)), float(record[SCORE]), seconds))
    if not points:
        raise UserError("a run has no held-out score that can be compared: check its eval_data")
    samples, scores, times = zip(*points, strict=True)
    step_seconds = median(steps) if steps else None
    return Run(
        samples=samples,
        scores=scores,
        seconds=times,
        step_seconds=step_seconds,
        targeting=targeting,
        kls=tuple(kls),
        lengths=tuple(lengths),
    )


def base_run(run: Run) -> Run:
    """Return the run of the base policy: step 0 of any run, at which no log-probability has changed."""
    return replace(
        run,
        samples=run.samples[:1],
        scores=run.scores[:1],
        seconds=run.seconds[:1],
        kls=run.kls[:1],
        lengths=run.lengths[:1],
        step_seconds=None,
        targeting=dict.fromkeys(TARGETING, 0.0) | {"returns": None},
    )


def summarise(runs: Mapping[str, Mapping[int, Run]]) -> dict[str, dict[str, Any]]:
    """Return `methods` of compare.json, from method -> seed -> run."""
    scalar = runs.get(SCALAR)
    return {method: summarise_method(by_seed, scalar) for method, by_seed in runs.items()}


def summarise_method(by_seed: Mapping[int, Run], scalar: Mapping[int, Run] | None) -> dict[str, Any]:
    """Return the figures of one method, compared with the scalar runs of the same seeds if there are any."""
    summary: dict[str, Any] = {
        "score": interval([run.score for run in by_seed.values()]),
        "score_at_kl": {f"{level:g}": summarise_at_kl(by_seed.values(), level) for level in KL_LEVELS},
        "samples": max(run.samples[-1] for run in by_seed.values()),
        "step_seconds": mean_known(run.step_seconds for run in by_seed.values()),
        "targeting": summarise_targeting([run.targeting for run in by_seed.values()]),
        "by_seed": {
            seed: {
                "score": run.score,
                "step_seconds": run.step_seconds,
                "curve": {"samples": run.samples, "scores": run.scores, "kls": run.kls, "lengths": run.lengths},
                "targeting": run.targeting,
            }
            for seed, run in by_seed.items()
        },
    }
    if scalar is None:
        return summary
    reached = {seed: reach(run, scalar[seed]) for seed, run in by_seed.items()}
    for seed, values in reached.items():
        summary["by_seed"][seed] |= {f"{name}_to_scalar_best": values[name] for name in ("samples", "seconds")}
    own_s, scalar_s = summary["step_seconds"], mean_known(run.step_seconds for run in scalar.values())
    return summary | {
        "minus_scalar": interval([run.score - scalar[seed].score for seed, run in by_seed.items()]),
        "minus_scalar_at_equal": {name: summarise_matched(by_seed, scalar, name) for name in ("kls", "lengths")},
        "samples_to_scalar_best": mean_known(r["samples"] for r in reached.values()),
        "seconds_to_scalar_best": mean_known(r["seconds"] for r in reached.values()),
        "share_of_scalar_samples": mean_known(r["share"] for r in reached.values()),
        "samples_to_scalar_best_censored": interval(censored(by_seed, reached)),
        "seeds_at_scalar_best": sum(r["samples"] is not None for r in reached.values()),
        "overhead": own_s / scalar_s - 1 if own_s and scalar_s else None,
    }


def summarise_at_kl(runs: Iterable[Run], level: float) -> Interval | None:
    """Return the mean score at a KL, or None if a run never has this KL."""
    scores = [run.score_at(level, run.kls) for run in runs]
    return None if None in scores else interval([score for score in scores if score is not None])


def summarise_matched(by_seed: Mapping[int, Run], scalar: Mapping[int, Run], name: str) -> Interval | None:
    """Return the mean of `subtract_matched` over seeds, or None if a seed has none."""
    differences = [subtract_matched(run, scalar[seed], name) for seed, run in by_seed.items()]
    return None if None in differences else interval([value for value in differences if value is not None])


def subtract_matched(run: Run, scalar: Run, name: str) -> float | None:
    """Return the score less scalar's where each first has moved as far from the start as both ever do.

    None if the two end in different directions from the start, or a run does not move.

        scores .6, .9 at KL 0, 2; scalar's .6, .8 at KL 0, 1 -> .75 - .8

    Args:
        name: What is equal: kls or lengths.
    """
    curves = [getattr(each, name) for each in (run, scalar)]
    signs = {np.sign(values[-1] - values[0]) if values else 0 for values in curves}
    if len(signs) != 1 or 0 in signs:
        return None
    (sign,) = signs
    farthest = min(max(sign * (value - values[0]) for value in values) for values in curves)
    # A rounded sum may lie beyond the farthest value.
    levels = [float(np.clip(values[0] + sign * farthest, min(values), max(values))) for values in curves]
    own, other = (each.score_at(*at) for each, at in zip((run, scalar), zip(levels, curves, strict=True), strict=True))
    return None if own is None or other is None else own - other


def censored(by_seed: Mapping[int, Run], reached: Mapping[int, Mapping[str, float | None]]) -> list[float]:
    """Return each trained seed's samples to scalar's best, or all samples of its run if it never reaches that.

    Their mean is a restricted mean: a lower bound over all seeds. A mean over the seeds that reach it leaves seeds out.

        800 of 1,280 samples, and never in 1,280 -> 800, 1,280
    """
    totals = {seed: run.samples[-1] for seed, run in by_seed.items() if run.step_seconds is not None}
    return [total if (at := reached[seed]["samples"]) is None else at for seed, total in totals.items()]


def mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if all are."""
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None


def reach(run: Run, scalar: Run) -> dict[str, float | None]:
    """Return when `run` first reaches the best of the scalar run with its seed.

    Returns:
        samples, seconds, and share: the samples divided by those that the scalar run took. All are None if the run
        never reaches it, or is not trained.
    """
    best = max(scalar.smoothed)
    at, scalar_at = run.first_at(best), scalar.first_at(best)
    assert scalar_at is not None
    if run.step_seconds is None or at is None:
        return {"samples": None, "seconds": None, "share": None}
    share = run.samples[at] / scalar.samples[scalar_at] if scalar.samples[scalar_at] else 1.0
    return {"samples": run.samples[at], "seconds": run.seconds[at], "share": share}


def summarise_targeting(measurements: Sequence[Mapping[str, Any] | None]) -> dict[str, Interval] | None:
    """Return means over seeds of the measurements of t2g.study.targeting, or None if a run has none."""
    if None in measurements:
        return None
    by_name = {name: [m[name] for m in measurements if m and m.get(name) is not None] for name in TARGETING}
    return {name: interval(values) if values else None for name, values in by_name.items()}


def summarise_noise(runs: Mapping[str, Mapping[str, Mapping[int, Run]]]) -> dict[str, dict[str, Any]]:
    """Return `noise` of compare.json, from noise -> method -> seed -> run: scores, and their paired difference."""
    summary: dict[str, dict[str, Any]] = {}
    for name, by_method in runs.items():
        span, scalar = by_method["span"], by_method[SCALAR]
        summary[name] = {method: interval([r.score for r in by.values()]) for method, by in by_method.items()}
        summary[name]["span_minus_scalar"] = interval([span[seed].score - scalar[seed].score for seed in span])
    return summary


# -------------------------------------------------------------------------------------------------------------- tables
COLUMNS = (
    "method", "lr", "held-out score", "less scalar", "at 1 nat of KL", "samples to scalar's best",
    "share of scalar's", "seconds to it", "s a step", "overhead", "Δ log p criticised", "unmentioned",
    "matched difference", "criticism returns",
)  # fmt: skip
LEGEND = """\
Means over {seeds}, ± half the width of the 95 % interval (Student's t): over seeds of prompts and sampling, with one
base policy and one reward model. Score: mean of a run's last three held-out evaluations, {samples:,} samples of
training each; dpo, ilf and reflection are evaluated once, at the end. lr: chosen on other seeds and, where the
held-out file has more than are reported on, on other prompts; * marks an end of what was tried. Samples and seconds to
scalar's best: until the smoothed curve (mean of three evaluations) is first as high as scalar's of the same seed ever
was, without evaluations. Of samples it is the restricted mean: a seed that never got there (in brackets, how many did)
counts with all the samples of its run, so that the figure is a lower bound; the share of the samples that scalar took
and the seconds are means over the seeds that got there. Seconds of dpo and ilf hold the start of their training
process. At 1 nat of KL: the score where the KL to the base first is 1 nat a response, linear between evaluations; none
if a run never is there. Δ log p: change by training of the log-probability of the base's own held-out responses, nats a
token, where they were criticised and where they were not mentioned (praised tokens are in neither). Matched difference:
between those of the two that the base thought about as likely. A criticism returns when the same quote is criticised in
the new response to that prompt."""
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
    parts = []
    if methods := summary["methods"]:
        search = summary["search"]
        grids = {name: [float(lr) for lr in search["scores"].get(name, ())] for name in search["chosen"]}
        ends = {name: (min(grid), max(grid)) if grid else () for name, grid in grids.items()}
        lrs = {name: f"{lr:g}{'*' if lr in ends[name] else ''}" for name, lr in search["chosen"].items()}
        rows = [(name, lrs.get(name, NOTHING), *_cells(figures)) for name, figures in methods.items()]
        samples = max(figures["samples"] for figures in methods.values())
        seeds = _seeds(next(iter(methods.values()))["by_seed"])
        parts += [markdown(COLUMNS, rows), LEGEND.format(seeds=seeds, samples=samples)]
    if summary["noise"]:
        clean = {name: methods[name]["score"] for name in ("span", SCALAR)}
        clean["span_minus_scalar"] = methods["span"]["minus_scalar"]
        noise = {"none": clean, **summary["noise"]}.items()
        rows = [(name, *(spread(scores[key]) for key in clean)) for name, scores in noise]
        parts.append(markdown(("noise in the feedback", "span", "scalar", "span less scalar"), rows))
    if rewards := summary["rewards"]:
        rows = [
            (model, *(spread(interval([metrics[key] for metrics in by_seed.values()])) for key in REWARD_COLUMNS))
            for model, by_seed in rewards.items()
        ]
        head = ("reward model", *(key.replace("_", " ") for key in REWARD_COLUMNS))
        parts += [markdown(head, rows), REWARD_LEGEND.format(seeds=_seeds(next(iter(rewards.values()))))]
    return "\n\n".join(parts)


def _seeds(by_seed: Mapping[Any, Any]) -> str:
    return f"{len(by_seed)} seed{'s' if len(by_seed) > 1 else ''}"


def _cells(figures: Mapping[str, Any]) -> list[str]:
    targeting = figures["targeting"] or {}
    reached = figure((figures.get("samples_to_scalar_best_censored") or {}).get("mean"), ",.0f")
    if "seeds_at_scalar_best" in figures:
        if reached != NOTHING and figures["seeds_at_scalar_best"] < len(figures["by_seed"]):
            reached = f"at least {reached}"
        reached += f" ({figures['seeds_at_scalar_best']} of {len(figures['by_seed'])})"
    return [
        spread(figures["score"]),
        spread(figures.get("minus_scalar")),
        spread(figures["score_at_kl"]["1"]),
        reached,
        figure(figures.get("share_of_scalar_samples"), ".0%"),
        figure(figures.get("seconds_to_scalar_best"), ",.0f"),
        figure(figures["step_seconds"], ",.2f"),
        figure(figures.get("overhead"), "+.0%"),
        *(spread(targeting.get(key)) for key in ("criticised", "unmentioned", "matched", "returns")),
    ]
