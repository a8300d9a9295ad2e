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

from jobs.common.cli import main, stop_flag
from jobs.common.run_folder import begin_folder, sole_process
from t2g.config import CompareJob
from t2g.study.methods import NOISY, Arms


def describe(job: CompareJob) -> str:
    """Return the number of runs and the description of one."""
    check(arms := Arms(job))
    config = job.compare
    searched = len(arms.trained_methods) * len(config.lr_grid) * len(config.search_seeds)
    searched *= len(config.lr_grid) > 1 and len(config.seeds) > 0
    compared = sum(method.procedure != "base" for method in arms.methods.values()) * len(config.seeds)
    noisy = len(config.noise) * len(NOISY) * len(config.seeds)
    lines = [f"{name}: {method.about}" for name, method in arms.methods.items()]
    if config.rewards:
        models = sorted({arms.reward_model(name) for name in arms.methods})
        lines.append(f"reward models: {', '.join(models)}, each with seeds {', '.join(map(str, config.rewards.seeds))}")
    lines.append(
        f"{searched + compared + noisy:,} runs: {searched} or more to choose learning rates, {compared} that are "
        f"compared, {noisy} under noise\neach run:\n{indent(job.describe(), '  ')}"
    )
    return "\n".join(lines)


def check(arms: Arms) -> None:
    """Raise UserError, before any run, for invalid methods."""
    from t2g.study import baselines
    from t2g.tasks.base import get_task

    arms.check(get_task(arms.job.task).score_name)
    for name, method in arms.methods.items():
        if method.is_baseline:
            baselines.check(method.procedure, arms.arm(name, 0))


def run(unresolved: CompareJob, data: Any) -> None:
    """Make all runs, then the figures."""
    from jobs.common.comparison_runs import finish, make_reward_models, run_all
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_runs import read_data, run_references
    from jobs.common.stages import (
        FOLLOWER,
        REVISER,
        corrector_job,
        demo_of,
        make_corrector,
        make_stages,
        resolve_stages,
    )

    demo = demo_of(unresolved)
    job = resolve_stages(unresolved, demo)
    check(arms := Arms(job, str(demo.run.folder)) if demo else Arms(job))
    revises = any(method.procedure in ("reflection", "ilf") for method in arms.methods.values())
    policy_jobs = [arms.arm(name, 0) for name in arms.methods]
    models = {model for policy_job in (job, *policy_jobs) for model in policy_job.feedback.models}
    reward = "reward_model" in models and not job.compare.rewards
    rewards = {}
    with sole_process(job.run.folder):
        begin_folder(job)
        with on_cluster(job):
            if demo:
                with Fleets() as fleets:
                    make_stages(demo, fleets, reward=reward)
                used = {REVISER: job.compare.reviser if revises else None, FOLLOWER: job.model.policy}
                for name, model in used.items():
                    if model == str(corrector_job(demo, name).run.folder / "model"):
                        make_corrector(demo, name)
                rewards = make_reward_models(arms, demo) if job.compare.rewards else {}
            search = run_all(arms, run_references(job, data or read_data(job, policy_jobs)), stop_flag())
        finish(arms, search, rewards)


if __name__ == "__main__":
    sys.exit(main(CompareJob, run, describe, read="jobs.common.comparison_runs:read_policy_data"))
