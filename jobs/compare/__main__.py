"""Train by several methods on the same model, data, seeds and feedback, and compare them.

    python -m jobs.compare --config configs/tiny/compare.yaml
    python -m jobs.compare --config configs/tiny/compare.yaml 'compare.methods=[scalar,my/method.yaml]' \\
        'compare.seeds=[1]'

A method is a file of configs/methods, or one of your own. Each first chooses its learning rate from one grid on seeds
of its own, then runs on the seeds that are compared. With `compare.rewards` the reward models that the methods need are
trained first, over seeds of their own, and measured. Engines stay warm between runs. The same command again goes on
where it was, run by run; methods, seeds and noise may be added later. The figures are described in
`t2g.study.comparison`.
"""

import sys
from textwrap import indent
from typing import Any

from jobs.common.cli import install_stop_flag, main
from jobs.common.run_folder import begin_folder, sole_process
from jobs.compare.comparison_plan import plan_runs
from t2g.config import CompareJob, DemoJob, PolicyJob
from t2g.config.describe import format_count
from t2g.study.methods import ComparisonPlan


def describe(job: CompareJob) -> str:
    """Return the number of runs and the description of one."""
    plan = ComparisonPlan(job)
    check(plan)
    config = job.compare
    groups = plan_runs(plan)
    searched = sum(len(group.searches) for group in groups)
    compared = sum(len(group.compared) for group in groups)
    noisy = sum(len(group.noisy) for group in groups)
    total = searched + compared + noisy
    lines = [f"{name}: {method.about}" for name, method in plan.methods.items()]
    if config.rewards:
        models = sorted({plan.reward_model(name) for name in plan.methods})
        seeds = ", ".join(map(str, config.rewards.seeds))
        lines.append(f"reward models: {', '.join(models)}, each with seeds {seeds}")
    length = f" in {format_count(config.search_steps, 'step')}" if config.search_steps else ""
    lines.append(
        f"{total:,} runs: {searched} or more to choose learning rates{length}, {compared} that are "
        f"compared, {noisy} under noise\neach run:\n{indent(job.describe(), '  ')}"
    )
    return "\n".join(lines)


def check(plan: ComparisonPlan) -> None:
    """Raise UserError, before any run, for invalid methods."""
    from t2g.study import baselines
    from t2g.tasks.base import get_task

    plan.check(get_task(plan.job.task).score_name)
    for name, method in plan.methods.items():
        if method.is_baseline:
            baselines.check(method.procedure, plan.make_job(name, 0))


def check_start(job: CompareJob) -> None:
    """Refuse, before anything is started, folders that were made with other inputs. Nothing is written.

    The folder of a comparison on artifacts that are not made yet is checked once they are.

    Raises:
        UserError: A folder has other inputs, see `identity.check_identity`.
    """
    from jobs.artifacts.demo_artifacts import check_demo_artifacts, demo_of
    from jobs.common.run_folder import check_methods_folder, check_own_folder

    check_methods_folder(job.run.folder)
    demo = demo_of(job)
    if demo is None or check_demo_artifacts(demo, reward=False):
        check_own_folder(job)


def run(job: CompareJob, data: Any) -> None:
    """Make all runs, then the figures."""
    from jobs.compare.comparison_report import finish
    from jobs.compare.comparison_rewards import make_comparison_artifacts
    from jobs.compare.comparison_runs import run_all
    from jobs.train_policy.prepared import prepare_job

    plan = ComparisonPlan(job)
    check(plan)
    rewards: dict[str, Any] = {}

    def make_artifacts(_: PolicyJob, demo: DemoJob) -> None:
        rewards.update(make_comparison_artifacts(plan, demo))

    methods = [plan.make_job(name, 0) for name in plan.methods]
    with sole_process(job.run.folder):
        begin_folder(job)
        with prepare_job(job, data, methods=methods, make_artifacts=make_artifacts) as checked:
            search = run_all(plan, checked, install_stop_flag())
        finish(plan, search, rewards)


if __name__ == "__main__":
    sys.exit(main(CompareJob, run, describe, read="jobs.compare.comparison_runs:read_policy_data", check=check_start))
