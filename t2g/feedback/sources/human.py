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
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from t2g.data.load import SUFFIXES, read_file, read_lines
from t2g.data.published import translate_row
from t2g.errors import MissingLocally, UserError
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.records import AnnotatedRecord, read_record, shorten_list
from t2g.feedback.sources.chat_client import FailureLog
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import Record, Task
from t2g.types import LABELS, Prompt, SpanFeedback

logger = logging.getLogger(__name__)

FIELDS = ("prompt_id", "prompt", "response", "critique", "good", "poor", "spans")
MARKS = ("good", "poor", "spans")
Key = tuple[str | None, str | None, str]  # prompt_id and prompt as far as the line gives them, response


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
            raise MissingLocally(f"human_file={path}: there is no such file")
        self._path, self._task = path, task
        self.aligner = aligner
        self._failures = FailureLog()
        self._judgements: dict[Key, SpanFeedback] = {}
        self._unaligned: dict[Key, str] = {}  # where the critique alone is known: its place
        lost: list[str] = []
        again: list[str] = []
        for where, row in read_file(path) if path.suffix in SUFFIXES else read_lines(path):
            row |= {ours: row[theirs] for ours, theirs in (columns or {}).items() if theirs in row}
            key = _key(row, task)
            if key is None:
                lost.append(where)
                continue
            if key in self._judgements and self._judgements[key].status != "failed":
                again.append(where)
                continue
            self._judgements[key] = self._read(where, row, key)
        if again:
            places = ", ".join(shorten_list(again))
            logger.warning("not used: %d judgements of a response that an earlier line judged, %s", len(again), places)
        if lost:
            sentence = f"{len(lost)} lines judge no response, the first at {lost[0]}: response and prompt are needed"
            self._failures.say("lost", sentence)
        if not self._judgements:
            raise UserError(f"human_file={path} holds no judgements")

    def check_alignment(self) -> None:
        """UserError where a critique has no spans and there is nobody to find them."""
        if self._unaligned and self.aligner is None:
            raise UserError(
                f"{len(self._unaligned)} critiques have no spans, the first at {next(iter(self._unaligned.values()))}; "
                'set annotate.align to llm or reward_model to find them, or write "good": [] where none are meant'
            )

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        key = self._find(prompt, response_text)
        if key is None:
            sentence = f"{self._path} has no judgement of this response to prompt {prompt.prompt_id}"
            self._failures.say("missing", sentence)
            return make_failed_feedback("failed", source=self.name, version="", reason=sentence)
        said = self._judgements[key]
        if key not in self._unaligned:
            return said
        assert self.aligner is not None, "see check_alignment"
        found = await self.aligner.align(prompt, response_text, said.critique)
        return replace(found, critique=said.critique, source=self.name, version=f"{said.version}, {found.version}")

    def is_current(self, record: AnnotatedRecord) -> bool:
        """Whether the record still says what the file says."""
        key = self._find(record.to_prompt(), record.response)
        # An aligner adds its version behind a comma; a file's name may hold one, too.
        return key is not None and f"{record.version}, ".startswith(f"{self._judgements[key].version}, ")

    def needs_aligner(self, prompt: Prompt, response_text: str) -> bool:
        return self._find(prompt, response_text) in self._unaligned

    def _find(self, prompt: Prompt, response_text: str) -> Key | None:
        asked = (prompt.prompt_id, prompt.prompt_text), (None, prompt.prompt_text), (prompt.prompt_id, None)
        return next((key for names in asked if (key := (*names, response_text)) in self._judgements), None)

    def _read(self, where: str, row: Record, key: Key) -> SpanFeedback:
        # The file and a hash of the line: what changes in other lines makes no judgement stale.
        digest = hashlib.blake2b(json.dumps(row, default=str).encode(errors="replace"), digest_size=4).hexdigest()
        names = {"source": self.name, "version": f"{self._path.name}@{digest}"}
        try:
            critique, marks = _read_marks(row)
            if marks is not None:
                said = {"prompt": "", "response": key[2], "critique": critique, **names, **marks}
                return read_record(said, on_flaw=_refuse).to_feedback()
            self._unaligned[key] = where
            return make_feedback(critique, (), (), key[2], **names)
        except ValueError as error:
            reason = f"{where}: {error}"
            self._failures.say("line", reason)
            return make_failed_feedback("failed", reason=reason, **names)


def _refuse(flaw: str) -> None:
    raise ValueError(flaw)


def _key(row: Record, task: Task) -> Key | None:
    """What the row judges, as the task reads it or else under its plain names; None where it does not say."""
    given: Record = row
    with suppress(ValueError):  # said once the line is read
        given = translate_row(row, FIELDS)[0]
    names = {field: value for field, value in given.items() if isinstance(value, str)}
    response = _attempt(task.response, row) or names.get("response")
    text = _attempt(task.prompt_text, row) or names.get("prompt")
    prompt_id = task.prompt_id(row) or names.get("prompt_id")
    return None if not response or (text is None and prompt_id is None) else (prompt_id, text, response)


def _attempt(read: Callable[[Record], str | None], row: Record) -> str | None:
    try:
        return read(row)
    except ValueError:
        return None


def _read_marks(row: Record) -> tuple[str, dict[str, Any] | None]:
    """The critique, and the lists good, poor and spans that the row has; None for none of them."""
    cells = {name: _from_cell(name, value) for name, value in row.items() if name in MARKS and value is not None}
    fields, rest = translate_row({**row, **cells}, FIELDS)
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
