"""The runs of a comparison, made unless they are finished, in the order of their plan.

The figures are described in `t2g.study.comparison` and `t2g.study.targeting`.
"""

import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets
from jobs.common.run_folder import check_folder
from jobs.compare.comparison_plan import PlannedGroup, PlannedRun, plan_runs, plan_search
from jobs.compare.comparison_report import TARGETING_FILE, load_run
from jobs.compare.reference_responses import ReferenceResponses
from jobs.train_policy.baseline_runs import run_baseline
from jobs.train_policy.policy_data import PolicyData, read_data
from jobs.train_policy.policy_results import load_finished_summary
from jobs.train_policy.policy_training import OnFinished, PolicyTraining
from t2g.config import CompareJob, PolicyJob
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import Diverged, Stopped
from t2g.files import write_json
from t2g.study.methods import MAX_WIDER, ComparisonPlan, Scores, choose_lr, next_lr
from t2g.study.result_lines import ResultLines
from t2g.tasks.references import check_references

DIVERGED_FILE = "diverged.json"
SEARCH_PROMPTS = "others"  # the search has other held-out prompts than those that are reported on

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Methods that share their engines. Each call makes the unfinished runs, and may raise Stopped."""

    plan: ComparisonPlan
    data: PolicyData
    search_data: PolicyData  # on which learning rates are chosen
    stop: StopFlag
    fleets: Fleets
    results: ResultLines  # lines of runs that are not made again

    def run(
        self,
        name: str,
        method_job: PolicyJob,
        references: ReferenceResponses | None = None,
        data: PolicyData | None = None,
    ) -> None:
        """Make a run unless it is finished, and measure it with `references`.

        A run on other held-out prompts, of the search, has its line in the file of results, too.
        """
        method = self.plan.methods[name]
        data = data or self.data
        has_other_prompts = data is not self.data
        identity_extras = self._identity_extras(name, method_job, data)

        if self.results.find(method_job, **identity_extras):
            print(f"{name}, seed {method_job.run.seed}: in {self.plan.job.compare.results}, and not made again")
            return
        summary = load_finished_summary(method_job, **identity_extras)
        if summary is None:
            if self.stop:
                raise Stopped
            summary = self._train(method_job, method.is_baseline, references, data, identity_extras)

        targeting_file = method_job.run.folder / TARGETING_FILE
        is_measured = targeting_file.exists()
        if references and method.is_trained and not is_measured:
            feedback = self.fleets.feedback(method_job.feedback, self.data.task, method_job)
            self._free_gpus(method_job)
            references.measure_exported(method_job, feedback)
        if (references or has_other_prompts) and self.plan.job.compare.results:
            seconds = summary["timing"]["wall_s"]
            self.results.append(name, method_job, load_run(method_job), seconds=seconds, **identity_extras)

    def _train(
        self,
        method_job: PolicyJob,
        is_baseline: bool,
        references: ReferenceResponses | None,
        data: PolicyData,
        identity_extras: dict[str, Any],
    ) -> dict[str, Any]:
        """Make a run and return its summary."""
        self.fleets.forget_answers()
        if is_baseline:
            feedback = self.fleets.feedback(method_job.feedback, self.data.task, method_job)
            self._free_gpus(method_job)
            summary = run_baseline(method_job, data, feedback, self.stop, **identity_extras)
        else:
            rollouts, feedback = self.fleets.for_policy(method_job, self.data.task)
            on_finished: OnFinished = partial(references.measure, method_job) if references else lambda *_: None
            training = PolicyTraining(
                config=method_job,
                data=data,
                rollouts=rollouts,
                feedback=feedback,
                stop=self.stop,
                on_finished=on_finished,
            )
            summary = training.run(**identity_extras)
        checkpoints = method_job.run.folder / "checkpoints"
        shutil.rmtree(checkpoints, ignore_errors=True)  # tens of runs; the numbers stay
        return summary

    def _free_gpus(self, method_job: PolicyJob) -> None:
        """End the policy's engines. A baseline starts its own, which need these GPUs."""
        if method_job.rollout.gpus:
            self.fleets.end_rollouts()

    def score(self, name: str, method_job: PolicyJob) -> float | None:
        """Make a run and return its score; None if it diverged."""
        folder = method_job.run.folder
        identity_extras = self._identity_extras(name, method_job, self.search_data)
        reason_file = folder / DIVERGED_FILE
        if reason_file.exists():
            check_folder(method_job, DIVERGED_FILE, **identity_extras)
            logger.warning("%s diverged before, and is not made again: remove the folder to try it once more", folder)
            return None
        try:
            self.run(name, method_job, data=self.search_data)
            run = self.results.find(method_job, **identity_extras) or load_run(method_job)
        except Diverged as error:
            logger.warning("a run of the rate search diverged: %s", error)
            write_json(reason_file, {"reason": str(error)})  # the next start does not make it again
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            return None
        shutil.rmtree(folder / "policy", ignore_errors=True)
        return run.score

    def _identity_extras(self, name: str, method_job: PolicyJob, data: PolicyData) -> dict[str, Any]:
        """Return the identity extras of a method on these held-out prompts."""
        extras = self.plan.identity_extras(name, method_job)
        if data is not self.data:
            extras |= {"held_out": SEARCH_PROMPTS}
        return extras

    def find_lr(self, name: str) -> tuple[Scores, float]:
        """Return the scores of the search, {} for a single rate, and the best learning rate."""
        config = self.plan.job.compare
        if len(config.lr_grid) == 1:
            return {}, config.lr_grid[0]
        scores: Scores = {}
        for lr in config.lr_grid:
            scores[lr] = self._score_rate(name, lr)
        for _ in range(MAX_WIDER):
            wider = next_lr(scores)
            if wider is None:
                break
            scores[wider] = self._score_rate(name, wider)
        return scores, choose_lr(scores)

    def _score_rate(self, name: str, lr: float) -> dict[int, float | None]:
        """Return the score of a learning rate for each seed of the search."""
        scores: dict[int, float | None] = {}
        for planned in plan_search(self.plan, name, lr):
            method_job = self.plan.search(name, planned.seed, lr)
            scores[planned.seed] = self.score(name, method_job)
        return scores

    def run_group(self, group: PlannedGroup, chosen: Mapping[str, float], references: ReferenceResponses) -> None:
        """Make the compared runs, which `references` measures, then those under noise."""
        for planned in group.compared:
            name = planned.method
            method_job = self.plan.make_job(name, planned.seed, chosen.get(name))
            self.run(name, method_job, references)
        for planned in group.noisy:
            name = planned.method
            method_job = self.plan.make_job(name, planned.seed, chosen[name], planned.noise)
            self.run(name, method_job)


def read_policy_data(job: CompareJob) -> PolicyData:
    """Return the data of all methods. Raise UserError if a method cannot use it."""
    plan = ComparisonPlan(job)
    configs = [plan.make_job(name, 0) for name in plan.methods]
    return read_data(job, configs)


def make_search_data(job: CompareJob, data: PolicyData) -> PolicyData:
    """Return the data with the held-out prompts that follow the reported ones, or with these if there are no others."""
    assert job.eval_data is not None
    config = job.eval_data
    max_prompt_tokens = job.rollout.max_prompt_tokens
    num_reported = job.eval.num_prompts
    records = load_records(config, "eval_data")[num_reported : 2 * num_reported]
    if not records:
        return data
    prompts = make_prompts(
        records, data.task, data.tokenizer, max_prompt_tokens, too_long=config.too_long, key="eval_data"
    )
    checked = check_references(prompts, data.task, job.feedback.sandbox, job.run.folder)
    return replace(data, eval_prompts=checked)


def run_all(plan: ComparisonPlan, data: PolicyData, stop: StopFlag) -> dict[str, Any]:
    """Make every unfinished run; return the results of the search. Raises Stopped."""
    config = plan.job.compare
    has_one_rate = len(config.lr_grid) == 1
    has_search = bool(config.seeds) and not has_one_rate
    search_data = make_search_data(plan.job, data) if has_search else data
    scores: dict[str, Scores] = {}
    chosen: dict[str, float] = {}
    search: dict[str, Any] = {
        "grid": config.lr_grid,
        "seeds": config.search_seeds,
        "scores": scores,
        "chosen": chosen,
        "prompts": "reported" if search_data is data else SEARCH_PROMPTS,
    }

    references: ReferenceResponses | None = None
    results = ResultLines(config)
    groups = plan_runs(plan)
    is_made = [has_one_rate and has_all(plan, group, results) for group in groups]
    for group, is_group_made in zip(groups, is_made, strict=True):
        trained = [name for name in group.methods if plan.methods[name].is_trained]
        # The first group has the engines of the reference, which measures the runs of the others as well.
        if is_group_made and (references or all(is_made)):
            if group.methods:
                print(f"{', '.join(group.methods)}: all runs are in {config.results}, and are not made again")
            chosen |= dict.fromkeys(trained, config.lr_grid[0])
            continue

        with Fleets() as fleets:
            session = Session(plan=plan, data=data, search_data=search_data, stop=stop, fleets=fleets, results=results)
            references = references or ReferenceResponses(plan, data, fleets)
            for name in trained:
                scores_by_lr, chosen[name] = session.find_lr(name)
                if scores_by_lr:
                    scores[name] = scores_by_lr
            session.run_group(group, chosen, references)
    return search


def has_all(plan: ComparisonPlan, group: PlannedGroup, results: ResultLines) -> bool:
    """Return whether the file of results has every compared run of a group, at the only learning rate."""
    config = plan.job.compare
    (only_lr,) = config.lr_grid

    def has(planned: PlannedRun) -> bool:
        name = planned.method
        lr = only_lr if plan.methods[name].is_trained else None
        method_job = plan.make_job(name, planned.seed, lr)
        result = results.find(method_job, **plan.identity_extras(name, method_job))
        return result is not None

    if config.noise:
        return False
    return all(map(has, group.compared))
