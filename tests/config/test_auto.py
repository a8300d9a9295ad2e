"""`auto`: by hand, and through a shipped config to what a run keeps."""

from pathlib import Path

import pytest

from t2g.config import PolicyJob, RewardJob, loading
from t2g.config.auto import GIB, resolve_auto
from t2g.errors import UserError
from t2g.runs import identity
from t2g.runs.identity import Identity

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "configs" / "own" / "policy.yaml"
BOX = {"GPU": 8.0, "memory": 800.0 * GIB}


def make_job(resources: dict[str, float], *overrides: str) -> PolicyJob:
    return loading.load(PolicyJob, OWN, overrides, environ={}, cwd=ROOT, find_resources=lambda address: resources)


def test_a_config_of_ones_own_takes_the_gpus(caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(BOX, "learner.workers=2", "learner.cpus=6.5")
    assert (job.rollout.gpus, job.rollout.dtype, job.rollout.enforce_eager) == (1, "bfloat16", False)
    assert (job.learner.gpus, job.learner.dtype, job.learner.threads) == (1, "bfloat16", 6)
    assert job.learner.memory_gib == job.rollout.memory_gib == 90  # of each GPU, a tenth spared
    assert job.rollout.gpu_memory_utilization == 0.85
    assert job.rollout.max_num_seqs == 512  # a default that follows
    (message,) = caplog.messages
    assert message.startswith("auto (1 CPUs, 8 GPUs): rollout.gpus=1.0, ") and 'learner.dtype="bfloat16"' in message


def test_a_choice_on_cpus_is_reported_by_its_value(caplog: pytest.LogCaptureFixture) -> None:
    make_job({"CPU": 4.0, "memory": 8.0 * GIB})
    (message,) = caplog.messages
    assert message == (
        'auto (4 CPUs, no GPU): rollout.gpus=0.0, rollout.dtype="float32", rollout.threads=4, '
        "rollout.enforce_eager=true, rollout.gpu_memory_utilization=0.85, learner.gpus=0.0, "
        'learner.dtype="float32", learner.threads=4'
    )


def test_processes_share_one_gpu() -> None:
    job = make_job({"GPU": 1, "memory": 100 * GIB})
    assert (job.rollout.gpus, job.learner.gpus, job.rollout.gpu_memory_utilization) == (0.5, 0.5, 0.42)
    assert job.learner.memory_gib == 45


@pytest.mark.parametrize(("gpus", "ranks", "share"), [(2, 2, 0.5), (3, 3, 0.5), (8, 7, 1), (8, 8, 0.5), (2, 4, 0.33)])
def test_no_share_is_left_without_a_gpu_to_be_on(gpus: int, ranks: int, share: float) -> None:
    filled = resolve_auto({"rollout": {"gpus": "auto"}, "learner": {"gpus": "auto", "workers": ranks}}, {"GPU": gpus})
    assert filled["rollout"]["gpus"] == filled["learner"]["gpus"] == share
    assert int(1 / share) * gpus >= ranks + 1


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["learner.workers=2", "learner.gpus=0.5"], "learner"),
        (["objective.advantages=gae", "learner.critic_ranks={workers: 3, gpus: 0.3}"], "learner.critic_ranks"),
        (["learner.workers=2"], "learner"),  # and half of the one GPU for each process
    ],
)
def test_no_two_ranks_that_nccl_connects_share_a_gpu(overrides: list[str], key: str) -> None:
    with pytest.raises(UserError, match=rf"{key}: gpus=0\.\d+ with workers=\d puts two ranks .*Duplicate GPU"):
        make_job({"GPU": 1}, *overrides)
    for fine in ("learner.gpus=0.6", "learner.gpus=0", "learner={workers: 1, gpus: 0.5}"):
        assert make_job({"GPU": 1}, "learner.workers=2", fine)


def test_without_a_gpu_it_is_the_default() -> None:
    assert make_job({"memory": 100 * GIB}) == loading.load(PolicyJob, OWN, environ={}, cwd=ROOT)
    plain = PolicyJob.model_fields["learner"].default
    job = make_job({})
    for name in ("gpus", "dtype", "threads", "memory_gib"):
        assert getattr(job.learner, name) == getattr(plain, name)


def test_cores_are_for_those_who_work_and_shared_by_those_who_work_at_once() -> None:
    values = {
        "rollout": {"threads": "auto", "workers": {"initial": 2, "max": 9}},
        "feedback": {"engine": {"threads": "auto"}},
        "learner": {"threads": "auto", "workers": 2, "critic_ranks": {"threads": "auto", "workers": 1}},
    }

    def threads(cores: int, **rollout: object) -> tuple[int, int, int, int]:
        filled = resolve_auto(values | {"rollout": values["rollout"] | rollout}, {"CPU": cores})
        learner = filled["learner"]
        return (
            filled["rollout"]["threads"], filled["feedback"]["engine"]["threads"],
            learner["threads"], learner["critic_ranks"]["threads"],
        )  # fmt: skip

    assert threads(16) == (5, 5, 5, 5)  # three engines, then three ranks
    assert threads(16, max_staleness=0, workers=1) == (8, 8, 5, 5)
    assert threads(16, max_staleness=1) == (2, 2, 2, 2)
    assert threads(2, max_staleness=1) == threads(0) == (1, 1, 1, 1)
    assert threads(16, threads=1) == (1, 16, 5, 5)  # who says how many does not ask for more
    job = make_job({"CPU": 6}, "learner.workers=2")
    assert (job.rollout.threads, job.learner.threads) == (6, 3)
    job = make_job({"CPU": 6}, "rollout.max_staleness=1")
    assert (job.rollout.threads, job.learner.threads) == (3, 3)
    file = OWN.with_name("reward.yaml")
    reward = loading.load(RewardJob, file, environ={}, cwd=ROOT, find_resources=lambda address: {"CPU": 6})
    assert (reward.sft.threads, reward.engine.threads) == (6, 6), "the engine measures what the rank has trained"


def test_a_training_shares_its_cores_with_no_other_training() -> None:
    names = ("learner", "policy_sft", "reward_sft", "rollout", "feedback")

    def threads(**rollout: int) -> list[int]:
        sections = {name: {"threads": "auto", **(rollout if name == "rollout" else {})} for name in names}
        return [section["threads"] for section in resolve_auto(sections, {"CPU": 6}).values()]

    assert threads() == [6, 6, 6, 3, 3]
    assert threads(max_staleness=1) == [2, 2, 2, 1, 1]


def test_what_is_given_stays() -> None:
    sections = {"rollout": {"gpus": 2, "dtype": "float32"}, "learner": {"gpus": 0, "dtype": "auto"}, "name": "auto"}
    assert resolve_auto(sections, BOX) == sections | {"learner": {"gpus": 0}}
    assert resolve_auto({"x": {"gpus": 2, "dtype": "auto", "memory_gib": "auto"}}, BOX) == {
        "x": {"gpus": 2, "dtype": "bfloat16", "memory_gib": 180}
    }


def test_another_machine_is_another_run(tmp_path: Path) -> None:
    identity.save_identity(tmp_path, Identity.from_config(make_job(BOX)))
    identity.check_identity(tmp_path, Identity.from_config(make_job(BOX)))
    with pytest.raises(UserError, match=r'learner\.dtype \("bfloat16" -> "float32"\).* rollout\.enforce_eager'):
        identity.check_identity(tmp_path, Identity.from_config(make_job({})))
    loaded = loading.load(PolicyJob, loading.write(make_job(BOX), tmp_path), environ={}, cwd=ROOT)
    assert loaded == make_job(BOX)


def test_an_unknown_machine_needs_explicit_values() -> None:
    with pytest.raises(UserError, match=r"rollout\.gpus, .*learner\.dtype.*: got auto, but this job needs values"):
        loading.load(PolicyJob, OWN, environ={}, cwd=ROOT, find_resources=None)
    with pytest.raises(UserError, match=r"rollout\.max_new_tokens: got \"auto\""):
        make_job(BOX, "rollout.max_new_tokens=auto")


def test_a_reward_model_is_trained_and_served_on_gpus() -> None:
    file = OWN.with_name("reward.yaml")
    job = loading.load(RewardJob, file, environ={}, cwd=ROOT, find_resources=lambda address: BOX)
    assert (job.sft.gpus, job.sft.dtype, job.engine.gpus, job.engine.dtype) == (1, "bfloat16", 1, "bfloat16")
