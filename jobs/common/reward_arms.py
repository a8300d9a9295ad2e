"""Reward models as arms of a comparison: one for each style and loss that its methods ask for, over seeds.

All learn from the responses of the demo's stages, judged by the tiny world's critic, and are measured on the same
held-out ones; a seed decides the initial weights and the order of the records. What the figures are is said in
`t2g.study.reward_eval`.
"""

from functools import partial
from pathlib import Path
from typing import Any

from jobs.common.fleets import Fleets
from jobs.common.reward_models import read_data, train_and_judge
from jobs.common.stages import base_model, once, reward_job
from t2g.config import DemoJob, RewardJob, RunConfig, StyleConfig, with_overrides
from t2g.feedback.parse import read_judgement
from t2g.feedback.records import AnnotatedRecord, annotated_record, load_annotated, write_annotated
from t2g.sandbox import SandboxConfig
from t2g.study.methods import Arms
from t2g.study.reward_eval import arm_metrics
from t2g.tasks.tiny.assets import build_reward_model
from t2g.tasks.tiny.task import TinyTask
from t2g.text.tokenizer import load_tokenizer


def make_reward_models(arms: Arms, demo: DemoJob) -> dict[str, dict[int, dict[str, float]]]:
    """The trainings that are not there yet; model -> seed -> metrics of all. Ray must be connected."""
    config, sparse = arms.job.compare.rewards, reward_job(demo)
    assert config is not None
    methods: dict[str, str] = {}  # the first that needs a model
    for name in arms.methods:
        methods.setdefault(arms.reward_model(name), name)
    jobs = {model: {seed: arm_job(arms, demo, name, seed) for seed in config.seeds} for model, name in methods.items()}
    if any(job.style.labels == "dense" for by_seed in jobs.values() for job in by_seed.values()):
        write_dense(arms, sparse)
    return {
        model: {seed: once(job.run.folder, job, partial(run_arm, demo, job)) for seed, job in by_seed.items()}
        for model, by_seed in jobs.items()
    }


def arm_job(arms: Arms, demo: DemoJob, method: str, seed: int) -> RewardJob:
    """The demo's reward job with weights of the seed, and the style, records and loss that a method asks for."""
    config, sparse = arms.job.compare.rewards, reward_job(demo)
    assert config is not None
    at = arms.reward_folder(arms.reward_model(method), seed)
    style = arms.arm(method, seed).feedback.style
    changes: dict[str, Any] = {
        "run": RunConfig(root=at.parent, name=at.name, seed=seed),
        "model.policy": str(at.parent / "weights" / str(seed)),
        "sft.num_epochs": config.num_epochs,
        "style": style,
        "eval_records": config.eval_records,
    }
    if style.labels == "dense":
        changes["data.path"] = str(_dense(arms, sparse.data.path))
        changes["eval_data.path"] = str(_dense(arms, sparse.eval_data.path))
    return with_overrides(sparse, changes | arms.methods[method].reward)


def run_arm(demo: DemoJob, job: RewardJob) -> dict[str, float]:
    """Train and measure one model. Its engine ends with it: twelve would not fit into memory."""
    build_reward_model(job.model.policy, load_tokenizer(reward_job(demo).model.policy), seed=job.run.seed)
    data = read_data(job)
    tokenizer = load_tokenizer(base_model(demo).policy)  # spans are compared on the tokens where PPO will pay them
    with Fleets() as fleets:
        judged = train_and_judge(job, data, fleets, tokenizer=tokenizer)
    sparse = [relabelled(record, StyleConfig()) for record in data.heldout]
    return arm_metrics(judged, [record.to_feedback() for record in sparse], tokenizer)


def write_dense(arms: Arms, sparse: RewardJob) -> None:
    """The records of `sparse` with dense labels, in the files that `arm_job` names."""
    for source in (sparse.data, sparse.eval_data):
        path = _dense(arms, source.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_annotated(path, [relabelled(record, StyleConfig(labels="dense")) for record in load_annotated(source)])


def relabelled(record: AnnotatedRecord, style: StyleConfig) -> AnnotatedRecord:
    """The same response with critique and quotes of the tiny world's critic in another style."""
    critic = TinyTask().critic(style=style, sandbox=SandboxConfig())
    answer = critic(record.prompt, record.response, payload=record.payload)
    said = read_judgement(answer, record.response, source=record.source, version=record.version)
    return annotated_record(record.to_prompt(), record.response, said, sample_index=record.sample_index)


def _dense(arms: Arms, path: str) -> Path:
    """Where the records of `path` lie with dense labels."""
    return arms.job.run.folder / "rewards" / "dense-records" / Path(path).name
