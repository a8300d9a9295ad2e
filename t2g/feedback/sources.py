"""The feedback source that a config names, of those that need no cluster."""

from pathlib import Path

from t2g.config import FeedbackConfig
from t2g.feedback.endpoint import EndpointFeedback
from t2g.feedback.human import HumanFeedback
from t2g.feedback.program import ProgramFeedback
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import Task

__all__ = ["EndpointFeedback", "HumanFeedback", "ProgramFeedback", "make_local_source"]


def make_local_source(config: FeedbackConfig, task: Task) -> FeedbackSource:
    """The source that `config.source` names; every one but `reward_model`, which is a fleet of engines."""
    if config.source == "endpoint":
        return EndpointFeedback(config, task)
    if config.source == "human":
        assert config.human_file is not None  # FeedbackConfig checked it
        return HumanFeedback(Path(config.human_file))
    assert config.source != "reward_model", "the reward model is served by actors.reward"
    return ProgramFeedback(config.source, timeout_s=config.timeout_s)
