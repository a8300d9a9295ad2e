"""The artifacts of a comparison, and the reward models that it compares, made unless they are finished.

One reward model for each style that the methods need, over seeds. All learn from the responses of the demo's artifacts,
judged by the tiny world's feedback function, and are measured on the same held-out ones; a seed decides the initial
weights and the order of the records. The figures are described in `t2g.study.reward_eval`.
"""

from functools import partial
from pathlib import Path
from typing import Any

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
from jobs.common.fleets import Fleets
from jobs.train_reward import reward_models
from t2g.config import DemoJob, RewardJob, StyleConfig, with_overrides
from t2g.feedback.parse import read_judgement
from t2g.feedback.records import AnnotatedRecord, load_annotated, make_annotated_record, write_annotated
from t2g.sandbox import SandboxConfig
from t2g.study.methods import ComparisonPlan
from t2g.study.reward_eval import measure_method
from t2g.tasks.base import get_task
from t2g.text.tokenizer import load_tokenizer


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
