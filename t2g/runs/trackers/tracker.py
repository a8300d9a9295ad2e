"""What a tracker does, and the table of samples as a page."""

import html
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from t2g.files import read_regular, write_atomic
from t2g.runs.log import SampleRow, Split
from t2g.text.folds import to_html
from t2g.text.segments import printable, segments
from t2g.types import PolicyTurn, SpanFeedback

COLUMNS = ("prompt_id", "prompt", "response", "critique", "status", "reward", "outcomes")
MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!~])")  # characters with a meaning in Markdown


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker logs."""

    folder: Path
    project: str
    first_step: int  # later ones of an earlier process come again
    config: Mapping[str, Any]  # by dotted key

    @property
    def name(self) -> str:
        return self.folder.name

    def load_id(self, file_name: str) -> str | None:
        """Return the id of the run in a tracker, from a file of the run folder; None before the first start."""
        content = read_regular(self.folder / file_name)
        return None if content is None else content.decode()

    def save_id(self, file_name: str, run_id: str) -> None:
        write_atomic(self.folder / file_name, run_id.encode())

    def load_or_make_id(self, file_name: str) -> str:
        run_id = self.load_id(file_name)
        if run_id is None:
            run_id = uuid.uuid4().hex
            self.save_id(file_name, run_id)
        return run_id


class Tracker(Protocol):
    """A tracker of one run. A method may raise anything, and may take long."""

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None: ...

    def log_report(self, path: Path) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SampleCells:
    """The cells of a sample, by COLUMNS but the response; texts are printable."""

    prompt_id: str
    prompt: str
    critique: str
    status: str
    reward: float | None
    outcomes: str
    response: str
    feedback: SpanFeedback
    turns: tuple[PolicyTurn, ...]

    @property
    def response_html(self) -> str:
        """Return the response with good spans on green, poor ones on red, and its calls and results folded."""
        return to_html(self.response, self.feedback.spans, self.turns)


def make_cells(row: SampleRow) -> SampleCells:
    sample = row.sample
    feedback = sample.feedback or SpanFeedback(critique="", spans=(), status="empty", source="", version="")
    prompt = printable(sample.prompt)
    critique = printable(feedback.critique)
    return SampleCells(
        prompt_id=printable(sample.prompt_id),
        prompt=prompt,
        critique=critique,
        status=feedback.status,
        reward=row.reward,
        outcomes=json.dumps(feedback.outcomes),
        response=sample.response,
        feedback=feedback,
        turns=sample.turns,
    )


def format_page(rows: Sequence[SampleRow]) -> str:
    """Return the table of samples as an HTML page."""
    lines: list[str] = []
    for row in rows:
        cells = make_cells(row)
        values: list[str] = []
        for column in COLUMNS:
            value = getattr(cells, column)
            text = "" if value is None else html.escape(str(value))
            values.append(cells.response_html if column == "response" else text)
        lines.append(f"<tr><td>{'</td><td>'.join(values)}</td></tr>")
    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    style = "table{border-collapse:collapse}td,th{border:1px solid #ccc;padding:4px;vertical-align:top;text-align:left}"
    return (
        f'<!DOCTYPE html><html><head><meta charset="utf-8"><style>{style}</style></head>'
        f"<body><table><tr>{head}</tr>{''.join(lines)}</table></body></html>\n"
    )


def format_markdown(rows: Sequence[SampleRow]) -> str:
    """Return the table of samples as Markdown without colors, which TensorBoard removes.

    Good spans are strong, poor ones emphasized.
    """
    tags = {(True, False): ("strong",), (False, True): ("em",), (True, True): ("strong", "em")}
    lines = ["good: <strong>strong</strong>, poor: <em>emphasized</em>", "", f"| {' | '.join(COLUMNS)} |"]
    lines.append("|---" * len(COLUMNS) + "|")
    for row in rows:
        cells = make_cells(row)
        parts: list[str] = []
        for segment in segments(printable(cells.response), cells.feedback.spans):
            part = _escape(segment.text)
            for tag in tags.get((segment.good, segment.poor), ()):
                part = f"<{tag}>{part}</{tag}>"
            parts.append(part)
        plain = {column: _escape(str(getattr(cells, column))) for column in COLUMNS}
        plain["response"] = "".join(parts)
        lines.append(f"| {' | '.join(plain.values())} |")
    return "\n".join(lines)


def _escape(text: str) -> str:
    escaped = MARKDOWN.sub(r"\\\1", html.escape(text))
    return escaped.replace("|", "&#124;").replace("\n", "<br>")
