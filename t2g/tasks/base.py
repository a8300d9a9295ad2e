"""What a task is, and how one is found by name."""

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from t2g.config import StyleConfig
from t2g.errors import MissingLocally, UserError
from t2g.sandbox import SandboxConfig
from t2g.text.tokenizer import Message
from t2g.types import Prompt

Record = Mapping[str, Any]  # one row of a data file, columns already mapped
FeedbackFunction = Callable[..., Any]  # (prompt_text, response_text, *, payload) -> a judgement of t2g.feedback.parse
SPARSE = StyleConfig()  # the default style

_SEVERE = '{"quote": "...", "severity": 3}'
ID_FIELDS = ("prompt_id", "question_id", "id")


@dataclass(frozen=True, kw_only=True)
class Review:
    """The words in which a task asks for feedback."""

    opening: str  # what is reviewed, and by what it is judged
    input_name: str  # heading of the input: "Post"
    subject: str  # what the response is: "summary"
    sparse: str  # how many pieces are quoted, and of what size
    labels: str = ""  # what makes a piece good or poor, a sentence
    severity: str = ""  # what 1, 2 and 3 of a poor piece mean, where the task tells them apart; RL pays by them
    questions: str = ""  # that an annotator answers for itself before it judges, in this order

    def instructions(self, style: StyleConfig) -> str:
        """What is asked for in this style, and the JSON that `t2g.feedback.parse` reads."""
        first = "Say so in a short critique, then quote" if style.critique else "Quote"
        blamed = "that the critique praises (good) and blames (poor)" if style.critique else "that are good or poor"
        if style.labels == "dense":
            what = f"the whole {self.subject} piece by piece, in order, each piece as good or as poor; leave none out."
        else:
            what = f"the pieces of the {self.subject} {blamed}: {self.sparse}."
        parts = [self.opening, first, what, self.labels]
        if self.severity:
            parts.append(f"Severity of a poor piece: {self.severity}. 1 is a plain quote, 3 is {_SEVERE}.")
        return " ".join(part for part in (*parts, _answer_format(style)) if part)


def _answer_format(style: StyleConfig) -> str:
    critique, order, missing = "", "", "What is missing has no quote."
    if style.critique:
        critique, order = '"critique": "...", ', "Write the critique first. "
        missing = "What is missing belongs into the critique and has no quote."
    return (
        f'Answer with JSON only: {{{critique}"good": ["..."], "poor": ["..."]}}. '
        f"{order}Quote exactly, character by character. "
        'Where a quoted text stands several times and not the first is meant, write {"quote": "...", "occurrence": 2}. '
        f"{missing}"
    )


class Task:
    """A subclass says what is asked: name, input_fields, review and the first three methods. A class that inherits
    nothing and has all that stands here is a task as well.
    """

    name: str  # goes into Prompt.task
    score_name = ""  # key of `measure` that decides which checkpoint is best; "" for a task without a measure
    step_pattern = r"[.!?](?=\s|$)|\n"  # where a step of a response ends (rewards.placement=step): sentences
    input_fields: tuple[str, ...]  # fields that the prompt holds, so that the payload need not
    review: Review

    def policy_messages(self, record: Record, input_limit: int | None = None) -> list[Message]:
        """The chat that the policy answers, input text cut to its first `input_limit` characters where a part of it
        is worth an answer. A task that does not heed the limit has prompts too long for the policy's window refused.

        Raises ValueError with a sentence about the record when a field is missing or of another type.
        """
        raise NotImplementedError

    def prompt_text(self, record: Record) -> str:
        """The input as the feedback source and the report see it."""
        raise NotImplementedError

    def reference(self, record: Record) -> str | None:
        """The answer to imitate in supervised training."""
        raise NotImplementedError

    def prompt_id(self, record: Record) -> str | None:
        """The record's own id, if it has one."""
        return next((str(record[field]) for field in ID_FIELDS if record.get(field) is not None), None)

    def payload(self, record: Record) -> dict[str, Any]:
        """What else feedback function and measure may look at: all fields but the ids and the input."""
        return {key: value for key, value in record.items() if key not in (*ID_FIELDS, *self.input_fields)}

    def response(self, record: Record) -> str | None:
        """The response that the record holds and that wants feedback. ValueError when it is no text, or blank."""
        return optional_text(record, "response")

    def feedback_messages(
        self, prompt: Prompt, response_text: str, input_limit: int | None = None, *, style: StyleConfig = SPARSE
    ) -> list[Message]:
        """The chat that the reward model answers. Must do with an empty payload."""
        content = f"{self.review.instructions(style)}\n\n{self.material(prompt, response_text, input_limit)}"
        return [{"role": "user", "content": content}]

    def material(self, prompt: Prompt, response_text: str, input_limit: int | None = None) -> str:
        """What is to be judged, under headings: input and response."""
        asked, subject = prompt.prompt_text[:input_limit], self.review.subject.capitalize()
        return f"{self.review.input_name}:\n{asked}\n\n{subject}:\n{response_text}"

    def notes(self, prompt: Prompt, response_text: str) -> str | None:
        """What an annotator is shown of a response and a reward model is not: a human's feedback, the log of a test.

        None for another response than the record's own: what was said of that one would mislead.
        """
        try:
            own = self.response(prompt.payload)
        except ValueError:  # the record's response is of no use; this one may be a sampled one
            return None
        return self.own_notes(prompt.payload) if own == response_text else None

    def own_notes(self, payload: Mapping[str, Any]) -> str | None:
        """What the record says of its own response, for `notes`."""
        return None

    def make_feedback_function(self, *, style: StyleConfig, sandbox: SandboxConfig) -> FeedbackFunction | None:
        """The task's own program that criticises a response, if it has one."""
        return None

    def critique_messages(self, prompt: Prompt, response_text: str, input_limit: int | None = None) -> list[Message]:
        """The chat that asks for a critique in plain words, as a policy that reflects on its own response is asked."""
        wanted = f"Write a short critique of the {self.review.subject}: what is right, what is wrong, what is missing."
        return [{"role": "user", "content": f"{self.material(prompt, response_text, input_limit)}\n\n{wanted}"}]

    def revise_messages(
        self, prompt: Prompt, response_text: str, critique: str, input_limit: int | None = None
    ) -> list[Message]:
        """The chat that asks for the response again, with a critique of it in view."""
        subject = self.review.subject
        content = (
            f"{self.review.input_name}:\n{prompt.prompt_text[:input_limit]}\n\n"
            f"A {subject} that was given:\n{response_text}\n\nA critique of it:\n{critique}\n\n"
            f"Write the {subject} again: keep what the critique praises, mend what it blames, add what it says is "
            f"missing. Answer with the {subject} alone, in the same form."
        )
        return [{"role": "user", "content": content}]

    def faults(self, prompt: Prompt, response_text: str) -> Sequence[tuple[str, int, int]]:
        """Faults that the task knows without any feedback: class, and half-open characters of the response."""
        return ()

    def plant_faults(self, prompt: Prompt, rng: np.random.Generator) -> str | None:
        """Return a right response with random faults of each class planted into it; None where the task cannot."""
        return None

    def can_measure(self, prompt: Prompt) -> bool:
        """Return whether `measure` gives `score_name` for every response to this prompt. Must execute nothing."""
        return bool(self.score_name)

    def reference_mode(self, prompt: Prompt, *, sandbox: SandboxConfig) -> str | None:
        """Return the mode of `sandbox.tests` in which the record's reference solution passes: separate or together;
        neither; None where there is no reference or no test.
        """
        return None

    def measure(self, prompt: Prompt, response_text: str, *, sandbox: SandboxConfig) -> dict[str, float] | None:
        """Metrics of one response that no feedback source has a part in, or None. sandbox: for what it runs."""
        return None


_TASKS = {
    "summarization": "t2g.tasks.summarization:SummarizationTask",
    "qa": "t2g.tasks.qa:QATask",
    "code": "t2g.tasks.code:CodeTask",
    "prompts": "t2g.tasks.prompts_only:PromptsTask",
    "tiny": "t2g.tasks.tiny.task:TinyTask",
    "tiny_code": "t2g.tasks.tiny.task:TinyCodeTask",
    "findings": "t2g.tasks.findings:FindingsTask",
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
        kind = MissingLocally if isinstance(error, ModuleNotFoundError) else UserError
        raise kind(f"task={name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def stable_id(text: str) -> str:
    """An id for a record that has none: the same text has the same id in every run."""
    return hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).hexdigest()


def optional_text(record: Record, *names: str) -> str | None:
    """`text_field`, None where the record has none of them."""
    return text_field(record, *names) if any(record.get(name) is not None for name in names) else None


def text_field(record: Record, *names: str) -> str:
    """The first of these fields that the record has. ValueError when it has none, or it is no text, or blank."""
    for name in names:
        if record.get(name) is not None:
            value = record[name]
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"field {name} is {value!r:.80}; it needs a text that is not empty")
            return value
    raise ValueError(f"has no field {' or '.join(names)}; it has {', '.join(map(str, record)) or 'none'}")
