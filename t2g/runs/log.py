"""The logs of a run: metrics.jsonl, samples.jsonl, dropped.jsonl, alarms.jsonl; dashboards get the same as sinks."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from t2g.config import LogConfig
from t2g.config.validation_errors import format_first_error
from t2g.errors import UserError
from t2g.files import raise_if_unwritable, read_regular, write_atomic
from t2g.metrics import STEP, with_current_names
from t2g.text.transcript import rollout_offsets
from t2g.types import FinishReason, PolicyTurn, Prompt, Rollout, ScoredRollout, SpanFeedback

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
DROPPED_FILE = "dropped.jsonl"
ALARMS_FILE = "alarms.jsonl"
FEEDBACK_LOG = "feedback.log"  # tracebacks of a user's functions
COMMANDS_FILE = "commands.log"  # time and command of each start

TABLE_STEPS = 10  # sinks get a table of the samples of the first step and of each such one, and of each evaluation

Split = Literal["train", "eval"]
_ANY_RECORD = TypeAdapter(dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """A line of samples.jsonl; lines of trained responses also have token columns."""

    step: int
    split: Split
    prompt_id: str
    sample_index: int
    prompt: str
    response: str
    finish_reason: FinishReason
    feedback: SpanFeedback | None
    # The turns of a conversation with the replies to them; its transcript is `response`.
    turns: Annotated[tuple[PolicyTurn, ...], Field(exclude_if=lambda turns: not turns)] = ()


class SampleRow(NamedTuple):
    """A row of a dashboard's table."""

    sample: SampleRecord
    reward: float | None  # sum of the token rewards, of a trained response


class Sink:
    """A dashboard that takes what it can show of a RunLog."""

    def start(self, first_step: int) -> None:
        """Begin with this step, also if a process that died has logged later ones."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""

    def log_samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        """Take a table of samples."""


_SAMPLE = TypeAdapter(SampleRecord)


class RunLog:
    """Writer of the log files of one run folder; lines are on the disk when a call returns.

    Call `truncate` first; the caller closes the sinks. A number that is not finite becomes null in metrics.jsonl. A
    full disk raises UserError; the lines before are kept.
    """

    def __init__(self, folder: Path, config: LogConfig, sinks: Sequence[Sink] = ()) -> None:
        self._folder = folder
        self._config = config
        self._sinks = sinks
        self._last_step = -1

    def truncate(self, first_step: int) -> list[dict[str, float | None]]:
        """Drop the lines of `first_step` and later, open the log and return the metrics of the steps before, in order.

        Such lines come from a run that died after its last checkpoint. Their steps would otherwise be logged twice.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        history = _drop_steps(self._folder / METRICS_FILE, first_step)
        for name in (SAMPLES_FILE, DROPPED_FILE, ALARMS_FILE):
            _drop_steps(self._folder / name, first_step)
        self._last_step = first_step - 1
        for sink in self._sinks:
            sink.start(first_step)
        return history

    def write_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line of metrics.jsonl, and log the same numbers to every dashboard."""
        assert step > self._last_step, f"step {step} was logged before"
        self._last_step = step
        record: dict[str, float | None] = {STEP: step}
        for name, value in metrics.items():
            record[name] = float(value) if math.isfinite(value) else None
        _append(self._folder / METRICS_FILE, [record])
        for sink in self._sinks:
            sink.log(step, metrics)

    def write_samples(
        self,
        step: int,
        split: Split,
        judged: Sequence[tuple[Prompt, Rollout, SpanFeedback | None]],
        scored: Sequence[ScoredRollout] = (),
        tokenizer: Any = None,
        columns: Mapping[str, Sequence[np.ndarray]] = {},
    ) -> None:
        """Write `log.num_samples` of the judged responses, evenly spaced; those in `scored` with their tokens.

        Args:
            columns: Name -> for each response in `scored` an array [R] with a number for each token.
        """
        count = min(self._config.num_samples, len(judged))
        index_by_key = {}
        for index, response in enumerate(scored):
            index_by_key[response.rollout.prompt_id, response.rollout.sample_index] = index

        records = []
        rows: list[SampleRow] = []
        for number in range(count):
            prompt, rollout, feedback = judged[number * len(judged) // count]
            sample = _make_sample_record(step, split, prompt, rollout, feedback)
            record = _SAMPLE.dump_python(sample)
            reward = None
            index = index_by_key.get((prompt.prompt_id, rollout.sample_index))
            if index is not None:
                own_columns = {name: arrays[index] for name, arrays in columns.items()}
                record |= _make_token_lists(scored[index], tokenizer, own_columns)
                reward = float(scored[index].rewards.sum())
            records.append(record)
            rows.append(SampleRow(sample, reward))

        _append(self._folder / SAMPLES_FILE, records)
        has_table = split == "eval" or step == 1 or step % TABLE_STEPS == 0
        for sink in self._sinks if has_table else ():
            sink.log_samples(step, split, rows)

    def write_dropped(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the responses of the step that are not trained on; see `t2g.loop.sampling.make_dropped_records`."""
        lines = [{STEP: step, **record} for record in records]
        _append(self._folder / DROPPED_FILE, lines)

    def write_alarms(self, step: int, sentences: Sequence[str]) -> None:
        """Write the alarms of the step; see `t2g.loop.alarms`."""
        if sentences:
            lines = [{STEP: step, "alarm": sentence} for sentence in sentences]
            _append(self._folder / ALARMS_FILE, lines)


def _make_sample_record(
    step: int, split: Split, prompt: Prompt, rollout: Rollout, feedback: SpanFeedback | None
) -> SampleRecord:
    return SampleRecord(
        step=step,
        split=split,
        prompt_id=prompt.prompt_id,
        sample_index=rollout.sample_index,
        prompt=prompt.prompt_text,
        response=rollout.response_text,
        finish_reason=rollout.finish_reason,
        feedback=feedback,
        turns=rollout.environment_turns,
    )


def _make_token_lists(scored: ScoredRollout, tokenizer: Any, columns: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Return lists of character range, text, reward and `columns` of each sampled token."""
    rollout = scored.rollout
    is_sampled = rollout.policy_mask
    ranges = rollout_offsets(tokenizer, rollout)[is_sampled].tolist()
    lists = {
        "token_ranges": ranges,
        "token_texts": [rollout.response_text[start:end] for start, end in ranges],
        "token_rewards": scored.rewards[is_sampled].tolist(),
    }
    for name, column in columns.items():
        lists[name] = [round(float(value), 5) for value in column[is_sampled]]
    return lists


def read_records(path: Path, schema: TypeAdapter[Any] = _ANY_RECORD) -> Iterator[Any]:
    """Yield the record of each line of a RunLog's file; nothing for a missing file.

    A last line that a crash cut off is left out. Metrics of runs of earlier versions have their names of today.

    Args:
        schema: Type of a record.

    Raises:
        UserError: Another line is not a JSON object with a step, or not such a record, or the file cannot be read.
    """
    lines = (read_regular(path) or b"").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        has_step = isinstance(record, dict) and isinstance(record.get(STEP), int)
        if not has_step:
            if number < len(lines):
                raise UserError(f"{path}:{number} is not a JSON object with a step, and it is not the last line")
            continue
        try:
            yield schema.validate_python(with_current_names(record))
        except ValidationError as error:
            reason = format_first_error(error)
            raise UserError(f"{path}:{number} is not a line of a run's log ({reason})") from error


def _drop_steps(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Keep the complete lines of steps before `first_step`, and return their records."""
    records = [record for record in read_records(path) if record[STEP] < first_step]
    lines = [f"{json.dumps(record)}\n" for record in records]
    write_atomic(path, "".join(lines).encode())
    return records


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append lines and sync them to the disk; json.dumps escapes all non-ASCII text, lone surrogates included."""
    with raise_if_unwritable(path), path.open("a", encoding="ascii") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
