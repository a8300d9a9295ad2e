"""The plan of a comparison: its runs, in the order in which they are made.

Methods with equal feedback share their engines and form a group. A group first searches the learning rates of its
trained methods, then makes the compared runs, then those under noise. Nothing is made here, and only method files are
read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from t2g.study.methods import NOISY, ComparisonPlan


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run of a method."""

    method: str
    seed: int
    lr: float | None = None  # a rate of the search; None: the chosen rate, if the method has one
    noise: str = ""  # name in compare.noise


@dataclass(frozen=True, kw_only=True)
class PlannedGroup:
    """The runs of methods that share their engines."""

    methods: tuple[str, ...]
    searches: tuple[PlannedRun, ...]  # one for each rate and search seed; at an end of the grid further rates are tried
    compared: tuple[PlannedRun, ...]
    noisy: tuple[PlannedRun, ...]


def plan_runs(plan: ComparisonPlan) -> tuple[PlannedGroup, ...]:
    """Return the groups of runs in order, () without seeds; the first group has the engines of the job's feedback."""
    if not plan.job.compare.seeds:
        return ()
    return tuple(plan_group(plan, names) for names in group_by_engines(plan))


def group_by_engines(plan: ComparisonPlan) -> list[list[str]]:
    """Group the methods by their feedback, the job's own first: only the engines of one group run at a time."""
    own_feedback = plan.reference.feedback.model_dump_json()
    groups: dict[str, list[str]] = {own_feedback: []}
    for name, method in plan.methods.items():
        if method.procedure == "base":
            continue
        method_job = plan.make_job(name, 0)
        feedback = method_job.feedback.model_dump_json()
        groups.setdefault(feedback, []).append(name)
    return [*groups.values()]


def plan_group(plan: ComparisonPlan, names: Sequence[str]) -> PlannedGroup:
    """Return the runs of methods that share their engines.

    Compared runs go seed by seed, so that a temporarily slower machine affects all methods.
    """
    config = plan.job.compare
    searches: list[PlannedRun] = []
    if len(config.lr_grid) > 1:
        for name in names:
            if plan.methods[name].is_trained:
                for lr in config.lr_grid:
                    searches += plan_search(plan, name, lr)

    compared = [PlannedRun(method=name, seed=seed) for seed, name in product(config.seeds, names)]
    noisy: list[PlannedRun] = []
    if set(NOISY) <= set(names):
        for noise, seed, name in product(config.noise, config.seeds, NOISY):
            noisy.append(PlannedRun(method=name, seed=seed, noise=noise))
    return PlannedGroup(
        methods=tuple(names), searches=tuple(searches), compared=tuple(compared), noisy=tuple(noisy)
    )  # fmt: skip


def plan_search(plan: ComparisonPlan, name: str, lr: float) -> list[PlannedRun]:
    """Return the runs that measure a learning rate of a method."""
    return [PlannedRun(method=name, seed=seed, lr=lr) for seed in plan.job.compare.search_seeds]
