"""Methods side by side: the same model, data, seeds, feedback and number of samples; tables, curves, compare.json.

    python -m jobs.compare --config configs/tiny/compare.yaml
    python -m jobs.compare --config configs/tiny/compare.yaml compare.methods=[scalar,my/method.yaml] compare.seeds=[1]

A method is a file of configs/methods, or one of your own. Each first chooses its learning rate from one grid on seeds
of its own, then runs on the seeds that are compared. With `compare.rewards` the reward models that the methods need are
trained first, over seeds of their own, and measured. Engines stay warm between runs. The same command again goes on
where it was, run by run; methods, seeds and noise may be added later. What the figures are is said in
`t2g.study.comparison`.
"""

import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import indent
from typing import TYPE_CHECKING, Any

from jobs.common.cli import StopFlag, main, stop_flag, stopped
from jobs.common.run_folder import begin_folder, sole_process
from t2g.config import CompareJob, FeedbackConfig, PolicyJob
from t2g.config.describe import describe as describe_config
from t2g.config.roles import roles
from t2g.errors import RunStopped, Stopped
from t2g.study.methods import NOISY, Arms, Scores, choose_lr

if TYPE_CHECKING:  # numpy, torch and Ray are imported by the functions that need them: --help must answer at once
    from actors.engines.rollout import RolloutFleet
    from actors.learner.learner import LearnerGroup
    from jobs.common.fleets import Fleets
    from jobs.common.policy_runs import PolicyData
    from jobs.common.reference_runs import Target
    from t2g.interfaces import FeedbackSource
    from t2g.study.comparison import Run

    Hook = Callable[[RolloutFleet, FeedbackSource, LearnerGroup], None]

logger = logging.getLogger(__name__)


def describe(job: CompareJob) -> str:
    """How many runs there are, and what one of them is."""
    check(arms := Arms(job))
    config = job.compare
    searched = len(arms.trained) * len(config.lr_grid) * len(config.search_seeds)
    searched *= len(config.lr_grid) > 1 and len(config.seeds) > 0
    compared = sum(method.procedure != "base" for method in arms.methods.values()) * len(config.seeds)
    noisy = len(config.noise) * len(NOISY) * len(config.seeds)
    lines = [f"{name}: {method.about}" for name, method in arms.methods.items()]
    if config.rewards:
        models = sorted({arms.reward_model(name) for name in arms.methods})
        lines.append(f"{len(models)} reward models on {len(config.rewards.seeds)} seeds: {', '.join(models)}")
    lines.append(
        f"{searched + compared + noisy:,} runs: {searched} to choose learning rates, {compared} that are compared, "
        f"{noisy} under noise\neach run:\n{indent(describe_config(job), '  ')}"
    )
    return "\n".join(lines)


def check(arms: Arms) -> None:
    """UserError, before any run, for methods that make no sense."""
    from t2g.study import baselines
    from t2g.tasks.base import get_task

    arms.check(get_task(arms.job.task).score_name)
    for name, method in arms.methods.items():
        if method.is_baseline:
            baselines.check(method.procedure, arms.arm(name, 0))


# ---------------------------------------------------------------------------------------------------------------- runs
@dataclass(frozen=True, kw_only=True)
class Session:
    """What all runs of one start share."""

    arms: Arms
    data: "PolicyData"
    stop: StopFlag

    def run(self, name: str, arm: PolicyJob, fleets: "Fleets", after: "Hook | None" = None) -> None:
        """The run, made now where it is not finished. Raises Stopped."""
        from jobs.common.baseline_stages import run_baseline
        from jobs.common.policy_runs import finished, train

        method, made_of = self.arms.methods[name], self.arms.made_of(name)
        if finished(arm, **made_of) is not None:
            return
        if self.stop:
            raise Stopped
        fleets.forget_answers()
        if method.is_baseline:
            feedback = fleets.feedback(arm.feedback, self.data.task, arm)
            run_baseline(arm, self.data, feedback, self.stop, **made_of)
        else:
            rollouts, feedback = fleets.for_policy(arm, self.data.task)
            hook = partial(after, rollouts, feedback) if after else lambda learner: None
            if train(arm, self.data, rollouts, feedback, self.stop, hook, **made_of) is None:
                raise Stopped
        shutil.rmtree(arm.run.folder / "checkpoints", ignore_errors=True)  # tens of runs; the numbers stay

    def find_lr(self, name: str, fleets: "Fleets") -> tuple[Scores, float]:
        """The scores of the search, and the learning rate that they choose."""

        def score_of(arm: PolicyJob) -> float | None:
            try:
                self.run(name, arm, fleets)
            except RunStopped as error:  # a rate that is too high must not end the comparison
                logger.warning("%s ended by itself: %s", arm.run.folder, error)
                return None
            shutil.rmtree(arm.run.folder / "policy", ignore_errors=True)
            return load_run(arm).score

        scores = self.arms.search_scores(name, score_of)
        return scores, choose_lr(scores) if scores else self.arms.job.compare.lr_grid[0]

    def run_arms(self, names: Sequence[str], chosen: dict[str, float], fleets: "Fleets", target: "Target") -> None:
        """Seed by seed, so that a machine that is slower for a while is slower for all methods."""
        from jobs.common.reference_runs import TARGETING_FILE

        for seed in self.arms.job.compare.seeds:
            for name in names:
                arm = self.arms.arm(name, seed, chosen.get(name))
                self.run(name, arm, fleets, partial(target.measure, arm))
                if self.arms.methods[name].trained and not (arm.run.folder / TARGETING_FILE).exists():
                    target.measure_exported(arm, fleets.feedback(arm.feedback, self.data.task, arm))

    def run_noise(self, chosen: dict[str, float], fleets: "Fleets") -> None:
        config = self.arms.job.compare
        for noise in config.noise:
            for seed in config.seeds:
                for name in NOISY:
                    self.run(name, self.arms.noisy(noise, name, seed, chosen[name]), fleets)


def engine_groups(arms: Arms) -> list[list[str]]:
    """Methods by the feedback that they need, the job's own first: only the engines of one group run at a time."""
    groups: list[tuple[FeedbackConfig, list[str]]] = [(arms.reference.feedback, [])]
    for name in (name for name, method in arms.methods.items() if method.procedure != "base"):
        own = arms.arm(name, 0).feedback
        names = next((names for feedback, names in groups if feedback == own), None)
        if names is None:
            groups.append((own, [name]))
        else:
            names.append(name)
    return [names for _, names in groups]


def run_all(session: Session) -> dict[str, Any]:
    """Every run that is not there yet; what the search found. Raises Stopped."""
    from jobs.common.fleets import Fleets
    from jobs.common.reference_runs import Target

    arms, config = session.arms, session.arms.job.compare
    search: dict[str, Any] = {"grid": config.lr_grid, "seeds": config.search_seeds, "scores": {}, "chosen": {}}
    target: Target | None = None
    for names in engine_groups(arms) if config.seeds else []:
        with Fleets() as fleets:
            target = target or Target(arms, session.data, fleets)
            for name in (name for name in names if name in arms.trained):
                scores, search["chosen"][name] = session.find_lr(name, fleets)
                search["scores"] |= {name: scores} if scores else {}
            session.run_arms(names, search["chosen"], fleets, target)
            if set(NOISY) <= set(names):
                session.run_noise(search["chosen"], fleets)
    return search


# ------------------------------------------------------------------------------------------------------------- figures
def load_run(arm: PolicyJob) -> "Run":
    """What a finished run wrote."""
    from jobs.common.reference_runs import TARGETING_FILE
    from t2g.runs.log import METRICS_FILE, read_records
    from t2g.study.comparison import read_run

    path = arm.run.folder / TARGETING_FILE
    targeting = json.loads(path.read_text()) if path.exists() else None
    return read_run((record for _, record in read_records(arm.run.folder / METRICS_FILE)), targeting)


def load_all(arms: Arms, chosen: dict[str, float]) -> "tuple[dict[str, dict[int, Run]], dict[str, Any]]":
    """Method -> seed -> run in the order of compare.methods; and the same by noise."""
    from t2g.study.comparison import base_run

    config, runs = arms.job.compare, {}
    for name, method in arms.methods.items() if config.seeds else ():
        measured = arms.trained[0] if method.procedure == "base" else name
        found = {s: load_run(arms.arm(measured, s, chosen.get(measured))) for s in config.seeds}
        runs[name] = {s: base_run(run) for s, run in found.items()} if method.procedure == "base" else found
    noise = {
        noise: {m: {s: load_run(arms.noisy(noise, m, s, chosen[m])) for s in config.seeds} for m in NOISY}
        for noise in config.noise
    }
    return runs, noise


def finish(arms: Arms, search: dict[str, Any], rewards: dict[str, Any]) -> None:
    """compare.json, compare.md, curves.svg and report.html; without seeds of policies the first two."""
    from t2g.files import write_atomic
    from t2g.report.comparison_page import write_comparison
    from t2g.runs.versions import versions
    from t2g.study.comparison import summarise, summarise_noise, tables

    runs, noise = load_all(arms, search["chosen"])
    summary = {
        "methods": summarise(runs),
        "noise": summarise_noise(noise),
        "rewards": rewards,
        "search": search,
        "config": arms.job.model_dump(mode="json"),
        "versions": versions(),
    }
    folder = arms.job.run.folder
    write_atomic(folder / "compare.json", json.dumps(summary, indent=1).encode())
    words = tables(summary)
    write_atomic(folder / "compare.md", f"{words}\n".encode())
    print(f"{words}\nnumbers: {folder / 'compare.json'}")
    if runs:
        write_comparison(folder, summary, runs)
        print(f"report: {folder / 'report.html'}")


# ------------------------------------------------------------------------------------------------------------- the job
def run(asked: CompareJob) -> int:
    """All runs, then the figures. 0 when done, 128 + its number when a signal ended it."""
    from jobs.common.fleets import Fleets, on_cluster
    from jobs.common.policy_runs import read_data
    from jobs.common.reward_arms import make_reward_models
    from jobs.common.stages import demo_of, make_reviser, make_stages, resolve_stages, reviser_job

    demo = demo_of(asked)
    job = resolve_stages(asked, demo)
    check(arms := Arms(job))
    revises = any(method.procedure in ("reflection", "ilf") for method in arms.methods.values())
    data, rewards = None if demo else read_data(job), {}
    with sole_process(job.run.folder):
        begin_folder(job)
        with on_cluster(job.cluster, roles(job)):
            if demo:
                with Fleets() as fleets:
                    make_stages(demo, fleets, reward=job.compare.rewards is None)
                if revises and job.compare.reviser == str(reviser_job(demo).run.folder / "model"):
                    make_reviser(demo)
                rewards = make_reward_models(arms, demo) if job.compare.rewards else {}
            stop = stop_flag()
            try:
                search = run_all(Session(arms=arms, data=data or read_data(job), stop=stop))
            except Stopped:
                return stopped(stop)
        finish(arms, search, rewards)
    return 0


if __name__ == "__main__":
    sys.exit(main(CompareJob, run, describe))
