"""The plan of a comparison: which runs, in which order. No engine, no data and no run folder is needed."""

from pathlib import Path

import pytest

from jobs.compare.comparison_plan import PlannedRun, group_by_engines, plan_runs
from t2g.config import CompareJob, loading
from t2g.study.methods import ComparisonPlan

CONFIGS = Path(__file__).parents[2] / "configs" / "tiny"


def plan_of(root: Path, *overrides: str, config: str = "compare.yaml") -> ComparisonPlan:
    job = loading.load(CompareJob, CONFIGS / config, [f"run.root={root}", *overrides], environ={})
    return ComparisonPlan(job)


def test_methods_are_grouped_by_the_engines_that_they_need(tmp_path: Path) -> None:
    assert group_by_engines(plan_of(tmp_path, config="compare_more.yaml")) == [
        ["reflection", "scalar", "dpo", "ilf", "span"], ["no_critique"], ["dense"],
    ]  # fmt: skip


def test_a_group_searches_then_compares_seed_by_seed_then_adds_noise(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path, "compare.methods=[sft, scalar, span]", "compare.lr_grid=[0.1, 0.2]", "compare.seeds=[1, 2]",
        "compare.search_seeds=[101, 102]", "compare.noise={some: {flip: 0.1}}",
    )  # fmt: skip
    (group,) = plan_runs(plan)
    assert group.methods == ("scalar", "span")  # sft is not trained: a run's step 0 measures it
    expected = [(method, lr, seed) for method in ("scalar", "span") for lr in (0.1, 0.2) for seed in (101, 102)]
    assert [(run.method, run.lr, run.seed) for run in group.searches] == expected
    assert group.compared == (
        PlannedRun(method="scalar", seed=1), PlannedRun(method="span", seed=1),
        PlannedRun(method="scalar", seed=2), PlannedRun(method="span", seed=2),
    )  # fmt: skip
    assert [(run.noise, run.seed, run.method) for run in group.noisy] == [
        ("some", 1, "span"), ("some", 1, "scalar"), ("some", 2, "span"), ("some", 2, "scalar"),
    ]  # fmt: skip


def test_only_trained_methods_are_searched_and_only_one_group_has_noise(tmp_path: Path) -> None:
    groups = plan_runs(plan_of(tmp_path, config="compare_more.yaml"))
    searched: list[list[str]] = []
    for group in groups:
        methods = [run.method for run in group.searches]
        searched.append(list(dict.fromkeys(methods)))
    assert searched == [["scalar", "dpo", "ilf", "span"], ["no_critique"], ["dense"]]
    assert [bool(group.noisy) for group in groups] == [True, False, False]
    num_runs = sum(len(group.searches) + len(group.compared) + len(group.noisy) for group in groups)
    assert num_runs == 63


@pytest.mark.parametrize(
    ("override", "expected"), [("compare.lr_grid=[0.1]", [(0, 40, 0)]), ("compare.lr_grid=[0.1, 0.2]", [(20, 40, 0)])]
)
def test_a_single_rate_is_not_searched(tmp_path: Path, override: str, expected: list[tuple[int, int, int]]) -> None:
    groups = plan_runs(plan_of(tmp_path, override))
    assert [(len(group.searches), len(group.compared), len(group.noisy)) for group in groups] == expected


def test_without_seeds_nothing_is_run(tmp_path: Path) -> None:
    assert plan_runs(plan_of(tmp_path, config="reward_study.yaml")) == ()


def test_a_plan_is_the_same_each_time(tmp_path: Path) -> None:
    first = plan_runs(plan_of(tmp_path / "a", config="compare_more.yaml"))
    assert plan_runs(plan_of(tmp_path / "b", config="compare_more.yaml")) == first
