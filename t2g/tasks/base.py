"""What a task is, and how one is found by name."""

import hashlib
import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from t2g.data.chat import Message
from t2g.errors import UserError
from t2g.types import Prompt

Record = Mapping[str, Any]  # one row of a data file, columns already mapped

ANSWER_FORMAT = (
    'Answer with JSON only: {"critique": "...", "good": ["..."], "poor": ["..."]}. '
    "Write the critique first. Quote exactly, character by character. "
    'Where a quoted text stands several times and not the first is meant, write {"quote": "...", "occurrence": 2}. '
    "What is missing belongs into the critique and has no quote."
)


class Task(Protocol):
    name: str  # goes into Prompt.task
    can_cut: bool  # whether a prompt too long for the policy's window loses input text; else it is refused
    score_name: str  # key of `measure` that decides which checkpoint is best; "" for a task without a measure

    def prompt_id(self, record: Record) -> str | None:
        """The record's own id, if it has one."""
        ...

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        """The chat that the policy answers, input text cut to its first `input_limit` characters.

        Raises ValueError with a sentence about the record when a field is missing or of another type.
        """
        ...

    def prompt_text(self, record: Record) -> str:
        """The input as the feedback source and the report see it."""
        ...

    def payload(self, record: Record) -> dict[str, Any]:
        """What else critic and measure may look at."""
        ...

    def reference(self, record: Record) -> str | None:
        """The answer to imitate in supervised training."""
        ...

    def feedback_messages(self, prompt: Prompt, response_text: str, input_limit: int | None = None) -> list[Message]:
        """The chat that the reward model answers. Must do with an empty payload."""
        ...

    def measure(self, prompt: Prompt, response_text: str) -> dict[str, float] | None:
        """Metrics of one response that no feedback source has a part in, or None."""
        ...


_TASKS = {
    "prompts": "t2g.tasks.prompts:PromptsTask",
    "summarization": "t2g.tasks.summarization:SummarizationTask",
    "tiny": "t2g.tasks.tiny_task:TinyTask",
}


def get_task(name: str) -> Task:
    """The task of that name, or the one at an import path `pkg.mod:Class`. UserError when there is none."""
    path = _TASKS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise UserError(f"task={name!r} is none of {', '.join(_TASKS)} and no import path pkg.mod:Class")
    try:
        return getattr(importlib.import_module(module), attribute)()
    except Exception as error:  # the user's module may raise anything while it is imported, its class when made
        raise UserError(f"task={name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def stable_id(text: str) -> str:
    """An id for a record that has none: the same text has the same id in every run."""
    return hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).hexdigest()


def text_field(record: Record, *names: str) -> str:
    """The first of these fields that the record has. ValueError when it has none, or it is no text, or blank."""
    for name in names:
        if record.get(name) is not None:
            value = record[name]
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"field {name} is {value!r:.80}; it needs a text that is not empty")
            return value
    raise ValueError(f"has no field {' or '.join(names)}; it has {', '.join(map(str, record)) or 'none'}")
