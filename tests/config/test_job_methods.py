"""What a job tells of itself, so that no other package asks for its type."""

from pathlib import Path
from typing import Any

import pytest

from t2g.config import (
    AnnotateJob,
    AnyJob,
    CompareJob,
    DemoJob,
    EvaluateJob,
    PolicyEvaluationJob,
    PolicyJob,
    RewardJob,
    ServeJob,
    SFTJob,
)

MODEL = {"policy": "m"}
DATA = {"path": "d"}
JUDGE = {"source": "reward_model", "reward_model": "r"}
SCORED = {"feedback": JUDGE, "data": DATA}
TRAINED = {"model": MODEL, "data": DATA}
JOBS: dict[type[AnyJob], dict[str, Any]] = {
    PolicyJob: {**TRAINED, "feedback": JUDGE, "eval_data": DATA},
    CompareJob: {**TRAINED, "feedback": JUDGE, "eval_data": DATA, "compare": {"reviser": "v"}},
    SFTJob: TRAINED,
    RewardJob: {**TRAINED, "eval_data": DATA},
    AnnotateJob: {**TRAINED, "annotate": {"responses": "policy", "source": "program"}},
    EvaluateJob: SCORED,
    PolicyEvaluationJob: {"data": DATA, "policies": {"a": MODEL}, "feedback": JUDGE},
    ServeJob: {"model": MODEL},
    DemoJob: {},
}


def make(job: type[AnyJob], **values: Any) -> AnyJob:
    return job.model_validate(JOBS[job] | values)


@pytest.mark.parametrize(
    ("job", "models"),
    [
        (PolicyJob, {"model.policy": "rollout", "feedback.reward_model": "feedback.engine"}),
        (CompareJob, {"model.policy": "rollout", "compare.reviser": "", "feedback.reward_model": "feedback.engine"}),
        (SFTJob, {"model.policy": ""}),
        (RewardJob, {"model.policy": "engine"}),
        (AnnotateJob, {"model.policy": "rollout"}),
        (EvaluateJob, {"feedback.reward_model": "feedback.engine"}),
        (PolicyEvaluationJob, {"policies.a.policy": "rollout", "feedback.reward_model": "feedback.engine"}),
        (ServeJob, {"model.policy": "engine"}),
        (DemoJob, {}),
    ],
)
def test_models_and_their_engines(job: type[AnyJob], models: dict[str, str]) -> None:
    listed = list(make(job).models())
    assert {model.key: model.engine.section if model.engine else "" for model in listed} == models
    trained = [model.key for model in listed if model.is_trained]
    assert trained == (["model.policy"] if job in (PolicyJob, CompareJob, SFTJob, RewardJob) else [])


def test_an_adapter_is_no_model_of_an_engine(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    job = make(PolicyEvaluationJob, policies={"a": MODEL, "b": {"policy": str(tmp_path)}})
    assert [model.key for model in job.policy_models()] == ["policies.a.policy"]


def test_annotated_responses_need_no_policy() -> None:
    assert list(make(AnnotateJob, model=None, annotate={"source": "program"}).models()) == []
    (model,) = make(AnnotateJob, annotate={"source": "program"}).models()
    assert model.engine is None


@pytest.mark.parametrize(
    ("job", "keys"),
    [(PolicyJob, ["data", "eval_data"]), (RewardJob, ["data", "eval_data"]), (SFTJob, ["data"]), (ServeJob, [])],
)
def test_the_data(job: type[AnyJob], keys: list[str]) -> None:
    assert list(make(job).data_sections) == keys


def test_data_that_is_not_set_is_no_section() -> None:
    assert list(make(PolicyJob, eval_data=None).data_sections) == ["data"]


@pytest.mark.parametrize(
    ("job", "task"), [(PolicyJob, "prompts"), (SFTJob, "prompts"), (ServeJob, None), (DemoJob, None)]
)
def test_the_task_of_the_records(job: type[AnyJob], task: str | None) -> None:
    assert make(job).task_name == task


def test_the_time_to_stop() -> None:
    assert make(PolicyJob, learner={"step_timeout_s": 100}).stop_deadline_s == 400
    assert make(SFTJob, sft={"timeout_s": 70}).stop_deadline_s == 70
    assert make(AnnotateJob).stop_deadline_s == 300


def test_the_window_of_a_teacher() -> None:
    windows = {"rollout": {"max_model_len": 300}, "feedback": JUDGE | {"engine": {"max_model_len": 2000}}}
    assert make(PolicyJob, **windows).teacher_window is None
    assert make(PolicyJob, **windows, objective={"teacher": {"weight": 0.5}}).teacher_window == 2300
    assert make(SFTJob).teacher_window is None


def test_shared_gpus() -> None:
    on_gpus = {"rollout": {"gpus": 0.6}, "learner": {"gpus": 0.4}}
    assert make(PolicyJob, cluster={"gpu_sharing": "split"}, **on_gpus).shares_gpus
    assert not make(PolicyJob, **on_gpus).shares_gpus
    assert not make(SFTJob).shares_gpus


def test_the_engine_of_a_reward_model_starts_after_the_ranks() -> None:
    job = make(RewardJob)
    assert list(job.roles()) == ["sft"]
    assert list(job.later_roles()) == ["engine"]
    assert make(PolicyJob).later_roles() == {}


def test_servers_need_keys() -> None:
    server = {"url": "http://a/v1", "model": "judge"}
    feedback = {"source": "llm", "llm": {"url": "http://b/v1", "model": "annotator"}}
    job = make(PolicyEvaluationJob, endpoints={"e": server}, feedback=feedback, judges={"j": server})
    assert [llm.model for llm in job.servers()] == ["judge", "judge", "annotator"]
    assert list(make(PolicyJob).servers()) == []


def test_an_evaluation_of_code_runs_it() -> None:
    assert make(PolicyEvaluationJob, task="code").measuring_sandbox() is not None
    assert make(PolicyEvaluationJob).measuring_sandbox() is None


def test_training_runs_programs_where_a_measure_needs_them() -> None:
    held_out = {"eval_data": {"path": "heldout.jsonl"}}
    paid = {"eval_data": None, "objective": {"outcome_rewards": [{"source": "task"}]}}
    for settings in (held_out, paid):
        assert make(PolicyJob, task="code", **settings).measuring_sandbox() is not None
        assert make(PolicyJob, **settings).measuring_sandbox() is None
    assert make(PolicyJob, task="code", eval_data=None).measuring_sandbox() is None


def test_a_comparison_trains_policies_with_its_own_settings() -> None:
    job = make(CompareJob, num_steps=3)
    assert isinstance(job, CompareJob)
    policy_job = job.make_policy_job()
    assert type(policy_job) is PolicyJob
    assert policy_job.model_dump() == job.model_dump(exclude={"compare"})


def test_ranks_are_placed_together_and_engines_alone() -> None:
    roles = make(PolicyJob, learner={"workers": 3}, rollout={"workers": 2}).roles()
    assert {name: role.group_size for name, role in roles.items()} == {"rollout": 1, "learner": 3, "feedback.engine": 1}


def test_dashboards() -> None:
    assert make(SFTJob, log={"project": "p"}).log_options.project == "p"
    assert make(PolicyJob, log={"project": "p"}).log_options.project == "p"
    assert make(ServeJob).log_options.trackers == ("tensorboard",)


def test_what_an_identity_adds_to_the_config() -> None:
    rewards = [{"source": "task"}, {"source": "my.module:score"}, {"source": "metric:length"}]
    job = make(PolicyJob, objective={"outcome_rewards": rewards}, num_steps=7)
    assert job.reward_functions() == ["my.module:score"]
    assert job.identity_settings() == {"learner.schedule_steps": 7}
    assert (make(SFTJob).reward_functions(), make(SFTJob).identity_settings()) == ([], {})


def test_a_scored_model_has_the_settings_of_its_card() -> None:
    assert make(EvaluateJob).takes_card_settings
    assert not make(PolicyJob).takes_card_settings
