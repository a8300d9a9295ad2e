"""What an operator writes reaches the fleets, and what the fleets do reaches the operator."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.fleet.steering import Steering
from jobs.common.cli import StopFlag
from jobs.train_policy.policy_training import PolicyTraining
from t2g.config import PolicyJob, loading
from t2g.errors import LearnerLost, RunStopped, Stopped
from t2g.loop.trainer import TrainerState
from t2g.runs.control import TargetSizes, read_status, write_target_sizes

STARVED = {"samples": 32.0, "idle/learner": 0.6, "buffer/samples": 0.0, "time/step_s": 2.0}


class FakeFleet:
    def __init__(self, role: str, target_size: int) -> None:
        self.role = role
        self.target_size = target_size
        self.joining = False
        self.given_up = 0
        self.requests: list[int] = []
        self.failure: Exception | None = None

    def set_target_size(self, number: int) -> None:
        self.requests.append(number)
        self.target_size = number
        self.given_up = 0

    @property
    def expected(self) -> int:
        return self.target_size - self.given_up

    async def supervise(self) -> None:
        if self.failure is not None:
            raise self.failure
        await asyncio.Event().wait()

    def report(self) -> dict[str, Any]:
        worker = {"name": f"{self.role} worker 0", "state": "serving", "version": 3, "restarts": 1, "load": 2}
        return {"role": self.role, "target_size": self.target_size, "workers": [worker]}

    async def engine_metrics(self) -> dict[str, float]:
        return {"tokens_per_s": 800.0}

    def metrics(self) -> dict[str, float]:
        return {"workers": float(self.expected), "restarts": 1.0, "recovery_s": 4.0, "idle": 0.1}


class FakeFeedback:
    def __init__(self) -> None:
        self.fleet = FakeFleet("reward", 1)


def job(folder: Path, **overrides: object) -> PolicyJob:
    file = folder / "job.yaml"
    file.write_text(
        "run: {name: steered}\nmodel: {policy: base}\ndata: {path: prompts.jsonl}\n"
        "feedback: {source: reward_model, reward_model: reward, engine: {workers: {max: 2}}}\n"
        "rollout: {workers: {min: 1, max: 3}}\n"
    )
    config = loading.load(PolicyJob, file, [f"run.root={folder}", *(f"{k}={v}" for k, v in overrides.items())])
    config.run.folder.mkdir(exist_ok=True)
    loading.write(config, config.run.folder)
    return config


def test_requested_sizes_reach_the_fleets_and_the_status_is_written(tmp_path: Path) -> None:
    config = job(tmp_path)
    rollouts = FakeFleet("rollout", 1)
    feedback = FakeFeedback()
    steered = Steering(config, rollouts, feedback)  # type: ignore[arg-type]

    async def run() -> None:
        tasks = [asyncio.ensure_future(task) for task in steered.make_background_tasks()]
        assert len(tasks) == 3
        await asyncio.sleep(0.05)
        assert rollouts.requests == []
        write_target_sizes(config.run.folder, TargetSizes(rollouts=3))
        async with asyncio.timeout(10):
            while 3 not in rollouts.requests:
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert set(rollouts.requests) == {3}
    assert feedback.fleet.requests == []
    assert asyncio.run(steered.metrics()) == {
        "idle/rollout": 0.1, "rollout/workers": 3.0, "rollout/restarts": 1.0, "rollout/recovery_s": 4.0,
        "rollout/tokens_per_s": 800.0, "reward/tokens_per_s": 800.0,
        "idle/reward": 0.1, "reward/workers": 1.0, "reward/restarts": 1.0, "reward/recovery_s": 4.0,
    }  # fmt: skip
    steered.on_step(4, STARVED | asyncio.run(steered.metrics()))
    status = read_status(config.run.folder)
    assert (status.step, status.samples, status.num_steps) == (4, 32, config.num_steps)
    assert [(f.role, f.target_size, f.workers[0].version) for f in status.fleets] == [
        ("rollout", 3, 3),
        ("reward", 1, 3),
    ]
    assert status.idle == {"rollout": 0.1, "reward": 0.1, "learner": 0.6}
    assert rollouts.requests[-1] == 3  # a run that does not scale itself leaves its size alone


def test_a_run_that_scales_itself_grows_when_its_learner_starves(tmp_path: Path) -> None:
    rollouts = FakeFleet("rollout", 1)
    steered = Steering(job(tmp_path, **{"rollout.autoscale": "true"}), rollouts, SimpleNamespace(fleet=None))  # type: ignore[arg-type]
    for step in range(1, 8):
        steered.on_step(step, STARVED | asyncio.run(steered.metrics()))
    assert rollouts.target_size == 3  # once after three steps, and once after three more with the new size


def test_a_worker_that_was_given_up_does_not_stop_a_run_from_scaling_itself(tmp_path: Path) -> None:
    rollouts = FakeFleet("rollout", 2)
    rollouts.given_up = 1
    steered = Steering(job(tmp_path, **{"rollout.autoscale": "true"}), rollouts, SimpleNamespace(fleet=None))  # type: ignore[arg-type]
    for step in range(1, 5):
        steered.on_step(step, STARVED | asyncio.run(steered.metrics()))
    assert rollouts.requests == [2], "one more than there are: the one given up gets its restarts again"


def test_a_floor_that_is_lost_ends_the_duty(tmp_path: Path) -> None:
    rollouts = FakeFleet("rollout", 1)
    rollouts.failure = RunStopped("no rollout worker is left")
    steered = Steering(job(tmp_path), rollouts, SimpleNamespace(fleet=None))  # type: ignore[arg-type]

    async def run() -> None:
        care, steer = steered.make_background_tasks()
        steer.close()
        await care

    with pytest.raises(RunStopped, match=r"^no rollout worker is left$"):
        asyncio.run(run())


def test_a_resumed_run_keeps_its_step_in_the_status(tmp_path: Path) -> None:
    config = job(tmp_path)
    steered = Steering(config, FakeFleet("rollout", 1), SimpleNamespace(fleet=None))  # type: ignore[arg-type]
    steered.set_progress(50, 3200)
    steered.write_status()
    status = read_status(config.run.folder)
    assert (status.step, status.samples) == (50, 3200)


def test_a_learner_that_is_lost_takes_no_step_out_of_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = job(tmp_path)
    (config.run.folder / loading.FILE_NAME).unlink()
    reported_steps: list[int] = []

    def train(_: PolicyTraining, steering: Steering, *_placements: Any, lost_at: float | None) -> TrainerState:
        assert (lost_at is None) == (not reported_steps)
        if not reported_steps:
            steering.on_step(3, STARVED)
        else:
            steering.write_status()
        reported_steps.append(read_status(config.run.folder).step)
        if len(reported_steps) == 1:
            raise LearnerLost("a rank has died")
        return TrainerState(step=3, kl_coef=0.0)

    monkeypatch.setattr(PolicyTraining, "_train", train)
    fleets: Any = {"rollouts": FakeFleet("rollout", 1), "feedback": SimpleNamespace(fleet=None)}
    training = PolicyTraining(config=config, data=None, stop=StopFlag(), **fleets)
    with pytest.raises(Stopped):
        training.run()
    assert reported_steps == [3, 3]


def test_each_start_of_a_learner_is_a_phase_of_the_run(tmp_path: Path) -> None:
    config = job(tmp_path)
    (config.run.folder / loading.FILE_NAME).unlink()
    phases: list[str] = []

    def publish_phase(phase: str) -> None:
        phases.append(phase)
        if len(phases) == 1:
            raise LearnerLost("a rank has died")
        raise Stopped

    fleets: Any = {"rollouts": FakeFleet("rollout", 1), "feedback": SimpleNamespace(fleet=None)}
    training = PolicyTraining(config=config, data=None, stop=StopFlag(), publish_phase=publish_phase, **fleets)
    with pytest.raises(Stopped):
        training.run()
    assert phases == ["loading", "loading"]
