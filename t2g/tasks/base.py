"""The base class of tasks, and the lookup by name."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.config.python_functions import import_object
from t2g.config.secrets import mask_secrets
from t2g.errors import MissingLocally, UserError
from t2g.sandbox import SandboxConfig
from t2g.text.tokenizer import Message
from t2g.types import Prompt, read_table_integer

Record = Mapping[str, Any]  # one row of a data file, columns already mapped; see `t2g.data.load.FileRecord`
FeedbackFunction = Callable[..., Any]  # (prompt_text, response_text, *, payload) -> a judgement of t2g.feedback.parse
SPARSE = StyleConfig()  # the default style

_SEVERE = '{"quote": "...", "severity": 3}'
ID_FIELDS = ("prompt_id", "question_id", "id")


@dataclass(frozen=True, kw_only=True)
class Review:
    """The texts of a request for feedback."""

    opening: str  # subject and criteria of the review
    input_name: str  # heading of the input: "Post"
    subject: str  # kind of response: "summary"
    sparse: str  # number and size of the quoted pieces
    labels: str = ""  # sentence that defines good and poor pieces
    severity: str = ""  # meaning of severities 1, 2 and 3, where the task distinguishes them; RL pays by them
    questions: str = ""  # that an annotator answers for itself before it judges, in this order

    def instructions(self, style: StyleConfig) -> str:
        """Return the instructions in this style, with the JSON format that `t2g.feedback.parse` reads."""
        if style.critique:
            first = "Say so in a short critique, then quote"
            judged = "that the critique praises (good) and blames (poor)"
        else:
            first = "Quote"
            judged = "that are good or poor"
        if style.labels == "dense":
            scope = f"the whole {self.subject} piece by piece, in order, each piece as good or as poor; leave none out."
        else:
            scope = f"the pieces of the {self.subject} {judged}: {self.sparse}."
        parts = [self.opening, first, scope, self.labels]
        if self.severity:
            parts.append(f"Severity of a poor piece: {self.severity}. 1 is a plain quote, 3 is {_SEVERE}.")
        parts.append(_format_answer_rules(style))
        return " ".join(filter(None, parts))


def _format_answer_rules(style: StyleConfig) -> str:
    critique = ""
    order = ""
    missing = "What is missing has no quote."
    if style.critique:
        critique = '"critique": "...", '
        order = "Write the critique first. "
        missing = "What is missing belongs into the critique and has no quote."
    return (
        f'Answer with JSON only: {{{critique}"good": ["..."], "poor": ["..."]}}. '
        f"{order}Quote exactly, character by character. "
        'Where a quoted text stands several times and not the first is meant, write {"quote": "...", "occurrence": 2}. '
        f"{missing}"
    )


class Task:
    """Base class. A subclass defines name, input_fields, review and the first three methods.

    A class that does not inherit from this one but has all its attributes is a task as well.
    """

    name: str  # goes into Prompt.task
    score_name = ""  # key of `measure` that selects the best checkpoint; "" for a task without a measure
    step_pattern = r"[.!?](?=\s|$)|\n"  # end of a step of a response (rewards.placement=step): sentences
    input_fields: tuple[str, ...]  # fields that the prompt contains, and the payload therefore does not
    review: Review

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        """Return the chat that the policy answers.

        Args:
            input_limit: Number of characters to which input text is truncated. A task whose inputs make no sense when
                truncated may ignore it; prompts too long for the policy's window are then refused.

        Raises:
            ValueError: A field is missing or has another type.
        """
        raise NotImplementedError

    def prompt_text(self, record: Record) -> str:
        """Return the input as the feedback source and the report see it."""
        raise NotImplementedError

    def reference(self, record: Record) -> str | None:
        """Return the target of supervised training."""
        raise NotImplementedError

    def prompt_id(self, record: Record) -> str | None:
        """Return the record's own id, if it has one."""
        for field in ID_FIELDS:
            if (prompt_id := format_id(record.get(field))) is not None:
                return prompt_id
        return None

    def is_chat(self, record: Record) -> bool:
        """Return whether the prompt is a conversation, so that a reward function of TRL's form gets messages."""
        return any(isinstance(record.get(field), list) for field in ("prompt", "messages"))

    def payload(self, record: Record) -> dict[str, Any]:
        """Return what feedback function and measure may read besides: all fields but the ids and the input."""
        left_out = (*ID_FIELDS, *self.input_fields)
        return {key: value for key, value in record.items() if key not in left_out}

    def response(self, record: Record) -> str | None:
        """Return the record's response to judge, if it has one. ValueError if it is no text, or blank."""
        return get_optional_text(record, "response")

    def feedback_messages(
        self, prompt: Prompt, response_text: str, input_limit: int | None = None, *, style: StyleConfig = SPARSE
    ) -> list[Message]:
        """Return the chat that the reward model answers. The payload of `prompt` may be empty."""
        material = self.material(prompt, response_text, input_limit)
        content = f"{self.review.instructions(style)}\n\n{material}"
        return [{"role": "user", "content": content}]

    def material(self, prompt: Prompt, response_text: str, input_limit: int | None = None) -> str:
        """Return input and response under headings."""
        subject = self.review.subject.capitalize()
        return f"{self.review.input_name}:\n{prompt.prompt_text[:input_limit]}\n\n{subject}:\n{response_text}"

    def notes(self, prompt: Prompt, response_text: str) -> str | None:
        """Return what only an annotator sees: a human's feedback, the log of a test.

        None unless the response is the record's own: notes about another response would mislead.
        """
        try:
            is_own = self.response(prompt.payload) == response_text
            return self.own_notes(prompt.payload) if is_own else None
        except ValueError:  # the record's response or its notes are no text; `response_text` may be sampled
            return None

    def own_notes(self, payload: Mapping[str, Any]) -> str | None:
        """Return the record's notes about its own response, for `notes`."""
        return None

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction | None:
        """Return the task's own feedback function, if it has one."""
        return None

    def revise_messages(
        self, prompt: Prompt, response_text: str, critique: str, input_limit: int | None = None
    ) -> list[Message]:
        """Return the chat that asks for a revised response, with a critique of the first one."""
        subject = self.review.subject
        content = (
            f"{self.review.input_name}:\n{prompt.prompt_text[:input_limit]}\n\n"
            f"A {subject} that was given:\n{response_text}\n\nA critique of it:\n{critique}\n\n"
            f"Write the {subject} again: keep what the critique praises, mend what it blames, add what it says is "
            f"missing. Answer with the {subject} alone, in the same form."
        )
        return [{"role": "user", "content": content}]

    def teacher_messages(self, prompt: Prompt, critique: str) -> list[Message]:
        """Return the policy's chat with a critique of an earlier response, which the teacher does not see."""
        *history, last = prompt.chat
        content = (
            f"{last['content']}\n\nA critique of an earlier {self.review.subject}:\n{critique}\n\n"
            "Answer again: repeat what the critique praises, avoid what it blames, add what it says is missing. Do not "
            "mention the critique."
        )
        return [*history, {**last, "content": content}]

    def faults(self, prompt: Prompt, response_text: str) -> Sequence[tuple[str, int, int]]:
        """Return faults that the task finds without feedback: class, start and end character of the response."""
        return ()

    def plant_faults(self, prompt: Prompt, rng: np.random.Generator) -> str | None:
        """Return a correct response with random planted faults of each class, or None if the task has no planter."""
        return None

    def can_measure(self, prompt: Prompt) -> bool:
        """Return whether `measure` gives `score_name` for every response to this prompt. Executes no code."""
        return bool(self.score_name)

    def reference_mode(self, prompt: Prompt, *, sandbox: SandboxConfig) -> str | None:
        """Return the mode of `sandbox.tests` in which the record's reference solution passes.

        Returns:
            separate, together or neither; None without a reference or without tests.
        """
        return None

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Return metrics of one response that do not depend on any feedback source, or None."""
        return None


TASKS = {
    "summarization": "t2g.tasks.summarization:SummarizationTask",
    "qa": "t2g.tasks.qa:QATask",
    "code": "t2g.tasks.code:CodeTask",
    "prompts": "t2g.tasks.prompts_only:PromptsTask",
    "tiny": "t2g.tasks.tiny.task:TinyTask",
    "tiny_code": "t2g.tasks.tiny.task:TinyCodeTask",
    "tiny_tools": "t2g.tasks.tiny.task:TinyToolsTask",
    "findings": "t2g.tasks.findings:FindingsTask",
    "finding_lines": "t2g.tasks.findings:FindingLinesTask",
    "checked_lines": "t2g.tasks.checked_lines:CheckedLinesTask",
}


def get_task(name: str) -> Task:
    """Return the task of that name, or the task at an import path `pkg.mod:Class`. UserError if there is none."""
    path = TASKS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        near = get_close_matches(name, TASKS, n=1)
        advice = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"task={name!r} is none of {', '.join(TASKS)} and no import path pkg.mod:Class{advice}")
    try:
        return import_object(path)()
    except Exception as error:  # import of the user's module and construction of its class may raise anything
        kind = MissingLocally if isinstance(error, ModuleNotFoundError) else UserError
        message = f"task={name!r} cannot be loaded: {type(error).__name__}: {error}"
        raise kind(mask_secrets(message)) from error


def format_id(value: Any) -> str | None:
    """Return an id as text, None for a missing one.

    >>> format_id(7.0), format_id(float("nan"))
    ('7', None)
    """
    number = read_table_integer(value)
    return None if number is None else str(number)


def stable_id(text: str) -> str:
    """Return an id of a text that is the same in every run."""
    return hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).hexdigest()


def describe_record(record: Record, number: int, key: str = "data") -> str:
    """Return the number of a record (from 1), and its file and line if it is of a file, for a message."""
    where = getattr(record, "where", "")
    description = f"{key} record {number}".strip()
    return f"{description} ({where})" if where else description


def get_optional_text(record: Record, *names: str) -> str | None:
    """Return `get_text`, or None if the record has none of the fields."""
    if all(record.get(name) is None for name in names):
        return None
    return get_text(record, *names)


def get_text(record: Record, *names: str) -> str:
    """Return the first of these fields that the record has.

    Raises:
        ValueError: The record has none of them, or its value is no text, or blank.
    """
    for name in names:
        value = record.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"field {name} is {value!r:.80}; it needs a text that is not empty")
        return value
    existing = ", ".join(map(str, record)) or "none"
    raise ValueError(f"has no field {' or '.join(names)}; it has {existing}")
