"""The runs of a comparison, made unless they are finished, and its figures, from the files of the runs.

Reward models are compared too: one for each style that the methods need, over seeds. All learn from the responses of
the demo's artifacts, judged by the tiny world's feedback function, and are measured on the same held-out ones; a seed
decides the initial weights and the order of the records. The figures are described in `t2g.study.reward_eval`, of
policies in `t2g.study.comparison` and `t2g.study.targeting`.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from actors.engines.rollout import RolloutFleet
from actors.learner.learner import LearnerGroup
from jobs.artifacts.demo_artifacts import (
    FOLLOWER,
    REVISER,
    base_model,
    corrector_job,
    load_or_run,
    make_corrector,
    make_demo_artifacts,
    positions,
    reward_job,
)
from jobs.common.cli import StopFlag
from jobs.common.fleets import Fleets, loaded_learner, wait_for_engines
from jobs.compare.comparison_report import TARGETING_FILE, load_run
from jobs.train_policy.baseline_runs import run_baseline
from jobs.train_policy.policy_data import PolicyData, read_data
from jobs.train_policy.policy_results import finished
from jobs.train_policy.policy_training import OnFinished, PolicyTraining, learner_spec, make_rollout_source
from jobs.train_reward import reward_models
from t2g.config import CompareJob, DemoJob, PolicyJob, RewardJob, StyleConfig, with_overrides
from t2g.data.buffer import Group, read_groups, write_groups
from t2g.data.load import load_records
from t2g.data.prompts import make_prompts
from t2g.errors import Diverged, Stopped
from t2g.feedback.parse import read_judgement
from t2g.feedback.records import AnnotatedRecord, load_annotated, make_annotated_record, write_annotated
from t2g.files import write_atomic
from t2g.interfaces import FeedbackSource
from t2g.loop.sampling import make_sampling
from t2g.sandbox import SandboxConfig
from t2g.study import targeting
from t2g.study.baselines import POLICY
from t2g.study.methods import MAX_WIDER, NOISY, ComparisonPlan, Scores, choose_lr, next_lr
from t2g.study.result_lines import ResultLines
from t2g.study.retention import measure_retention, read_texts
from t2g.study.reward_eval import measure_method
from t2g.tasks.base import get_task
from t2g.tasks.references import check_references
from t2g.text.tokenizer import load_tokenizer
from t2g.types import JudgedResponse

SEARCH_POSTS = "others"  # than those that are reported on

logger = logging.getLogger(__name__)


# ---------------------------------------------------------------------------------------------------------- reference
class ReferenceResponses:
    """Judged responses of the base to held-out prompts, sampled now or in an earlier start.

    `fleets` has engines with the weights of the base.
    """

    def __init__(self, plan: ComparisonPlan, data: PolicyData, fleets: Fleets) -> None:
        job = plan.reference
        num_prompts = job.eval.num_prompts
        prompts = data.eval_prompts[:num_prompts]
        folder = job.run.folder
        samples = folder / "samples"
        self._tokenizer = data.tokenizer
        self._sampling = make_sampling(job, "reference", 0, num_samples=1)
        self._source = partial(make_rollout_source, job, data)

        def make() -> dict[str, Any]:
            rollouts, feedback = fleets.for_policy(job, data.task)
            wait_for_engines(feedback.fleet, rollouts)
            source = self._source(rollouts)
            sampling = targeting.sample_and_judge(prompts, source, feedback, self._sampling)
            judged = asyncio.run(sampling)

            shutil.rmtree(samples, ignore_errors=True)  # left by a start that was cut short
            folder.mkdir(parents=True, exist_ok=True)
            groups: list[Group] = []
            for response in judged:
                sample = (response.rollout, response.feedback)
                group = Group(prompt=response.prompt, samples=(sample,))
                groups.append(group)
            write_groups(samples, {0: groups})
            return {}

        load_or_run(folder, job, make)
        prompts_by_id = {prompt.prompt_id: prompt for prompt in prompts}
        groups = read_groups(samples, prompts_by_id)[0]
        self.responses = [JudgedResponse(group.prompt, *group.samples[0]) for group in groups]
        self._retained = read_texts(plan.job.compare.retention, data.tokenizer, job.rollout.max_model_len)

    def measure(
        self, method_job: PolicyJob, rollouts: RolloutFleet, feedback: FeedbackSource, learner: LearnerGroup
    ) -> None:
        """Measure what a run changed, into its folder. Engines and learner have the trained weights."""
        measured = self._compute_logprobs(learner, has_reference=True)
        self._write(method_job, measured, rollouts, feedback)

    def measure_exported(self, method_job: PolicyJob, feedback: FeedbackSource) -> None:
        """Measure a run without a learner of ours, from its exported policy."""
        changes = {
            "model.policy": str(method_job.run.folder / POLICY),
            "model.revision": None,
            "learner.lora": None,  # merged when it was exported
            "objective.advantages": "group",  # no critic takes part
        }
        exported = with_overrides(method_job, changes)
        placement_timeout_s = method_job.cluster.placement_timeout_s
        spec = replace(learner_spec(exported), loss="none")  # neither a reference nor an optimizer
        with loaded_learner(spec, placement_timeout_s=placement_timeout_s) as learner:
            measured = self._compute_logprobs(learner, has_reference=False)
        with Fleets() as fleets:
            rollouts = fleets.rollouts(exported.model, exported.rollout, exported)
            self._write(method_job, measured, rollouts, feedback)

    def _compute_logprobs(self, learner: LearnerGroup, *, has_reference: bool) -> tuple[list[Any], dict[str, float]]:
        """Return the log-probabilities of the reference responses, and `measure_retention`."""
        responses = [response.rollout for response in self.responses]
        logprobs = [stats.old_logprobs for stats in learner.forward(responses, ["old_logprobs"])]
        if not self._retained:
            return logprobs, {}
        fields = ["old_logprobs"]
        if has_reference:
            fields.append("ref_logprobs")
        retained = learner.forward(self._retained, fields)
        return logprobs, measure_retention(retained, has_reference=has_reference)

    def _write(
        self, method_job: PolicyJob, measured: tuple[list[Any], dict[str, float]], rollouts: RolloutFleet,
        feedback: FeedbackSource,
    ) -> None:  # fmt: skip
        logprobs, retained = measured
        source = self._source(rollouts)
        measuring = targeting.measure(self.responses, logprobs, source, feedback, self._sampling, self._tokenizer)
        content = asyncio.run(measuring) | retained
        text = json.dumps(content, indent=1)
        file = method_job.run.folder / TARGETING_FILE
        write_atomic(file, text.encode())


# --------------------------------------------------------------------------------------------------------------- runs
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
        """Make a run unless it is finished, and measure it with `references`."""
        method = self.plan.methods[name]
        data = data or self.data
        identity_extras = self.plan.identity_extras(name)
        if data is not self.data:
            identity_extras |= {"held_out": SEARCH_POSTS}

        if self.results.find(method_job, **identity_extras):
            print(f"{name}, seed {method_job.run.seed}: in {self.plan.job.compare.results}, and not made again")
            return
        summary = finished(method_job, **identity_extras)
        if summary is None:
            if self.stop:
                raise Stopped
            summary = self._train(method_job, method.is_baseline, references, data, identity_extras)

        targeting_file = method_job.run.folder / TARGETING_FILE
        is_measured = targeting_file.exists()
        if references and method.is_trained and not is_measured:
            feedback = self.fleets.feedback(method_job.feedback, self.data.task, method_job)
            references.measure_exported(method_job, feedback)
        if references and self.plan.job.compare.results:
            seconds = summary["timing"]["wall_s"]
            self.results.append(name, method_job, load_run(method_job), seconds=seconds, **identity_extras)

    def _train(
        self,
        method_job: PolicyJob,
        is_baseline: bool,
        references: ReferenceResponses | None,
        data: PolicyData,
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        """Make a run and return its summary."""
        self.fleets.forget_answers()
        if is_baseline:
            feedback = self.fleets.feedback(method_job.feedback, self.data.task, method_job)
            summary = run_baseline(method_job, data, feedback, self.stop, **fields)
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
            summary = training.run(**fields)
        checkpoints = method_job.run.folder / "checkpoints"
        shutil.rmtree(checkpoints, ignore_errors=True)  # tens of runs; the numbers stay
        return summary

    def score(self, name: str, method_job: PolicyJob) -> float | None:
        """Make a run and return its score; None if it diverged."""
        folder = method_job.run.folder
        try:
            self.run(name, method_job, data=self.search_data)
        except Diverged as error:
            logger.warning("%s diverged: %s", folder, error)
            return None
        shutil.rmtree(folder / "policy", ignore_errors=True)
        return load_run(method_job).score

    def find_lr(self, name: str) -> tuple[Scores, float]:
        """Return the scores of the search, {} for a single rate, and the best learning rate."""
        config = self.plan.job.compare
        if len(config.lr_grid) == 1:
            return {}, config.lr_grid[0]
        scores: Scores = {}
        rates = [*config.lr_grid]
        max_rates = len(config.lr_grid) + MAX_WIDER
        for lr in rates:  # which grow
            scores[lr] = {}
            for seed in config.search_seeds:
                method_job = self.plan.search(name, seed, lr)
                scores[lr][seed] = self.score(name, method_job)
            is_last = len(scores) == len(rates)
            if is_last and len(rates) < max_rates and (wider := next_lr(scores)):
                rates.append(wider)
        return scores, choose_lr(scores)

    def run_methods(self, names: Sequence[str], chosen: dict[str, float], references: ReferenceResponses) -> None:
        """Run all methods seed by seed, so that a temporarily slower machine affects all methods."""
        config = self.plan.job.compare
        for seed, name in product(config.seeds, names):
            method_job = self.plan.make_job(name, seed, chosen.get(name))
            self.run(name, method_job, references)
        if not set(NOISY) <= set(names):
            return
        for noise, seed, name in product(config.noise, config.seeds, NOISY):
            method_job = self.plan.make_job(name, seed, chosen[name], noise)
            self.run(name, method_job)


def read_policy_data(job: CompareJob) -> PolicyData:
    """Return the data of all methods. Raise UserError if a method cannot use it."""
    plan = ComparisonPlan(job)
    configs = [plan.make_job(name, 0) for name in plan.methods]
    return read_data(job, configs)


def engine_groups(plan: ComparisonPlan) -> list[list[str]]:
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


def make_search_data(job: CompareJob, data: PolicyData) -> PolicyData:
    """Return the data with the held-out prompts that follow the reported ones, or with these if there are no others."""
    assert job.eval_data is not None
    config = job.eval_data
    room = job.rollout.max_prompt_tokens
    num_reported = job.eval.num_prompts
    records = load_records(config, "eval_data")[num_reported : 2 * num_reported]
    if not records:
        return data
    prompts = make_prompts(records, data.task, data.tokenizer, room, too_long=config.too_long, key="eval_data")
    checked = check_references(prompts, data.task, job.feedback.sandbox, job.run.folder)
    return replace(data, eval_prompts=checked)


def run_all(plan: ComparisonPlan, data: PolicyData, stop: StopFlag) -> dict[str, Any]:
    """Make every unfinished run; return the results of the search. Raises Stopped."""
    config = plan.job.compare
    searches = config.seeds and len(config.lr_grid) > 1
    search_data = make_search_data(plan.job, data) if searches else data
    scores: dict[str, Scores] = {}
    chosen: dict[str, float] = {}
    search: dict[str, Any] = {
        "grid": config.lr_grid,
        "seeds": config.search_seeds,
        "scores": scores,
        "chosen": chosen,
        "posts": "reported" if search_data is data else SEARCH_POSTS,
    }

    references: ReferenceResponses | None = None
    results = ResultLines(config)
    has_one_rate = len(config.lr_grid) == 1
    groups = engine_groups(plan) if config.seeds else []
    is_made = [has_one_rate and has_all(plan, names, results) for names in groups]
    for names, is_group_made in zip(groups, is_made, strict=True):
        trained = [name for name in names if plan.methods[name].is_trained]
        # The first group has the engines of the reference, which measures the runs of the others as well.
        if is_group_made and (references or all(is_made)):
            if names:
                print(f"{', '.join(names)}: all runs are in {config.results}, and are not made again")
            chosen |= dict.fromkeys(trained, config.lr_grid[0])
            continue

        with Fleets() as fleets:
            session = Session(plan=plan, data=data, search_data=search_data, stop=stop, fleets=fleets, results=results)
            references = references or ReferenceResponses(plan, data, fleets)
            for name in trained:
                scores_by_lr, chosen[name] = session.find_lr(name)
                if scores_by_lr:
                    scores[name] = scores_by_lr
            session.run_methods(names, chosen, references)
    return search


def has_all(plan: ComparisonPlan, names: Sequence[str], results: ResultLines) -> bool:
    """Return whether the file of results has every compared run of these methods, at the only learning rate."""
    config = plan.job.compare
    (only_lr,) = config.lr_grid

    def has(name: str, seed: int) -> bool:
        method = plan.methods[name]
        lr = only_lr if method.is_trained else None
        method_job = plan.make_job(name, seed, lr)
        result = results.find(method_job, **plan.identity_extras(name))
        return result is not None

    if config.noise:
        return False
    return all(has(name, seed) for name, seed in product(names, config.seeds))


# ------------------------------------------------------------------------------------------------------ reward models
def make_comparison_artifacts(plan: ComparisonPlan, demo: DemoJob) -> dict[str, Any]:
    """Make the artifacts that the methods need; return the figures of their reward models, see `make_reward_models`."""
    job = plan.job
    feedback_models: set[str] = set()
    for policy_job in (job, *(plan.make_job(name, 0) for name in plan.methods)):
        feedback_models.update(policy_job.feedback.models)
    needs_reward_model = "reward_model" in feedback_models and not job.compare.rewards
    with Fleets() as fleets:
        make_demo_artifacts(demo, fleets, reward=needs_reward_model)

    revises = any(method.procedure in ("reflection", "ilf") for method in plan.methods.values())
    correctors = {REVISER: job.compare.reviser if revises else None, FOLLOWER: job.model.policy}
    for name, model in correctors.items():
        corrector = corrector_job(demo, name).run.folder / "model"
        if model == str(corrector):
            make_corrector(demo, name)
    return make_reward_models(plan, demo) if job.compare.rewards else {}


def make_reward_models(plan: ComparisonPlan, demo: DemoJob) -> dict[str, dict[int, dict[str, float]]]:
    """Make the unfinished trainings; return model -> seed -> metrics of all. Ray must be connected."""
    config = plan.job.compare.rewards
    assert config is not None
    methods: dict[str, str] = {}  # the first that needs a model
    for name in plan.methods:
        methods.setdefault(plan.reward_model(name), name)
    jobs: dict[str, dict[int, RewardJob]] = {}
    for model, name in methods.items():
        jobs[model] = {seed: make_reward_job(plan, demo, name, seed) for seed in config.seeds}

    metrics: dict[str, dict[int, dict[str, float]]] = {}
    for model, job_by_seed in jobs.items():
        metrics[model] = {}
        for seed, job in job_by_seed.items():
            metrics[model][seed] = load_or_run(job.run.folder, job, partial(run_reward_job, demo, job))
    return metrics


def make_reward_job(plan: ComparisonPlan, demo: DemoJob, method: str, seed: int) -> RewardJob:
    """Return the demo's reward job with the seed, and with the style and records of a method."""
    config = plan.job.compare.rewards
    sparse = reward_job(demo)
    assert config is not None
    model = plan.reward_model(method)
    at = plan.reward_folder(model, seed)
    method_job = plan.make_job(method, seed)
    style = method_job.feedback.style
    run = plan.job.run.make_part(root=at.parent, name=at.name, seed=seed)
    weights = at.parent / "weights"
    changes: dict[str, Any] = {
        "run": run,
        "model.policy": str(weights / str(seed)),
        "sft.num_epochs": config.num_epochs,
        "style": style,
        "eval_records": config.eval_records,
    }
    if style.labels == "dense":
        dense = plan.job.run.folder / "rewards" / "dense-records"
        data_path = dense / Path(sparse.data.path).name
        eval_path = dense / Path(sparse.eval_data.path).name
        changes["data.path"] = str(data_path)
        changes["eval_data.path"] = str(eval_path)
    return with_overrides(sparse, changes)


def run_reward_job(demo: DemoJob, job: RewardJob) -> dict[str, float]:
    """Train and measure one model, then end its engine: twelve engines would not fit into memory."""
    from t2g.tasks.tiny.assets import build_reward_model

    demo_reward_job = reward_job(demo)
    tokenizer = load_tokenizer(demo_reward_job.model.policy)
    build_reward_model(job.model.policy, tokenizer, seed=job.run.seed, **positions(demo))
    if job.style.labels == "dense":
        write_dense(job, demo_reward_job)
    data = reward_models.read_data(job)
    tokenizer = load_tokenizer(base_model(demo).policy)  # spans are compared on the tokens where PPO will pay them
    with Fleets() as fleets:
        judged = reward_models.train_and_judge(job, data, fleets, tokenizer=tokenizer)
    plain = StyleConfig()
    sparse = [relabel(record, plain) for record in data.heldout]
    feedbacks = [record.to_feedback() for record in sparse]
    return measure_method(judged, feedbacks, tokenizer)


def write_dense(job: RewardJob, sparse: RewardJob) -> None:
    """Write the records of `sparse` with dense labels to the files of `job`."""
    dense = StyleConfig(labels="dense")
    for written, source in ((job.data, sparse.data), (job.eval_data, sparse.eval_data)):
        path = Path(written.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        records = [relabel(record, dense) for record in load_annotated(source)]
        write_annotated(path, records)


def relabel(record: AnnotatedRecord, style: StyleConfig) -> AnnotatedRecord:
    """Return the record with critique and quotes of the tiny world's feedback function in another style."""
    judge = get_task("tiny").make_feedback_function(style=style, sandbox=SandboxConfig())
    answer = judge(record.prompt, record.response, payload=record.payload)
    feedback = read_judgement(answer, record.response, source=record.source, version=record.version)
    return make_annotated_record(record.to_prompt(), record.response, feedback, sample_index=record.sample_index)
