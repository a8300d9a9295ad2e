"""Fleets as context managers, made of a job's config: what a `with` block started is ended with it."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.reward import RewardFleet
from actors.rollout import RolloutFleet
from t2g.config import FeedbackConfig, JobConfig, ModelConfig, RoleConfig, RolloutConfig
from t2g.feedback.sources import make_local_source
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import Task


def feedback_roles(config: FeedbackConfig) -> dict[str, RoleConfig]:
    """The resources of the feedback source's actors by config section; only a reward model has any."""
    return {"feedback.engine": config.engine} if config.source == "reward_model" else {}


@contextmanager
def rollout_fleet(model: ModelConfig, config: RolloutConfig, job: JobConfig) -> Iterator[RolloutFleet]:
    """Engines of `model`, serving."""
    fleet = RolloutFleet(
        model.policy,
        config,
        seed=job.run.seed,
        placement_timeout_s=job.cluster.placement_timeout_s,
        revision=model.revision,
    )
    try:
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.close()


@contextmanager
def feedback_source(config: FeedbackConfig, task: Task, job: JobConfig) -> Iterator[FeedbackSource]:
    """The source that `feedback.source` names; a reward model is served until the block ends."""
    if config.source != "reward_model":
        yield make_local_source(config, task)
        return
    fleet = RewardFleet(config, task, seed=job.run.seed, placement_timeout_s=job.cluster.placement_timeout_s)
    try:
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.close()
