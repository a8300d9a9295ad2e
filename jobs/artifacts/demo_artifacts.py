"""Artifacts of a tiny world: posts, base policy, annotated records, reward model. Each is made once and kept.

    <run>/world/        train.jsonl, heldout.jsonl, tokenizers and random weights
    <run>/base/model/   the policy after supervised training on faulty references
    <run>/annotated/    train.jsonl, heldout.jsonl
    <run>/reward/model/ the span reward model, and reward.json in reward/
    <run>/reviser/model/ the base policy, trained to revise a response by its critique: for baselines of jobs.compare
    <run>/follower/model/ the base policy, trained to respond with a critique in its prompt: for objective.teacher

The worlds of code and of tools have the first two alone: their feedback is what tests or tools say, and no model learns
to say it.

`stage.json`, with settings, metrics and seconds, is written when an artifact is complete. A second run reads that file,
makes an artifact without one again, and refuses other settings by name.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from actors.cluster import placement
from jobs.annotate.annotation_runs import annotate_data
from jobs.common.fleets import Fleets
from jobs.train_reward.reward_models import read_data, train_reward
from jobs.train_sft.supervised import read_examples, train_supervised
from t2g.config import (
    AnnotateConfig,
    AnnotateJob,
    DataConfig,
    DemoJob,
    ModelConfig,
    PolicyJob,
    RewardJob,
    Section,
    SFTJob,
    with_overrides,
)
from t2g.config.artifacts import load_demo
from t2g.data.load import load_records
from t2g.data.prompts import encode_policy_prompt, encode_revision, encode_teacher_prompt, make_prompts
from t2g.errors import UserError
from t2g.feedback.examples import make_sft_example
from t2g.feedback.records import AnnotatedRecord, load_annotated
from t2g.runs import identity
from t2g.runs.identity import Identity
from t2g.runs.progress import format_duration, log_duration, print_line
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import get_task
from t2g.text.tokenizer import load_tokenizer
from t2g.types import TrainSequence

RESULT_FILE = "stage.json"
CORRECTOR_EPOCHS = 5.0
FEEDBACK_FUNCTION = "t2g.tasks.tiny.task:feedback_function"
WORLD = "world"
BASE = "base"
ANNOTATED = "annotated"
REWARD = "reward"
REVISER = "reviser"
FOLLOWER = "follower"
PURPOSES = {  # for the log
    WORLD: "write posts, references with faults, and a model with random weights: every error here can be counted",
    BASE: "teach the model to write, by supervised training on the references: PPO needs a policy that makes errors",
    ANNOTATED: "let a program criticise responses of this policy: the critiques are what the reward model learns from",
    REWARD: "train the span reward model to write such critiques: most real tasks have no program that judges",
    REVISER: "teach a model to revise a response by its critique: some methods of the comparison need one",
    FOLLOWER: "teach the policy to respond with a critique in its prompt: objective.teacher needs such a policy",
}


def make_demo_artifacts(demo: DemoJob, fleets: Fleets, *, reward: bool = True) -> dict[str, dict[str, Any]]:
    """Make the unfinished artifacts; return the metrics of all by name, with `seconds`. Ray must be connected.

    Args:
        reward: Whether to train the reward model as well.
    """
    base = sft_job(demo)
    world = demo.run.folder / WORLD
    metrics: dict[str, dict[str, Any]] = {}
    metrics[WORLD] = load_or_run(world, demo.world, lambda: _write_world(demo))
    metrics[BASE] = load_or_run(
        base.run.folder, base, lambda: train_supervised(base, read_examples(base), title="base policy")
    )
    if demo.task != "tiny":
        return metrics
    annotated = annotate_job(demo)
    last = reward_job(demo)
    metrics[ANNOTATED] = load_or_run(annotated.run.folder, annotated, lambda: annotate_data(annotated, fleets))
    if reward:
        metrics[REWARD] = load_or_run(last.run.folder, last, lambda: _train_reward(demo, last, fleets))
    return metrics


def check_demo_artifacts(demo: DemoJob, *, reward: bool = True) -> bool:
    """Return whether all artifacts of `make_demo_artifacts` are finished. Nothing is made or written.

    Raises:
        UserError: An artifact was made with other settings.
    """
    settings: dict[str, Section] = {WORLD: demo.world, BASE: sft_job(demo)}
    if demo.task == "tiny":
        settings[ANNOTATED] = annotate_job(demo)
        if reward:
            settings[REWARD] = reward_job(demo)
    for name, section in settings.items():
        job_identity = Identity.from_config(section)
        earlier_result = identity.load_result(demo.run.folder / name, job_identity, RESULT_FILE, should_save=False)
        if earlier_result is None:
            return False
    return True


def sft_job(demo: DemoJob) -> SFTJob:
    world = demo.run.folder / WORLD
    model = ModelConfig(policy=str(world / "policy"))
    examples = str(world / "train.jsonl")
    repairs = str(world / "repairs.jsonl")
    path = (examples, repairs) if demo.world.num_repairs else examples
    return SFTJob(**_shared_settings(demo, BASE), model=model, data=DataConfig(path=path), sft=demo.policy_sft)


def annotate_job(demo: DemoJob) -> AnnotateJob:
    """Return the job that annotates responses to `demo.annotate` training posts, and planted ones, by program."""
    model = base_model(demo)
    posts = str(demo.run.folder / WORLD / "train.jsonl")
    data = DataConfig(path=posts, limit=demo.annotate)
    rollout = with_overrides(demo.rollout, {"samples_per_prompt": 1})
    annotate = AnnotateConfig(source=FEEDBACK_FUNCTION, responses="policy", planted=demo.planted)
    return AnnotateJob(**_shared_settings(demo, ANNOTATED), model=model, data=data, rollout=rollout, annotate=annotate)


def reward_job(demo: DemoJob) -> RewardJob:
    weights = str(demo.run.folder / WORLD / "reward")
    annotated = demo.run.folder / ANNOTATED
    data = DataConfig(path=str(annotated / "train.jsonl"))
    eval_data = DataConfig(path=str(annotated / "heldout.jsonl"))
    return RewardJob(
        **_shared_settings(demo, REWARD),
        model=ModelConfig(policy=weights),
        data=data,
        eval_data=eval_data,
        sft=demo.reward_sft,
        engine=demo.reward_engine,
    )


def make_corrector(demo: DemoJob, name: str) -> dict[str, Any]:
    """Train the reviser or the follower, after `make_demo_artifacts`; return metrics with `seconds`.

    It learns from corrections that the world's facts give (`t2g.tasks.tiny.revision`): no policy of this size could
    revise by itself, or follow a critique.
    """
    job = corrector_job(demo, name)
    return load_or_run(job.run.folder, job, lambda: _train_corrector(job, name))


def corrector_job(demo: DemoJob, name: str) -> SFTJob:
    window = demo.rollout.max_model_len + demo.reward_engine.max_model_len  # as `study.baselines.revising_rollout`
    sft = with_overrides(demo.policy_sft, {"max_length": window, "num_epochs": CORRECTOR_EPOCHS})
    records = demo.run.folder / ANNOTATED / "train.jsonl"
    return SFTJob(**_shared_settings(demo, name), model=base_model(demo), data=DataConfig(path=str(records)), sft=sft)


def base_model(demo: DemoJob) -> ModelConfig:
    return ModelConfig(policy=str(demo.run.folder / BASE / "model"))


def reward_model(demo: DemoJob) -> str:
    return str(demo.run.folder / REWARD / "model")


def demo_of(config: PolicyJob) -> DemoJob | None:
    """Return the demo that `artifacts` of a job names, see `load_demo`. The cluster must not be connected yet."""
    return load_demo(config, placement.resources)


def _shared_settings(demo: DemoJob, name: str) -> dict[str, Any]:
    """Return the settings that the jobs of all artifacts share."""
    run = demo.run.make_part(root=demo.run.folder, name=name, seed=demo.run.seed)
    return {"run": run, "cluster": demo.cluster, "task": demo.task}


def load_or_run(folder: Path, settings: Section, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of `make` with its `seconds`, from now or an earlier run. UserError for other settings."""
    run_identity = Identity.from_config(settings)
    earlier_result = identity.load_result(folder, run_identity, RESULT_FILE)
    if earlier_result is not None:
        duration = format_duration(earlier_result["seconds"])
        print_line(f"phase {folder.name}: kept, it took {duration} in an earlier start")
        return earlier_result
    started = time.monotonic()
    with log_duration(f"phase {folder.name}", PURPOSES.get(folder.name, "")):
        metrics = dict(make())
        metrics["seconds"] = time.monotonic() - started
    identity.save_result(folder, run_identity, RESULT_FILE, metrics)
    return metrics


def positions(demo: DemoJob) -> dict[str, int]:
    """Return the maximum positions of the models: a reviser reads a post, a response and a critique."""
    return {"max_position_embeddings": max(512, demo.rollout.max_model_len + demo.reward_engine.max_model_len)}


def _write_world(demo: DemoJob) -> dict[str, Any]:
    """Write records, tokenizers and random weights. A converged base policy scores as the references do."""
    from t2g.environments.tiny import table_tools
    from t2g.tasks.tiny import lookups, programs
    from t2g.tasks.tiny.assets import (
        build_code_tokenizer,
        build_model,
        build_reward_model,
        build_tokenizers,
        build_tools_tokenizer,
    )
    from t2g.tasks.tiny.world import write_rows, write_world

    world = demo.world
    folder = demo.run.folder / WORLD
    task = get_task(demo.task)
    if demo.task == "tiny_code":
        heldout = write_world(folder, world, programs.make_records)["heldout"]
        write_rows(folder / "repairs.jsonl", programs.make_repairs(world))
        policy = build_code_tokenizer(folder)
    elif demo.task == "tiny_tools":
        heldout = write_world(folder, world, lookups.make_records)["heldout"]
        write_rows(folder / "repairs.jsonl", table_tools.make_conversations(world))
        policy = build_tools_tokenizer(folder, table_tools.list_schemas())
    else:
        heldout = write_world(folder, world)["heldout"]
        policy, reward = build_tokenizers(folder, world.num_facts)
        build_reward_model(folder / "reward", reward, seed=world.seed, **positions(demo))
    build_model(folder / "policy", policy, seed=world.seed, **positions(demo))
    records = load_records(DataConfig(path=str(heldout)))
    prompts = make_prompts(records, task, policy, demo.rollout.max_prompt_tokens)

    scores: list[float] = []
    for prompt, record in zip(prompts, records, strict=True):
        reference = str(task.reference(record))
        measured = task.measure(prompt, reference, sandbox=SandboxConfig())
        if measured:
            scores.append(measured[task.score_name])
    return {f"references_{task.score_name}": sum(scores) / len(scores)}


def _train_corrector(job: SFTJob, name: str) -> dict[str, Any]:
    """Train on shortened critiques and the responses that they lead to.

    The follower does not see the criticised response. It also learns the base policy's responses to prompts without a
    critique, so that it is no better than the base policy there.
    """
    from t2g.tasks.tiny.revision import correct_response, drop_sentences

    rng = np.random.default_rng(job.run.seed)
    task = get_task(job.task)
    tokenizer = load_tokenizer(job.model.policy)
    records = load_annotated(job.data)
    make = partial(make_sft_example, tokenizer=tokenizer, max_length=job.sft.max_length)

    def correction(record: AnnotatedRecord) -> TrainSequence:
        prompt = record.to_prompt()
        critique = drop_sentences(record.critique, rng)

        def build(room: int) -> np.ndarray:
            if name == FOLLOWER:
                ids = encode_teacher_prompt(task, prompt, critique, tokenizer, room)
            else:
                ids = encode_revision(task, prompt, record.response, critique, tokenizer, room)
            if ids is None:
                raise UserError(
                    f"the critique of prompt {record.prompt_id} needs more than {job.sft.max_length} tokens"
                )
            return ids

        corrected = correct_response(record.payload["facts"], record.response, critique)
        return make(build, corrected)

    examples = [correction(record) for record in records]
    if name == FOLLOWER:
        for record in records:
            build_prompt = partial(encode_policy_prompt, {"post": record.prompt}, task, tokenizer)
            examples.append(make(build_prompt, record.response))
    return train_supervised(job, examples, title=name)


def _train_reward(demo: DemoJob, job: RewardJob, fleets: Fleets) -> dict[str, Any]:
    """Train the reward model; spans are compared on the policy's tokens, where PPO pays rewards."""
    policy_tokenizer = load_tokenizer(base_model(demo).policy)
    return train_reward(job, read_data(job), fleets, tokenizer=policy_tokenizer)
