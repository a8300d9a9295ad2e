"""Feedback that people wrote down before: a file, looked up by prompt and response.

    {"prompt": "Why?", "response": "About a laptop.", "critique": "It was a phone.", "poor": ["laptop"]}
    prompt_id,response,critique,spans
    7,About a laptop.,It was a phone.,"[{""start"": 8, ""end"": 14, ""label"": ""poor""}]"

JSON lines or CSV, or a record of the task with a critique in it. Quotes (good, poor) or offsets (spans, half-open
characters of the response); in a CSV cell they are JSON. Where all three are missing, the critique alone is known, and
an aligner finds what it speaks of; an empty list says that nothing is to be marked.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from t2g.data.load import SUFFIXES, read_file, read_lines
from t2g.data.published import translate
from t2g.errors import UserError
from t2g.feedback.parse import make_feedback, no_feedback
from t2g.feedback.records import AnnotatedRecord, first_few, read_record
from t2g.feedback.sources.waiting import FailureLog
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import Record, Task
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

FIELDS = ("prompt_id", "prompt", "response", "critique", "good", "poor", "spans")
MARKS = ("good", "poor", "spans")
LABELS = {"good": 1, "poor": -1}
Key = tuple[str | None, str | None, str]  # prompt_id and prompt as far as the line gives them, response


@dataclass(frozen=True)
class _Judgement:
    feedback: SpanFeedback
    aligned: bool  # false: the critique alone is known


class HumanFeedback(FeedbackSource):
    """Judgements from a file. A response that nobody judged, or in a line that is broken, has failed feedback with a
    reason that names file and line.

    Of two people who judge the same response the first in the file counts; the lines of the others are named.
    A line with prompt_id and prompt holds for a prompt that has both; then a line with the prompt's text counts before
    one with its id, since another data set may have the same ids.
    """

    name = "human"

    def __init__(
        self, path: Path, task: Task, aligner: Aligner | None = None, *, columns: Mapping[str, str] | None = None
    ) -> None:
        """columns: our field -> the file's field. UserError for a file that is missing or judges nothing."""
        if not path.is_file():
            raise UserError(f"human_file={path}: there is no such file")
        self._path, self._task = path, task
        self.aligner = aligner
        self._failures = FailureLog()
        self._judgements: dict[Key, _Judgement] = {}
        self._unaligned: list[str] = []  # places of critiques without spans
        lost: list[str] = []
        again: list[str] = []
        for where, row in read_file(path) if path.suffix in SUFFIXES else read_lines(path):
            row |= {ours: row[theirs] for ours, theirs in (columns or {}).items() if theirs in row}
            key = _key(row, task)
            if key is None:
                lost.append(where)
                continue
            if key in self._judgements and self._judgements[key].feedback.status != "failed":
                again.append(where)
                continue
            self._judgements[key] = judgement = self._judgement(where, row, key[2])
            if not judgement.aligned:
                self._unaligned.append(where)
        if again:
            places = ", ".join(first_few(again))
            logger.warning("not used: %d judgements of a response that an earlier line judged, %s", len(again), places)
        if lost:
            sentence = f"{len(lost)} lines judge no response, the first at {lost[0]}: response and prompt are needed"
            self._failures.say("lost", sentence)
        if not self._judgements:
            raise UserError(f"human_file={path} holds no judgements")

    def refuse_unaligned(self) -> None:
        """UserError where a critique has no spans and there is nobody to find them."""
        if self._unaligned and self.aligner is None:
            raise UserError(
                f"{len(self._unaligned)} critiques have no spans, the first at {self._unaligned[0]}; set annotate.align"
                ' to llm or reward_model to find them, or write "good": [] where none are meant'
            )

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        judgement = self._find(prompt, response_text)
        if judgement is None:
            sentence = f"{self._path} has no judgement of this response to prompt {prompt.prompt_id}"
            self._failures.say("missing", sentence)
            return no_feedback("failed", source=self.name, version="", reason=sentence)
        said = judgement.feedback
        if judgement.aligned:
            return said
        assert self.aligner is not None, "see refuse_unaligned"
        found = await self.aligner.align(prompt, response_text, said.critique)
        return replace(found, critique=said.critique, source=self.name, version=f"{said.version}, {found.version}")

    def is_current(self, record: AnnotatedRecord) -> bool:
        """Whether the record still says what the file says."""
        judgement = self._find(record.to_prompt(), record.response)
        if judgement is None:
            return False
        version = judgement.feedback.version  # an aligner adds its own behind a comma, and a file's name may hold one
        return record.version == version or record.version.startswith(f"{version}, ")

    def wants_aligner(self, prompt: Prompt, response_text: str) -> bool:
        judgement = self._find(prompt, response_text)
        return judgement is not None and not judgement.aligned

    def _find(self, prompt: Prompt, response_text: str) -> _Judgement | None:
        asked = (prompt.prompt_id, prompt.prompt_text), (None, prompt.prompt_text), (prompt.prompt_id, None)
        found = (self._judgements.get((*names, response_text)) for names in asked)
        return next((judgement for judgement in found if judgement is not None), None)

    def _judgement(self, where: str, row: Record, response: str) -> _Judgement:
        version = self._version(row)
        try:
            critique, marks = _read_marks(row)
            if marks is None:
                said = make_feedback(critique, (), (), response, source=self.name, version=version)
                return _Judgement(said, aligned=False)
            names = {"prompt": "", "response": response, "critique": critique, "source": self.name, "version": version}
            said = read_record({**names, **marks}, on_flaw=_refuse).to_feedback()
        except ValueError as error:
            said = no_feedback("failed", source=self.name, version=version, reason=f"{where}: {error}")
            self._failures.say("line", said.reason)
        return _Judgement(said, aligned=True)

    def _version(self, row: Record) -> str:
        """The file and a hash of the line: what changes in other lines makes no judgement stale."""
        digest = hashlib.blake2b(json.dumps(row, default=str).encode(errors="replace"), digest_size=4).hexdigest()
        return f"{self._path.name}@{digest}"


def _refuse(flaw: str) -> None:
    raise ValueError(flaw)


def _key(row: Record, task: Task) -> Key | None:
    """What the row judges, as the task reads it or else under its plain names; None where it does not say."""
    names = {field: value for field, value in _names(row).items() if isinstance(value, str)}
    response = _attempt(task.response, row) or names.get("response")
    text = _attempt(task.prompt_text, row) or names.get("prompt")
    prompt_id = task.prompt_id(row) or names.get("prompt_id")
    return None if not response or (text is None and prompt_id is None) else (prompt_id, text, response)


def _attempt(read: Callable[[Record], str | None], row: Record) -> str | None:
    try:
        return read(row)
    except ValueError:
        return None


def _names(row: Record) -> dict[str, Any]:
    """The row under our names, published ones understood."""
    try:
        return translate(row, FIELDS)[0]
    except ValueError:
        return dict(row)


def _read_marks(row: Record) -> tuple[str, dict[str, Any] | None]:
    """The critique, and the lists good, poor and spans that the row has; None for none of them."""
    cells = {name: _from_cell(name, value) for name, value in row.items() if name in MARKS and value is not None}
    fields, rest = translate({**row, **cells}, FIELDS)
    critique = fields.get("critique", rest.get("feedback"))  # SLF5K's name for it
    if not isinstance(critique, str) or not critique.strip():
        raise ValueError(f"the critique is {critique!r:.80}; it needs to be a text")
    marks = {name: fields[name] for name in MARKS if name in fields}
    if isinstance(marks.get("spans"), list):
        marks["spans"] = [_with_number(span) for span in marks["spans"]]
    return critique, marks or None


def _with_number(span: Any) -> Any:
    """A span whose label may be a word."""
    label = span.get("label") if isinstance(span, dict) else None
    return {**span, "label": LABELS[label]} if isinstance(label, str) and label in LABELS else span


def _from_cell(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {value!r:.80}; it needs to be a list in JSON") from None
