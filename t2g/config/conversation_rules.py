"""Which feedback and objectives conversations with an environment can have."""

from t2g.config.feedback import FeedbackConfig
from t2g.config.learning import ObjectiveConfig


def check_conversations(environment: str | None, feedback: FeedbackConfig, objective: ObjectiveConfig) -> None:
    """Raise ValueError if the feedback needs an environment that is not set, or a part does not fit conversations."""
    if environment is None:
        if feedback.reads_conversations:
            raise ValueError("feedback.source=next_message needs the replies of an environment; set environment")
        return
    if objective.teacher is not None:
        raise ValueError("objective.teacher answers a prompt, and environment gives conversations: remove one")
    judges = [source for source in feedback.named_sources.values() if source.source != "next_message"]
    if any("program" in (judge.source, judge.aligner) for judge in judges):
        raise ValueError(
            "the task's program judges one response, and environment gives conversations: set next_message, with "
            "feedback.align=program for the spans of each turn, or a function that reads the transcript"
        )
    if feedback.sources and feedback.reads_conversations:
        raise ValueError(
            "feedback.sources has next_message, which judges each turn: set feedback.source=next_message alone"
        )
