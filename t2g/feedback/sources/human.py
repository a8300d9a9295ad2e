"""Feedback that people wrote into files, looked up by prompt and response; several people's judgements are votes.

    {"prompt": "Why?", "response": "About a laptop.", "critique": "It was a phone.", "poor": ["laptop"]}
    prompt_id,response,critique,spans
    7,About a laptop.,It was a phone.,"[{""start"": 8, ""end"": 14, ""label"": ""poor""}]"

A file is JSON lines or CSV, with these fields or those of the task and a critique. A row has quotes (good, poor) or
offsets (spans, half-open character ranges of the response); in a CSV cell they are JSON. If a row has none of the
three, an aligner finds the spans of the critique. An empty list means no spans.

Each row is the judgement of another person, except for equal rows and for rows with the same `version`, in which
`t2g mark` writes the person's name.
"""

import hashlib
import json
import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from t2g.concurrency import gather_all
from t2g.config.feedback import OffsetUnit, SourceConfig
from t2g.data.formats import is_data_file
from t2g.data.load import read_file, read_lines
from t2g.data.published import LABEL_FIELDS, translate_row
from t2g.errors import MissingLocally, UserError
from t2g.feedback.given_spans import NO_LABELS
from t2g.feedback.parse import make_failed_feedback, make_feedback
from t2g.feedback.records import AnnotatedRecord, parse_cells, read_record, shorten_list
from t2g.feedback.sources.aligning import find_spans
from t2g.feedback.sources.chat_client import FailureLog
from t2g.feedback.sources.votes import vote
from t2g.interfaces import Aligner, FeedbackSource
from t2g.tasks.base import Record, Task
from t2g.types import Prompt, SpanFeedback

logger = logging.getLogger(__name__)

FIELDS = ("prompt_id", "prompt", "response", "critique", "good", "poor", "spans")
Key = tuple[str | None, str | None, str]  # prompt_id and prompt (None: not in the line), response


def human_paths(source: SourceConfig) -> list[Path]:
    """Return the files of human_file."""
    files = source.human_file or ()
    if isinstance(files, str):
        files = (files,)
    return [Path(file) for file in files]


@dataclass(frozen=True, kw_only=True)
class _Judgement:
    """One person's judgement of a response."""

    feedback: SpanFeedback
    line: str
    person: str  # equal for the judgements of one person
    needs_aligner: bool  # the critique has no spans yet


class HumanFeedback(FeedbackSource):
    """Judgements from files. A response without a judgement, or with invalid lines only, has failed feedback.

    Several people's judgements of a response are voted on as those of several models, see `votes.vote`. The
    first of two judgements by one person counts; a warning lists the lines of the others. A prompt is looked up by its
    text, with its id where the line has one, and only then by its id: another data set may have the same ids.
    """

    name = "human"

    def __init__(
        self,
        paths: Sequence[Path],
        task: Task,
        aligner: Aligner | None = None,
        *,
        columns: Mapping[str, str] | None = None,
        offsets: OffsetUnit = "characters",
        labels: Mapping[str, str] = NO_LABELS,
        needs_critique: bool = True,
    ) -> None:
        """Read the files.

        Args:
            columns: Our field -> the files' field.
            offsets, labels: See `read_spans`.
            needs_critique: `StyleConfig.critique`; False: spans alone are a judgement.

        Raises:
            MissingLocally: A file does not exist.
            UserError: They have no judgements.
        """
        _check_files(paths)
        self._names = ", ".join(map(str, paths))
        self._task = task
        self._offsets: OffsetUnit = offsets
        self._labels = labels
        self._needs_critique = needs_critique
        self.aligner = aligner
        self._failures = FailureLog()
        self._judgements: dict[Key, list[_Judgement]] = {}
        self._lines: dict[str, str] = {}  # response, see `_normalize` -> the first line that judges it
        self._read_files(paths, columns or {})
        if not self._judgements:
            raise UserError(f"human_file={self._names} holds no judgements")

    def _read_files(self, paths: Sequence[Path], columns: Mapping[str, str]) -> None:
        incomplete: list[str] = []
        repeated: list[str] = []
        for path in paths:
            rows = read_file(path) if is_data_file(path) else read_lines(path)
            for line, row in rows:
                row |= {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
                key = _make_key(row, self._task)
                if key is None:
                    incomplete.append(line)
                    continue
                _, _, response = key
                judgement = self._read(path.name, line, row, response)
                if not self._add(key, judgement):
                    repeated.append(line)
        if repeated:
            message = "not used: %d judgements of a response that the same person judged before, %s"
            lines = ", ".join(shorten_list(repeated))
            logger.warning(message, len(repeated), lines)
        if incomplete:
            count = len(incomplete)
            sentence = f"{count} lines judge no response, the first at {incomplete[0]}: response and prompt are needed"
            self._failures.log("incomplete", sentence)

    def _add(self, key: Key, judgement: _Judgement) -> bool:
        """Add a judgement of a response; return False if the person already has a usable judgement of it.

        A usable judgement replaces unusable ones.
        """
        _, _, response = key
        self._lines.setdefault(_normalize(response), judgement.line)
        judgements = self._judgements.setdefault(key, [])
        usable = [known for known in judgements if known.feedback.usable]
        if any(known.person == judgement.person for known in usable):
            return False
        if usable and not judgement.feedback.usable:
            return True  # `_read` has reported it
        self._judgements[key] = [*usable, judgement]
        return True

    def check_alignment(self) -> None:
        """Raise UserError if a critique has no spans and there is no aligner to find them."""
        judgements = chain.from_iterable(self._judgements.values())
        lines = [judgement.line for judgement in judgements if judgement.needs_aligner]
        if lines and self.aligner is None:
            raise UserError(
                f"{len(lines)} critiques have no spans, the first at {lines[0]}; "
                'set align to llm or reward_model to find them, or write "good": [] where none are meant'
            )

    async def judge(self, prompt: Prompt, response_text: str) -> SpanFeedback:
        judgements = self._find(prompt, response_text)
        if not judgements:
            sentence = f"{self._names} has no judgement of this response to prompt {prompt.prompt_id}"
            line = self._lines.get(_normalize(response_text))
            if line is not None:
                sentence += (
                    f"; {line} judges this response to another prompt, or a response that differs only in line ends, "
                    "blanks at its ends or Unicode form"
                )
            self._failures.log("missing", sentence)
            return make_failed_feedback("failed", source=self.name, version="", reason=sentence)
        answers = await gather_all(self._complete(judgement, prompt, response_text) for judgement in judgements)
        if len(answers) == 1:
            return answers[0]
        aligner_versions: dict[str, None] = {}  # each begins with a comma
        for answer, judgement in zip(answers, judgements, strict=True):
            aligner_version = answer.version.removeprefix(judgement.feedback.version)
            aligner_versions[aligner_version] = None
        versions = _join_versions(judgements) + "".join(aligner_versions)
        usable = [answer for answer in answers if answer.usable]
        if 2 * len(usable) <= len(answers):
            first_unusable = next(answer for answer in answers if not answer.usable)
            return replace(first_unusable, version=versions)
        voted = vote(usable, len(answers), response_text)
        return replace(voted, version=versions)

    async def _complete(self, judgement: _Judgement, prompt: Prompt, response_text: str) -> SpanFeedback:
        """Return the feedback of a judgement, with spans by the aligner if it has none."""
        if not judgement.needs_aligner:
            return judgement.feedback
        assert self.aligner is not None, "see check_alignment"
        return await find_spans(self.aligner, prompt, response_text, judgement.feedback)

    def is_current(self, record: AnnotatedRecord, criterion: str = "") -> bool:
        """Return whether the record still agrees with the files.

        Args:
            criterion: Name of this source among several sources of the record; "": it is the only one.
        """
        judgements = self._find(record.to_prompt(), record.response)
        if not judgements and not criterion:
            return False
        # An aligner appends its version after a comma. `combine_feedback` joins the versions of several sources.
        version = _join_versions(judgements)
        if criterion:
            version = f"{criterion}: {version}"
        versions = f"; {record.version}; "
        return f"; {version}; " in versions or f"; {version}, " in versions

    def needs_aligner(self, prompt: Prompt, response_text: str) -> bool:
        return any(judgement.needs_aligner for judgement in self._find(prompt, response_text))

    def _find(self, prompt: Prompt, response_text: str) -> list[_Judgement]:
        """Return the judgements of a response, one for each person."""
        judgements: list[_Judgement] = []
        for prompt_id in (prompt.prompt_id, None):
            judgements += self._judgements.get((prompt_id, prompt.prompt_text, response_text), ())
        if not judgements:
            judgements = self._judgements.get((prompt.prompt_id, None, response_text), [])

        usable = [judgement for judgement in judgements if judgement.feedback.usable]
        if not usable:
            return judgements[:1]
        by_person = {judgement.person: judgement for judgement in reversed(usable)}
        return list(by_person.values())[::-1]

    def _read(self, file: str, line: str, row: Record, response: str) -> _Judgement:
        # The version has a hash of the line: changes of other lines make no judgement stale.
        content = json.dumps(row, default=str).encode(errors="replace")
        digest = hashlib.blake2b(content, digest_size=4).hexdigest()
        names = {"source": self.name, "version": f"{file}@{digest}"}
        marks: dict[str, Any] | None = {}
        try:
            critique, marks = _read_marks(row, needs_critique=self._needs_critique)
            has_marks = marks is not None and any(mark != [] for mark in marks.values())
            if not has_marks:
                feedback = make_feedback(critique, (), (), response, **names)
            else:
                record = {"prompt": "", "response": response, "critique": critique, **names, **marks}
                read = read_record(record, offsets=self._offsets, labels=self._labels, on_flaw=_raise_flaw)
                feedback = read.to_feedback()
        except ValueError as error:
            reason = f"{line}: {error}"
            self._failures.log("line", reason)
            feedback = make_failed_feedback("failed", reason=reason, **names)

        person = digest
        name = row.get("version")
        if isinstance(name, str) and name:
            person = f"{row.get('source')}:{name}"
        return _Judgement(feedback=feedback, line=line, person=person, needs_aligner=marks is None)


def _check_files(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.is_file():
            raise MissingLocally(f"human_file={path}: there is no such file")


def _normalize(response: str) -> str:
    """Return a text that is equal for responses that look the same."""
    return unicodedata.normalize("NFC", response).replace("\r\n", "\n").strip()


def _join_versions(judgements: Sequence[_Judgement]) -> str:
    return "+".join(judgement.feedback.version for judgement in judgements)


def _raise_flaw(flaw: str) -> None:
    raise ValueError(flaw)


def _make_key(row: Record, task: Task) -> Key | None:
    """Return the key of the row, read by the task or under our field names; None if it is incomplete."""
    values: Record = row
    with suppress(ValueError):  # `_read` reports it
        values, _ = translate_row(row, FIELDS)
    names = {field: value for field, value in values.items() if isinstance(value, str)}
    response = _try_read(task.response, row) or names.get("response")
    text = _try_read(task.prompt_text, row) or names.get("prompt")
    prompt_id = task.prompt_id(row) or names.get("prompt_id")
    if not response or (text is None and prompt_id is None):
        return None
    return prompt_id, text, response


def _try_read(read: Callable[[Record], str | None], row: Record) -> str | None:
    try:
        return read(row)
    except ValueError:
        return None


def _read_marks(row: Record, *, needs_critique: bool) -> tuple[str, dict[str, Any] | None]:
    """Return the critique, and those of good, poor and spans that the row has; None if it has none."""
    fields, rest = translate_row(parse_cells(row), FIELDS)
    critique = fields.get("critique", rest.get("feedback"))  # the field of SLF5K
    marks = {name: fields[name] for name in LABEL_FIELDS if name in fields}
    if isinstance(critique, str) and critique.strip():
        return critique, marks or None
    if marks and not needs_critique:
        return "", marks
    hint = ", unless style.critique=false" if marks else ""
    raise ValueError(f"the critique is {critique!r:.80}; it needs to be a text{hint}")
