"""Construction of the feedback sources that need no cluster."""

from pathlib import Path
from typing import Any

from t2g.config import SourceConfig
from t2g.config.feedback import MODELS
from t2g.errors import UserError
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.feedback.sources.human import HumanFeedback, human_paths
from t2g.feedback.sources.llm import LLMFeedback
from t2g.feedback.sources.next_message import NextMessageFeedback
from t2g.feedback.sources.program import ProgramFeedback
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import Task


def make_local_source(
    config: SourceConfig, task: Task, *, aligner: Aligner | None = None, folder: Path | None = None, section: str = ""
) -> FeedbackSource:
    """Return the source that `config.source` names, unless our own engines serve it.

    Args:
        aligner: Finds the spans of critiques without spans, if our own engines serve it.
        section: Key of the settings, for messages; by default the section of the job.
        folder: Run folder; its feedback.log has the tracebacks of a user's function.

    Raises:
        UserError: The source cannot be used.
    """
    section = section or config.section
    log = folder / "feedback.log" if folder else None
    if config.aligner == "llm" and config.source != "llm" and config.llm.url:
        aligner = LLMFeedback(EndpointChat(config.llm), config, task)
    elif config.aligner is not None and config.aligner not in MODELS:
        aligner = _make_program(config, config.aligner, task, log=log, section=section, field="align")
    match config.source:
        case "llm":
            return LLMFeedback(EndpointChat(config.llm), config, task, aligner)
        case "human":
            human = HumanFeedback(
                human_paths(config),
                task,
                aligner,
                columns=config.human_columns,
                offsets=config.offsets,
                labels=config.human_labels,
                needs_critique=config.style.critique,
            )
            human.check_alignment()
            return human
        case "next_message":
            return NextMessageFeedback(aligner)
    assert config.source != "reward_model", "the reward model is served by actors.engines.reward"
    return _make_program(config, config.source, task, aligner=aligner, log=log, section=section)


def _make_program(config: SourceConfig, name: str, task: Task, **options: Any) -> ProgramFeedback:
    """Return the feedback of the task's own program, or of the function at an import path."""
    if name != "program":
        options |= {"concurrency": config.concurrency, "retries": config.retries}
        return ProgramFeedback(name, timeout_s=config.timeout_s, **options)
    function = task.make_feedback_function(style=config.style, sandbox=config.sandbox)
    if function is None:
        raise UserError(f"task {task.name} has no program of its own; name one as pkg.mod:function")
    return ProgramFeedback(function, timeout_s=config.timeout_s, concurrency=config.sandbox.max_concurrent, **options)
