"""The engines of a job: asked for twice, started once, ended together."""

from contextlib import ExitStack
from pathlib import Path
from typing import Self, TypeVar

from actors.reward import RewardFleet
from actors.rollout import RolloutFleet
from t2g.config import EngineConfig, FeedbackConfig, JobConfig, ModelConfig, PolicyJob, RoleConfig, RolloutConfig
from t2g.errors import UserError
from t2g.feedback.sources import make_local_source
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import Task

AnyFleet = TypeVar("AnyFleet", RolloutFleet, RewardFleet)
Key = tuple[str | None, ...]  # what two requests must share to share engines


def feedback_roles(config: FeedbackConfig) -> dict[str, RoleConfig]:
    """The resources of the feedback source's actors by config section; only a reward model has any."""
    return {"feedback.engine": config.engine} if config.source == "reward_model" else {}


class Fleets:
    """Fleets by what they serve. A start takes half a minute of CPU, so stages that follow each other share one."""

    def __init__(self) -> None:
        self._rollouts: dict[Key, RolloutFleet] = {}
        self._rewards: dict[Key, RewardFleet] = {}
        self._ready: set[Key] = set()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def for_policy(self, job: PolicyJob, task: Task) -> tuple[RolloutFleet, FeedbackSource]:
        """Rollout engines and feedback source of a run, started side by side.

        UserError before any engine starts for a source that cannot be used.
        """
        if job.feedback.source != "reward_model":
            feedback = make_local_source(job.feedback, task)
            return self.rollouts(job.model, job.rollout, job), feedback
        check_folder(job.feedback)
        self._start_rollouts(job.model, job.rollout, job)
        self._start_rewards(job.feedback, task, job)
        return self.rollouts(job.model, job.rollout, job), self.rewards(job.feedback, task, job)

    def rollouts(self, model: ModelConfig, config: RolloutConfig, job: JobConfig) -> RolloutFleet:
        """Engines of `model`, serving."""
        key = self._start_rollouts(model, config, job)
        return self._wait(key, self._rollouts[key])

    def feedback(self, config: FeedbackConfig, task: Task, job: JobConfig) -> FeedbackSource:
        """The source that `feedback.source` names; a reward model is serving."""
        if config.source != "reward_model":
            return make_local_source(config, task)
        return self.rewards(config, task, job)

    def rewards(self, config: FeedbackConfig, task: Task, job: JobConfig) -> RewardFleet:
        """Engines of the reward model, serving."""
        key = self._start_rewards(config, task, job)
        return self._wait(key, self._rewards[key])

    def _start_rollouts(self, model: ModelConfig, config: RolloutConfig, job: JobConfig) -> Key:
        key = (model.policy, model.revision, _engine_settings(config))
        if key not in self._rollouts:
            timeout_s = job.cluster.placement_timeout_s
            fleet = RolloutFleet(
                model.policy, config, seed=job.run.seed, placement_timeout_s=timeout_s, revision=model.revision
            )
            self._open.callback(fleet.close)
            self._rollouts[key] = fleet
        return key

    def _start_rewards(self, config: FeedbackConfig, task: Task, job: JobConfig) -> Key:
        timeout_s = str(config.timeout_s)
        key = (config.reward_model, config.reward_revision, task.name, timeout_s, config.engine.model_dump_json())
        if key not in self._rewards:
            fleet = RewardFleet(config, task, seed=job.run.seed, placement_timeout_s=job.cluster.placement_timeout_s)
            self._open.callback(fleet.close)
            self._rewards[key] = fleet
        return key

    def _wait(self, key: Key, fleet: AnyFleet) -> AnyFleet:
        if key not in self._ready:
            fleet.wait_ready()
            self._ready.add(key)
        return fleet


def check_folder(config: FeedbackConfig) -> None:
    """UserError for a reward model that is a path and no folder: the engine would look for it on the hub."""
    model = str(config.reward_model)
    if (Path(model).is_absolute() or model.startswith(".")) and not Path(model).is_dir():
        raise UserError(f"feedback.reward_model={model}: there is no folder of that name")


def _engine_settings(config: RolloutConfig) -> str:
    """What of a rollout section makes the engine; how it is sampled does not."""
    return config.model_dump_json(include=set(EngineConfig.model_fields))
