"""The cluster of a job and its engines: each fleet starts once, and all end together."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import ray

from actors.cluster.kept_placements import KeptPlacements
from actors.cluster.placement import connect
from actors.engines.chat import ChatFleet
from actors.engines.reward import RewardFleet
from actors.engines.rollout import RolloutFleet
from actors.fleet.fleet import Fleet
from actors.learner.learner import LearnerGroup
from actors.learner.spec import LearnerSpec
from t2g.config import (
    AnyJob,
    EngineConfig,
    FeedbackConfig,
    ModelConfig,
    PolicyJob,
    RolloutConfig,
    SourceConfig,
    with_overrides,
)
from t2g.feedback.sources.combined import make_source
from t2g.feedback.sources.llm import LLMFeedback
from t2g.feedback.sources.make import make_local_source
from t2g.interfaces import FeedbackSource
from t2g.resources.job_memory import store_gib
from t2g.runs.progress import log_duration
from t2g.tasks.base import Task


@contextmanager
def on_cluster(job: AnyJob) -> Iterator[None]:
    """Connect to Ray with resources for the job's roles (see `placement.connect`); disconnect after the block."""
    with log_duration("starting Ray"):
        cluster = with_overrides(job.cluster, {"object_store_gib": store_gib(job)})
        connect(cluster, job.roles())
    try:
        yield
    finally:
        ray.shutdown()


class Fleets(ExitStack):
    """The fleets of a job. A start takes half a minute of CPU time, so successive phases share fleets."""

    def __init__(self) -> None:
        super().__init__()
        self._fleets: dict[tuple[str | None, ...], Any] = {}  # by all settings of their engines

    def for_policy(self, job: PolicyJob, task: Task) -> tuple[RolloutFleet, FeedbackSource]:
        """Return rollout engines and feedback source of a run; the engines load until `wait_for_engines` returns.

        Raises:
            UserError: The source cannot be used; no rollout engine is started.
        """
        feedback = self._feedback(job.feedback, task, job)
        return self._rollouts(job.model, job.rollout, job), feedback

    def rollouts(self, model: ModelConfig, config: RolloutConfig, job: AnyJob) -> RolloutFleet:
        """Return started engines of `model`."""
        fleet = self._rollouts(model, config, job)
        wait_for_engines(fleet)
        return fleet

    def feedback(self, config: FeedbackConfig, task: Task, job: AnyJob) -> FeedbackSource:
        """Return the source that the section names, or several of them as one, with started engines."""
        source = self._feedback(config, task, job)
        wait_for_engines(source.fleet)
        return source

    def _feedback(self, config: FeedbackConfig, task: Task, job: AnyJob) -> FeedbackSource:
        return make_source(config, lambda source, section: self._source(source, section, task, job))

    def _source(self, config: SourceConfig, section: str, task: Task, job: AnyJob) -> FeedbackSource:
        if config.engine_model is None:
            return make_local_source(config, task, folder=job.run.folder, section=section)
        model = self._judges(config, task, job)
        if config.engine_model == "llm":
            model = LLMFeedback(model, config, task)
        if config.source == config.engine_model:
            return model
        return make_local_source(config, task, aligner=model, folder=job.run.folder, section=section)

    def end_rollouts(self) -> None:
        """End the engines of policies, to give their GPUs to others; the next run starts them again."""
        for key in [key for key in self._fleets if key[0] == "rollout"]:
            self._fleets.pop(key).close()

    def forget_answers(self) -> None:
        """Clear the caches of all fleets."""
        for fleet in self._fleets.values():
            fleet.clear_cache()

    def _rollouts(self, model: ModelConfig, config: RolloutConfig, job: AnyJob) -> RolloutFleet:
        engine = config.model_dump_json(include=set(EngineConfig.model_fields))  # sampling needs no fleet of its own
        options: dict[str, Any] = {"revision": model.revision}
        if model.thinking_tags is not None:
            options["thinking_tags"] = model.thinking_tags
        options |= job.receiving_options(model)
        if "can_sleep" in options:
            config = config.model_copy(update={"gpus": job.roles()["rollout"].gpus})
        key = ("rollout", model.policy, *map(str, options.values()), engine)
        return self._get_or_start(key, job, lambda **at: RolloutFleet(model.policy, config, **options, **at))

    def _judges(self, config: SourceConfig, task: Task, job: AnyJob) -> RewardFleet | ChatFleet:
        """Return engines of the model that writes feedback."""
        if config.engine_model == "llm":
            settings = config.model_dump_json(include={"llm", "engine"})
            key = ("chat", settings)
            return self._get_or_start(key, job, lambda **at: ChatFleet(config, **at))
        chosen = config.model_dump_json(include={"reward_model", "reward_revision", "timeout_s", "style", "engine"})
        key = ("reward", task.name, chosen)
        return self._get_or_start(key, job, lambda **at: RewardFleet(config, task, **at))

    def _get_or_start(self, key: tuple[str | None, ...], job: AnyJob, make: Callable[..., Any]) -> Any:
        """Return the fleet of a key, started if it does not exist."""
        if key not in self._fleets:
            fleet = make(seed=job.run.seed, placement_timeout_s=job.cluster.placement_timeout_s)
            self._fleets[key] = self.enter_context(closing(fleet))
        return self._fleets[key]


def wait_for_engines(*fleets: Fleet | None, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Wait until the engines of all fleets have started. Raises as `Fleet.wait_ready`."""
    for fleet in fleets:
        if fleet is not None and not fleet.is_ready:
            with log_duration(f"loading and compiling: {fleet.role}"):
                fleet.wait_ready(should_stop)


@contextmanager
def start_learner(
    spec: LearnerSpec,
    *fleets: Fleet | None,
    placement_timeout_s: float,
    placements: KeptPlacements | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[LearnerGroup]:
    """Yield a learner group once its ranks and the engines of `fleets`, which load side by side, are ready.

    The ranks end with the block, or with an error. An error of a rank is raised once the engines are ready.

    Args:
        placements: As `LearnerGroup`.
        should_stop: As `Fleet.wait_ready`.
    """
    for fleet in fleets:
        if fleet is not None:
            fleet.yield_placements()
    with closing(LearnerGroup(spec, placement_timeout_s=placement_timeout_s, placements=placements)) as learner:
        wait_for_engines(*fleets, should_stop=should_stop)
        with log_duration("loading: learner"):
            learner.wait_ready()
        yield learner
