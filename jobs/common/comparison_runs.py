"""The runs of a comparison, made where they are not there yet; then its figures, from what the runs wrote."""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from jobs.common.baseline_stages import run_baseline
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.common.policy_runs import PolicyData, finished, train
from jobs.common.reference_runs import TARGETING_FILE, Target
from t2g.config import PolicyJob
from t2g.errors import RunStopped, Stopped
from t2g.files import write_atomic
from t2g.interfaces import FeedbackSource
from t2g.report.comparison_page import write_comparison
from t2g.runs.log import METRICS_FILE, read_records
from t2g.runs.versions import versions
from t2g.study.comparison import Run, base_run, read_run, summarise, summarise_noise, tables
from t2g.study.methods import NOISY, Arms, Scores, choose_lr

Hook = Callable[[RolloutFleet, FeedbackSource, LearnerGroup], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Methods that share their engines. Each call makes the runs that are not finished; it raises Stopped."""

    arms: Arms
    data: PolicyData
    stop: StopFlag
    fleets: Fleets

    def run(self, name: str, arm: PolicyJob, after: Hook = lambda *_: None) -> None:
        method, made_of = self.arms.methods[name], self.arms.made_of(name)
        if finished(arm, **made_of) is not None:
            return
        if self.stop:
            raise Stopped
        self.fleets.forget_answers()
        if method.is_baseline:
            feedback = self.fleets.feedback(arm.feedback, self.data.task, arm)
            run_baseline(arm, self.data, feedback, self.stop, **made_of)
        else:
            rollouts, feedback = self.fleets.for_policy(arm, self.data.task)
            hook = partial(after, rollouts, feedback)
            if train(arm, self.data, rollouts, feedback, self.stop, hook, **made_of) is None:
                raise Stopped
        shutil.rmtree(arm.run.folder / "checkpoints", ignore_errors=True)  # tens of runs; the numbers stay

    def score(self, name: str, arm: PolicyJob) -> float | None:
        """None for a run that ended by itself: a rate that is too high must not end the comparison."""
        try:
            self.run(name, arm)
        except RunStopped as error:
            logger.warning("%s ended by itself: %s", arm.run.folder, error)
            return None
        shutil.rmtree(arm.run.folder / "policy", ignore_errors=True)
        return load_run(arm).score

    def find_lr(self, name: str) -> tuple[Scores, float]:
        """The scores of the search, {} where there is nothing to choose; and the learning rate that they choose."""
        config = self.arms.job.compare
        if len(config.lr_grid) == 1:
            return {}, config.lr_grid[0]
        scores: Scores = {
            lr: {seed: self.score(name, self.arms.search(name, seed, lr)) for seed in config.search_seeds}
            for lr in config.lr_grid
        }
        return scores, choose_lr(scores)

    def run_arms(self, names: Sequence[str], chosen: dict[str, float], target: Target) -> None:
        """Seed by seed, so that a machine that is slower for a while is slower for all methods."""
        config = self.arms.job.compare
        for seed, name in product(config.seeds, names):
            arm = self.arms.arm(name, seed, chosen.get(name))
            self.run(name, arm, partial(target.measure, arm))
            if self.arms.methods[name].trained and not (arm.run.folder / TARGETING_FILE).exists():
                target.measure_exported(arm, self.fleets.feedback(arm.feedback, self.data.task, arm))
        if set(NOISY) <= set(names):
            for noise, seed, name in product(config.noise, config.seeds, NOISY):
                self.run(name, self.arms.arm(name, seed, chosen[name], noise))


def engine_groups(arms: Arms) -> list[list[str]]:
    """Methods by the feedback that they need, the job's own first: only the engines of one group run at a time."""
    groups: dict[str, list[str]] = {arms.reference.feedback.model_dump_json(): []}
    for name, method in arms.methods.items():
        if method.procedure != "base":
            groups.setdefault(arms.arm(name, 0).feedback.model_dump_json(), []).append(name)
    return [*groups.values()]


def run_all(arms: Arms, data: PolicyData, stop: StopFlag) -> dict[str, Any]:
    """Every run that is not there yet; what the search found. Raises Stopped."""
    config = arms.job.compare
    search: dict[str, Any] = {"grid": config.lr_grid, "seeds": config.search_seeds, "scores": {}, "chosen": {}}
    target: Target | None = None
    for names in engine_groups(arms) if config.seeds else []:
        with Fleets() as fleets:
            session = Session(arms=arms, data=data, stop=stop, fleets=fleets)
            target = target or Target(arms, data, fleets)
            for name in (name for name in names if arms.methods[name].trained):
                scores, search["chosen"][name] = session.find_lr(name)
                search["scores"] |= {name: scores} if scores else {}
            session.run_arms(names, search["chosen"], target)
    return search


# ------------------------------------------------------------------------------------------------------------- figures
def load_run(arm: PolicyJob) -> Run:
    """What a finished run wrote."""
    path = arm.run.folder / TARGETING_FILE
    targeting = json.loads(path.read_text()) if path.exists() else None
    return read_run((record for _, record in read_records(arm.run.folder / METRICS_FILE)), targeting)


def load_all(arms: Arms, chosen: dict[str, float]) -> tuple[dict[str, dict[int, Run]], dict[str, Any]]:
    """Method -> seed -> run in the order of compare.methods; and the same by noise."""
    config = arms.job.compare

    def load(name: str, noise: str = "") -> dict[int, Run]:
        if arms.methods[name].procedure == "base":
            return {seed: base_run(run) for seed, run in load(arms.trained[0]).items()}
        return {seed: load_run(arms.arm(name, seed, chosen.get(name), noise)) for seed in config.seeds}

    runs = {name: load(name) for name in arms.methods} if config.seeds else {}
    return runs, {noise: {name: load(name, noise) for name in NOISY} for noise in config.noise}


def finish(arms: Arms, search: dict[str, Any], rewards: dict[str, Any]) -> None:
    """compare.json, compare.md, curves.svg and report.html; without seeds of policies the first two."""
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
