"""Feedback that people wrote into a file, looked up by prompt and response.

    {"prompt": "Why?", "response": "About a laptop.", "critique": "It was a phone.", "poor": ["laptop"]}
    prompt_id,response,critique,spans
    7,About a laptop.,It was a phone.,"[{""start"": 8, ""end"": 14, ""label"": ""poor""}]"

The file is JSON lines or CSV, with these fields or those of the task and a critique. A row has quotes (good, poor) or
offsets (spans, half-open character ranges of the response); in a CSV cell they are JSON. If a row has none of the
three, an aligner finds the spans of the critique. An empty list means no spans.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from t2g.config.feedback import OffsetUnit
from t2g.data.formats import is_data_file
from t2g.data.load import read_file, read_lines
from t2g.data.published import translate_row
from t2g.errors import MissingLocally, UserError
from t2g.feedback.given_spans import NO_LABELS
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.records import AnnotatedRecord, read_record, shorten_list
from t2g.feedback.sources.aligning import find_spans
from t2g.feedback.sources.chat_client import FailureLog
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import Record, Task
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

FIELDS = ("prompt_id", "prompt", "response", "critique", "good", "poor", "spans")
MARKS = ("good", "poor", "spans")
Key = tuple[str | None, str | None, str]  # prompt_id and prompt (None: not in the line), response


class HumanFeedback(FeedbackSource):
    """Judgements from a file. A response without a judgement, or with an invalid line, has failed feedback.

    The first judgement of a response is used; a warning lists the lines of the others. A prompt is looked up by id and
    text, then by its text, then by its id: another data set may have the same ids.
    """

    name = "human"

    def __init__(
        self,
        path: Path,
        task: Task,
        aligner: Aligner | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        offsets: OffsetUnit = "characters",
        labels: Mapping[str, str] = NO_LABELS,
    ) -> None:
        """Read the file.

        Args:
            columns: Our field -> the file's field.
            offsets, labels: See `read_spans`.

        Raises:
            MissingLocally: The file does not exist.
            UserError: It has no judgements.
        """
        if not path.is_file():
            raise MissingLocally(f"human_file={path}: there is no such file")
        self._path, self._task = path, task
        self._offsets, self._labels = offsets, labels
        self.aligner = aligner
        self._failures = FailureLog()
        self._judgements: dict[Key, SpanFeedback] = {}
        self._unaligned: dict[Key, str] = {}  # line of a critique without spans
        incomplete: list[str] = []
        repeated: list[str] = []
        for line, row in read_file(path) if is_data_file(path) else read_lines(path):
            row |= {ours: row[theirs] for ours, theirs in (columns or {}).items() if theirs in row}
            key = _make_key(row, task)
            if key is None:
                incomplete.append(line)
                continue
            if key in self._judgements and self._judgements[key].status != "failed":
                repeated.append(line)
                continue
            self._judgements[key] = self._read(line, row, key)
        if repeated:
            lines = ", ".join(shorten_list(repeated))
            logger.warning(
                "not used: %d judgements of a response that an earlier line judged, %s", len(repeated), lines
            )
        if incomplete:
            count = len(incomplete)
            sentence = f"{count} lines judge no response, the first at {incomplete[0]}: response and prompt are needed"
            self._failures.log("incomplete", sentence)
        if not self._judgements:
            raise UserError(f"human_file={path} holds no judgements")

    def check_alignment(self) -> None:
        """Raise UserError if a critique has no spans and there is no aligner to find them."""
        if self._unaligned and self.aligner is None:
            raise UserError(
                f"{len(self._unaligned)} critiques have no spans, the first at {next(iter(self._unaligned.values()))}; "
                'set align to llm or reward_model to find them, or write "good": [] where none are meant'
            )

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        key = self._find(prompt, response_text)
        if key is None:
            sentence = f"{self._path} has no judgement of this response to prompt {prompt.prompt_id}"
            self._failures.log("missing", sentence)
            return make_failed_feedback("failed", source=self.name, version="", reason=sentence)
        own = self._judgements[key]
        if key not in self._unaligned:
            return own
        assert self.aligner is not None, "see check_alignment"
        return await find_spans(self.aligner, prompt, response_text, own)

    def is_current(self, record: AnnotatedRecord) -> bool:
        """Return whether the record still agrees with the file."""
        key = self._find(record.to_prompt(), record.response)
        # An aligner appends its version after a comma; a file's name may contain a comma, too.
        return key is not None and f"{record.version}, ".startswith(f"{self._judgements[key].version}, ")

    def needs_aligner(self, prompt: Prompt, response_text: str) -> bool:
        return self._find(prompt, response_text) in self._unaligned

    def _find(self, prompt: Prompt, response_text: str) -> Key | None:
        candidates = (prompt.prompt_id, prompt.prompt_text), (None, prompt.prompt_text), (prompt.prompt_id, None)
        return next((key for names in candidates if (key := (*names, response_text)) in self._judgements), None)

    def _read(self, line: str, row: Record, key: Key) -> SpanFeedback:
        # The version has a hash of the line: changes of other lines make no judgement stale.
        digest = hashlib.blake2b(json.dumps(row, default=str).encode(errors="replace"), digest_size=4).hexdigest()
        names = {"source": self.name, "version": f"{self._path.name}@{digest}"}
        try:
            critique, marks = _read_marks(row)
            if marks is not None:
                record = {"prompt": "", "response": key[2], "critique": critique, **names, **marks}
                read = read_record(record, offsets=self._offsets, labels=self._labels, on_flaw=_raise_flaw)
                return read.to_feedback()
            self._unaligned[key] = line
            return make_feedback(critique, (), (), key[2], **names)
        except ValueError as error:
            reason = f"{line}: {error}"
            self._failures.log("line", reason)
            return make_failed_feedback("failed", reason=reason, **names)


def _raise_flaw(flaw: str) -> None:
    raise ValueError(flaw)


def _make_key(row: Record, task: Task) -> Key | None:
    """Return the key of the row, read by the task or under our field names; None if it is incomplete."""
    values: Record = row
    with suppress(ValueError):  # `_read` reports it
        values = translate_row(row, FIELDS)[0]
    names = {field: value for field, value in values.items() if isinstance(value, str)}
    response = _try_read(task.response, row) or names.get("response")
    text = _try_read(task.prompt_text, row) or names.get("prompt")
    prompt_id = task.prompt_id(row) or names.get("prompt_id")
    return None if not response or (text is None and prompt_id is None) else (prompt_id, text, response)


def _try_read(read: Callable[[Record], str | None], row: Record) -> str | None:
    try:
        return read(row)
    except ValueError:
        return None


def _read_marks(row: Record) -> tuple[str, dict[str, Any] | None]:
    """Return the critique, and those of good, poor and spans that the row has; None if it has none."""
    cells = {name: _parse_cell(name, value) for name, value in row.items() if name in MARKS and value is not None}
    fields, rest = translate_row({**row, **cells}, FIELDS)
    critique = fields.get("critique", rest.get("feedback"))  # the field of SLF5K
    if not isinstance(critique, str) or not critique.strip():
        raise ValueError(f"the critique is {critique!r:.80}; it needs to be a text")
    marks = {name: fields[name] for name in MARKS if name in fields}
    return critique, marks or None


def _parse_cell(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is {value!r:.80}; it needs to be a list in JSON") from None
