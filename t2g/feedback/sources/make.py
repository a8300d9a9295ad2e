"""Construction of the feedback sources that need no cluster."""

from pathlib import Path

from t2g.config import SourceConfig
from t2g.errors import UserError
from t2g.feedback.sources.endpoint import EndpointChat
from t2g.feedback.sources.human import HumanFeedback
from t2g.feedback.sources.llm import LLMFeedback
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
    if config.aligner == "llm" and config.source != "llm" and config.llm.url:
        aligner = LLMFeedback(EndpointChat(config.llm), config, task)
    options = {"timeout_s": config.timeout_s, "aligner": aligner, "section": section or config.section}
    match config.source:
        case "llm":
            return LLMFeedback(EndpointChat(config.llm), config, task, aligner)
        case "human":
            assert config.human_file is not None  # SourceConfig checked it
            human = HumanFeedback(Path(config.human_file), task, aligner, columns=config.human_columns)
            human.check_alignment()
            return human
        case "program":
            function = task.make_feedback_function(style=config.style, sandbox=config.sandbox)
            if function is None:
                raise UserError(f"task {task.name} has no program of its own; name one as pkg.mod:function")
            return ProgramFeedback(function, concurrency=config.sandbox.max_concurrent, **options)
    assert config.source != "reward_model", "the reward model is served by actors.engines.reward"
    log = folder / "feedback.log" if folder else None
    return ProgramFeedback(config.source, concurrency=config.concurrency, log=log, **options)
