"""Defaults that follow from other sections: their values, what counts as set, and what is derived again."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from t2g.config import DemoJob, EngineConfig, FeedbackConfig, PolicyEvaluationJob, PolicyJob, loading, with_overrides
from t2g.config.learning import TeacherConfig
from t2g.config.resolve import (
    DERIVED_DEFAULTS,
    choose_advantages,
    choose_poor_rewards,
    choose_transport,
    choose_turn_gamma,
)
from t2g.config.validation_errors import list_fields
from t2g.errors import UserError

REWARD_MODEL = {"source": "reward_model", "reward_model": "m"}
BASE = {"model": {"policy": "m"}, "data": {"path": "d"}, "feedback": {"source": "program"}}
SCHEMA_POOR = (-1.0, -1.0, -1.0)


def make(**values: Any) -> PolicyJob:
    return PolicyJob.model_validate(BASE | values)


@pytest.mark.parametrize(
    ("sharing", "engine_gpus", "rank_gpus", "verify", "transport"),
    [
        ("none", 0, 0, "probe", "store"),
        ("none", 1, 0, "probe", "store"),
        ("none", 0.6, 1, "probe", "store"),
        ("none", 1, 2, "probe", "nccl"),
        ("none", 1, 2, "full", "store"),
        ("split", 0.6, 0.4, "probe", "ipc"),
        ("alternate", 1, 1, "probe", "ipc"),
    ],
)
def test_the_transport(sharing: Any, engine_gpus: float, rank_gpus: float, verify: str, transport: str) -> None:
    assert choose_transport(sharing, engine_gpus, rank_gpus, verify) == transport


def test_the_rewards_of_poor_spans() -> None:
    model = FeedbackConfig.model_validate(REWARD_MODEL)
    program = FeedbackConfig(source="program")
    assert choose_poor_rewards("code", model) == (0.0, -1.0, -1.0)
    assert choose_poor_rewards("qa", model) is None
    assert choose_poor_rewards("code", program) is None
    for style, poor in (({"source": "feedback:judge"}, None), (REWARD_MODEL, (0.0, -1.0, -1.0))):
        criteria = FeedbackConfig.model_validate({"sources": {"facts": {"source": "program"}, "style": style}})
        assert choose_poor_rewards("code", criteria) == poor


@pytest.mark.parametrize(
    ("teacher_weight", "samples", "warmup_steps", "values", "advantages"),
    [
        (None, 4, 0, "position", None),
        (None, 1, 0, "position", "gae"),
        (None, 4, 2, "position", "gae"),
        (0.5, 1, 0, "position", "gae"),
        (1.0, 1, 0, "position", None),  # the teacher alone trains: there are no rewards to compare
        (1.0, 1, 2, "position", "gae"),
        (None, 1, 0, "sentence", None),  # which is refused
    ],
)
def test_the_advantages(
    teacher_weight: float | None, samples: int, warmup_steps: int, values: str, advantages: str | None
) -> None:
    teacher = None if teacher_weight is None else TeacherConfig(weight=teacher_weight)
    assert choose_advantages(teacher, samples, warmup_steps, None, values) == advantages


@pytest.mark.parametrize(
    ("source", "placement", "gamma"),
    [
        ("next_message", "span", 0.0),
        ("next_message", "step", 0.0),
        ("next_message", "scalar", None),
        ("next_message", "shuffled", None),
        ("llm", "span", None),
    ],
)
def test_the_discount_between_turns(source: str, placement: Any, gamma: float | None) -> None:
    assert choose_turn_gamma(source, placement) == gamma


def test_all_follow_at_once_and_in_a_job() -> None:
    feedback = REWARD_MODEL | {"source": "next_message", "align": "reward_model"}
    job = make(task="code", environment="code_repair", feedback=feedback, rollout={"samples_per_prompt": 1})
    objective = job.objective
    assert job.learner.sync_transport == "store"
    assert objective.rewards.poor == (0.0, -1.0, -1.0)
    assert (objective.advantages, objective.kl_estimator, objective.turn_gamma) == ("gae", "k1", 0.0)


def test_set_values_stay() -> None:
    objective = {"advantages": "group", "turn_gamma": 0.5, "rewards": {"poor": [-2, -2, -2]}}
    learner = {"critic_warmup_steps": 2, "sync_transport": "store", "gpus": 1}
    job = make(task="code", objective=objective, learner=learner, rollout={"gpus": 1})
    assert (job.objective.advantages, job.objective.turn_gamma) == ("group", 0.5)
    assert job.objective.rewards.poor == (-2.0, -2.0, -2.0)
    assert job.learner.sync_transport == "store"


def test_derived_values_do_not_count_as_set() -> None:
    job = make(
        task="code", feedback=REWARD_MODEL, objective={"rewards": {"good": 2}}, rollout={"samples_per_prompt": 1}
    )
    assert job.objective.rewards.poor == (0.0, -1.0, -1.0)
    assert job.objective.model_fields_set == {"rewards"}
    assert job.objective.rewards.model_fields_set == {"good"}
    assert job.learner.model_fields_set == set()
    assert job.model_fields_set == {*BASE, "task", "objective", "rollout"}


@pytest.mark.parametrize("objective", [{}, {"rewards": {"good": 2}}])
def test_another_task_derives_the_rewards_again(objective: dict[str, Any]) -> None:
    """The rewards of the task code stayed where another key of the section was set."""
    job = make(task="code", feedback=REWARD_MODEL, objective=objective)
    other = with_overrides(job, {"task": "qa"})
    assert other.objective.rewards.poor == SCHEMA_POOR
    assert other.objective.rewards.good == job.objective.rewards.good
    assert with_overrides(other, {"task": "code"}) == job


def test_a_saved_config_reads_back_and_has_the_same_identity(tmp_path: Path) -> None:
    job = make(task="code", feedback=REWARD_MODEL, rollout={"samples_per_prompt": 1, "gpus": 1}, learner={"gpus": 1})
    saved = loading.load(PolicyJob, loading.write(job, tmp_path), environ={})
    assert saved.objective == job.objective
    assert saved.learner == job.learner
    assert loading.identity_values(saved)["objective.advantages"] == "gae"
    assert loading.identity_values(saved)["objective.rewards.poor"] == [0.0, -1.0, -1.0]


def test_a_demo_derives_what_its_methods_derive() -> None:
    alone = DemoJob.model_validate({"rollout": {"samples_per_prompt": 1}})
    assert alone.objective.advantages == "gae"
    assert DemoJob().objective.advantages == "group"


def test_each_key_is_one_of_the_schema() -> None:
    known = list_fields(PolicyJob).keys()
    for default in DERIVED_DEFAULTS:
        assert known >= {default.key, *default.follows}


@pytest.mark.parametrize(
    ("gpus", "share", "limited"), [(0, 0.85, 0.85), (0.6, 0.9, 0.6), (0.9, 0.85, 0.85), (1, 0.9, 0.9)]
)
def test_an_engine_has_at_most_its_part_of_the_gpu(gpus: float, share: float, limited: float) -> None:
    engine = EngineConfig(gpus=gpus, gpu_memory_utilization=share)
    assert engine.gpu_memory_utilization == limited


def test_ranks_on_one_gpu_are_refused_at_their_section(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "model: {policy: m}\ndata: {path: d}\nfeedback: {source: program}\nlearner:\n  gpus: 0.5\n  workers: 2\n"
    )
    with pytest.raises(UserError, match=r"job\.yaml:4: learner: gpus=0\.5 with workers=2 puts two ranks on one GPU"):
        loading.load(PolicyJob, file)
    with pytest.raises(ValidationError, match="needs one engine and one rank on each GPU"):  # the ranks are apart
        make(cluster={"gpu_sharing": "split"}, rollout={"gpus": 0.5}, learner={"gpus": 0.5, "workers": 2})


def test_the_sampling_of_training_is_read_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    rollout = {"temperature": 0.5, "max_new_tokens": 32, "max_model_len": 96}
    job = make(rollout=rollout)
    loading.write(job, run)
    values = {"policies": {"a": {"policy": str(run / "policy")}}, "data": {"path": "d"}}
    evaluation = loading.load(PolicyEvaluationJob, values)
    sampling = evaluation.rollout
    assert (sampling.temperature, sampling.max_new_tokens, sampling.max_model_len) == (0.5, 32, 96)
    assert with_overrides(evaluation, {"run.seed": 2}).rollout == sampling
    other = loading.load(PolicyEvaluationJob, values, ["rollout.temperature=1"])
    assert (other.rollout.temperature, other.rollout.max_new_tokens) == (1.0, 32)
    with pytest.raises(UserError, match=r"command line: rollout: with .* leaves no room for a prompt"):
        loading.load(PolicyEvaluationJob, values, ["rollout.max_new_tokens=96"])
