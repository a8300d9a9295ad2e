"""The engines of a job: asked for twice, started once, ended together."""

from contextlib import ExitStack
from typing import Self, TypeVar

from actors.chat import ChatFleet
from actors.reward import RewardFleet
from actors.rollout import RolloutFleet
from t2g.config import JobConfig, PolicyJob
from t2g.data.chat import lacks_folder
from t2g.errors import UserError
from t2g.feedback.llm import LLMFeedback
from t2g.feedback.sources import make_endpoint_source, make_local_source
from t2g.interfaces import FeedbackSource
from t2g.sections import AnnotateConfig, EngineConfig, FeedbackConfig, ModelConfig, ProcessConfig, RolloutConfig
from t2g.tasks.base import Task

AnyFleet = TypeVar("AnyFleet", RolloutFleet, RewardFleet, ChatFleet)
Key = tuple[str | None, ...]  # what two requests must share to share engines


def feedback_roles(config: FeedbackConfig) -> dict[str, ProcessConfig]:
    """The resources of the feedback source's actors by config section."""
    section = "annotate" if isinstance(config, AnnotateConfig) else "feedback"
    return {f"{section}.engine": config.engine} if config.own_engines else {}


class Fleets:
    """Fleets by what they serve. A start takes half a minute of CPU, so stages that follow each other share one."""

    def __init__(self) -> None:
        self._rollouts: dict[Key, RolloutFleet] = {}
        self._rewards: dict[Key, RewardFleet] = {}
        self._chats: dict[Key, ChatFleet] = {}
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
        if not job.feedback.own_engines:
            feedback = make_local_source(job.feedback, task)
            return self.rollouts(job.model, job.rollout, job), feedback
        check_folder(job.feedback)
        self._start_rollouts(job.model, job.rollout, job)
        if job.feedback.model_asked == "llm":
            self._start_chats(job.feedback, job)
        else:
            self._start_rewards(job.feedback, task, job)
        return self.rollouts(job.model, job.rollout, job), self.feedback(job.feedback, task, job)

    def rollouts(self, model: ModelConfig, config: RolloutConfig, job: JobConfig) -> RolloutFleet:
        """Engines of `model`, serving."""
        key = self._start_rollouts(model, config, job)
        return self._wait(key, self._rollouts[key])

    def feedback(self, config: FeedbackConfig, task: Task, job: JobConfig) -> FeedbackSource:
        """The source that `config.source` names; the engines that it needs are serving."""
        model: RewardFleet | LLMFeedback | None = None
        match config.model_asked:
            case "reward_model":
                check_folder(config)
                model = self.rewards(config, task, job)
            case "llm":
                model = self.annotator(config, task, job)
        if config.source in ("reward_model", "llm"):
            assert model is not None
            return model
        return make_local_source(config, task, aligner=model)

    def rewards(self, config: FeedbackConfig, task: Task, job: JobConfig) -> RewardFleet:
        """Engines of the reward model, serving."""
        key = self._start_rewards(config, task, job)
        return self._wait(key, self._rewards[key])

    def annotator(self, config: FeedbackConfig, task: Task, job: JobConfig) -> LLMFeedback:
        """The language model of `config.llm`, behind its endpoint or on engines that are serving."""
        if config.llm.url is not None:
            return make_endpoint_source(config, task)
        key = self._start_chats(config, job)
        return LLMFeedback(self._wait(key, self._chats[key]), config, task)

    def forget_answers(self) -> None:
        """Reward models judge again what they judged before."""
        for fleet in self._rewards.values():
            fleet.forget()

    def _start_rollouts(self, model: ModelConfig, config: RolloutConfig, job: JobConfig) -> Key:
        transport = job.learner.sync_transport if isinstance(job, PolicyJob) else "store"
        key = ("rollout", model.policy, model.revision, transport, _engine_settings(config))
        if key not in self._rollouts:
            timeout_s = job.cluster.placement_timeout_s
            fleet = RolloutFleet(
                model.policy, config, seed=job.run.seed, placement_timeout_s=timeout_s, revision=model.revision,
                transport=transport,
            )  # fmt: skip
            self._open.callback(fleet.close)
            self._rollouts[key] = fleet
        return key

    def _start_rewards(self, config: FeedbackConfig, task: Task, job: JobConfig) -> Key:
        chosen = config.model_dump_json(include={"reward_model", "reward_revision", "timeout_s", "style", "engine"})
        key = ("reward", task.name, chosen)
        if key not in self._rewards:
            fleet = RewardFleet(config, task, seed=job.run.seed, placement_timeout_s=job.cluster.placement_timeout_s)
            self._open.callback(fleet.close)
            self._rewards[key] = fleet
        return key

    def _start_chats(self, config: FeedbackConfig, job: JobConfig) -> Key:
        key = ("chat", config.model_dump_json(include={"llm", "engine"}))
        if key not in self._chats:
            fleet = ChatFleet(config, seed=job.run.seed, placement_timeout_s=job.cluster.placement_timeout_s)
            self._open.callback(fleet.close)
            self._chats[key] = fleet
        return key

    def _wait(self, key: Key, fleet: AnyFleet) -> AnyFleet:
        if key not in self._ready:
            fleet.wait_ready()
            self._ready.add(key)
        return fleet


def check_folder(config: FeedbackConfig) -> None:
    """UserError for a model that `lacks_folder`: the engine would look for it on the hub."""
    of_llm = config.model_asked == "llm"
    model = str(config.llm.model if of_llm else config.reward_model)
    if lacks_folder(model):
        raise UserError(f"{'llm.model' if of_llm else 'reward_model'}={model}: there is no folder of that name")


def _engine_settings(config: RolloutConfig) -> str:
    """What of a rollout section makes the engine; how it is sampled does not."""
    return config.model_dump_json(include=set(EngineConfig.model_fields))
