"""The annotation: which responses need feedback, their records, and a summary of all records.

Written against `t2g.interfaces`: a feedback source may be a program, a person or a model. Files, signals and engines
belong to the job.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, get_args

import numpy as np
from pydantic_core import to_json

from t2g.errors import UserError
from t2g.feedback.conversations import NEXT_MESSAGE, AssistantTurn, read_conversation, split_conversation
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record
from t2g.feedback.tool_spans import TOOL_RESULTS, dump_results
from t2g.interfaces import FeedbackSource
from t2g.sandbox import MODES
from t2g.tasks.base import Record, Task, describe_record, stable_id
from t2g.tasks.prompts_only import format_chat
from t2g.text.messages import CONVERSATION_FIELDS
from t2g.text.thinking import NO_ANSWER
from t2g.types import FeedbackStatus, Prompt

STATUSES: tuple[FeedbackStatus, ...] = get_args(FeedbackStatus)
MAX_REASONS = 5  # kinds of failure in a summary
_MEANS = {  # key of a summary -> its text
    "spans_per_response": "{:.1f} spans each",
    "located_share": "{:.0%} of the quotes located",
    "agreement": "agreement {:.2f}",
}
SampleResponses = Callable[[Prompt], Awaitable[Sequence[str | None]]]  # by sample_index; None: no answer


@dataclass(frozen=True)
class Sample:
    """One response that needs feedback; it becomes one record of the output."""

    prompt: Prompt
    sample_index: int  # which of the responses to this prompt, from 0
    response: str | None = None  # None: the policy writes it, or the data lack it
    problem: str = ""  # why the data lack it, in a sentence
    is_left_out: bool = False  # the problem makes no record
    group: str = ""  # samples of a group are on one side of the held-out split; "": those of a prompt text

    @cached_property
    def key(self) -> str:
        """Key of the judgement; equal for samples that can share one."""
        content = self.sample_index if self.response is None else self.response
        return _make_key(self.prompt.prompt_id, self.prompt.prompt_text, self.prompt.payload, content)


class SampledResponse(NamedTuple):
    """A sample and its response, which is None if the policy gave no answer."""

    sample: Sample
    response: str | None


def record_keys(record: AnnotatedRecord) -> tuple[str, str]:
    """Return the keys of the samples that the record answers: by its response, and by its sample_index.

    A given or planted response is identified by its text: a changed text is judged anew at any position in the file.
    A sampled response is identified by its index, because its text is not known in advance.
    """
    make_key = partial(_make_key, record.prompt_id, record.prompt, record.payload)
    return make_key(record.response), make_key(record.sample_index)


def _make_key(prompt_id: str, prompt_text: str, payload: dict[str, Any], response: str | int) -> str:
    # Serialized as in the record's line: a date or NaN in a payload is read back as text or null.
    content = to_json([prompt_id, prompt_text, payload, response], inf_nan_mode="null")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def make_samples(records: Sequence[Record], task: Task) -> list[Sample]:
    """Return a sample for each record, in order, with the record's response; no tokenizer is needed.

    Responses with the same prompt id are numbered by sample_index. A record without a usable prompt or response gets a
    `problem`, which names its number from 1.
    """
    samples = []
    num_responses: Counter[str] = Counter()  # by prompt id
    for number, record in enumerate(records, start=1):
        fields = _read_record(record, number, task)
        prompt_id = task.prompt_id(record) or stable_id(fields.text or f"record {number}")
        prompt = Prompt(
            prompt_id=prompt_id,
            prompt_text=fields.text,
            task=task.name,
            payload=fields.payload,
            messages=fields.messages,
            data_file=getattr(record, "file", ""),
        )
        samples.append(Sample(prompt, num_responses[prompt_id], fields.response, fields.problem))
        num_responses[prompt_id] += 1
    return samples


@dataclass(kw_only=True)
class _RecordFields:
    """What a task reads from a record; the fields before a problem have their values."""

    text: str = ""
    payload: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()
    response: str | None = None
    problem: str = ""


def _read_record(record: Record, number: int, task: Task) -> _RecordFields:
    fields = _RecordFields()
    try:
        if _is_annotated(record, task):
            fields.text = record["prompt"]
            fields.payload = dict(record["payload"])
        else:
            text = task.prompt_text(record)
            fields.payload = task.payload(record)
            fields.text = text
            fields.messages = tuple(task.policy_messages(record))
        fields.response = task.response(record)
        if fields.response is None:
            fields.problem = f"{describe_record(record, number)} has no response; it has {', '.join(record)}"
    except ValueError as error:
        fields.problem = f"{describe_record(record, number)}: {error}"
    return fields


def _is_annotated(record: Record, task: Task) -> bool:
    """Return whether a record is a line of annotated.jsonl, whose prompt and payload the task has read before."""
    has_text = isinstance(record.get("prompt"), str) and isinstance(record.get("payload"), Mapping)
    return has_text and record.get("task") == task.name and "sample_index" in record


def merge_judgements(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample for each response to a prompt, of records that judge some responses several times."""
    merged = dict[Any, Sample]()
    num_responses: Counter[str] = Counter()  # by prompt id
    for sample in samples:
        prompt_id = sample.prompt.prompt_id
        response_key = (prompt_id, sample.prompt.prompt_text, sample.response)
        key = id(sample) if sample.problem else response_key
        if key in merged:
            continue
        merged[key] = replace(sample, sample_index=num_responses[prompt_id])
        num_responses[prompt_id] += 1
    return list(merged.values())


def make_turn_samples(records: Sequence[Record], task: Task) -> list[Sample]:
    """Return a sample for each turn of the assistant in logged conversations, in order, with its reply in the payload.

    Ids are "7/1", "7/2" in the conversation "7", else hashes of the prompts: they stay where a conversation grows. A
    turn without a prompt, a text or a reply is left out, and one with a content that is not understood. A malformed
    conversation gets one sample with a `problem`. Conversations with the same messages before the first answer are one
    group.
    """
    samples: list[Sample] = []
    num_responses: Counter[str] = Counter()  # by prompt id
    for number, record in enumerate(records, start=1):
        where = describe_record(record, number)
        own_id = task.prompt_id(record)
        make_prompt = partial(Prompt, task=task.name, data_file=getattr(record, "file", ""))
        whole = make_prompt(prompt_id=own_id or stable_id(where), prompt_text="")
        try:
            turns = [*split_conversation(*read_conversation(record))]
        except ValueError as error:
            samples.append(Sample(whole, 0, problem=f"{where}: {error}"))
            continue
        if not turns:
            samples.append(Sample(whole, 0, problem=f"{where} has no message by the assistant", is_left_out=True))

        payload = task.payload(record)
        left_out = (*CONVERSATION_FIELDS, TOOL_RESULTS)
        others = {name: value for name, value in payload.items() if name not in left_out}
        group = ""
        for turn in turns:
            text = format_chat(turn.history)
            prompt_id = f"{own_id}/{turn.number}" if own_id else stable_id(text)
            prompt = make_prompt(
                prompt_id=prompt_id,
                prompt_text=text,
                payload={**others, NEXT_MESSAGE: turn.critique, **_list_results(turn)},
                messages=turn.history,
            )
            if not group and _has_user(turn):
                group = text
            problem = _find_turn_problem(turn, where)
            sample = Sample(
                prompt,
                sample_index=num_responses[prompt_id],
                response=turn.response,
                problem=problem,
                is_left_out=bool(problem),
                group=group,
            )
            samples.append(sample)
            if not problem:
                num_responses[prompt_id] += 1
    return samples


def _list_results(turn: AssistantTurn) -> dict[str, Any]:
    return {TOOL_RESULTS: dump_results(turn.results)} if turn.results else {}


def _has_user(turn: AssistantTurn) -> bool:
    return any(message["role"] == "user" for message in turn.history)


def _find_turn_problem(turn: AssistantTurn, where: str) -> str:
    """Return why a turn of the conversation `where` cannot be used, in a sentence; "" if it can."""
    subject = f"{where}: the assistant's turn {turn.number}"
    if turn.problem:
        return f"{subject} is not understood: {turn.problem}"
    if not _has_user(turn):
        return f"{subject} has no message by a user before it"
    if not turn.response.strip():
        return f"{subject} has no text"
    if not turn.critique:
        return f"{subject} has no reply"
    return ""


def plant_samples(samples: Sequence[Sample], task: Task, per_prompt: float, *, seed: int) -> list[Sample]:
    """Return samples with planted faults for the prompts of `samples`.

    Args:
        per_prompt: Mean number per prompt: 0.5 plants one response for every second prompt, 2 plants two for each.

    Raises:
        UserError: The task plants no faults.
    """
    planted = []
    prompts: dict[str, Prompt] = {}
    last_index: dict[str, int] = {}
    for sample in samples:
        prompt_id = sample.prompt.prompt_id
        last_index[prompt_id] = max(sample.sample_index, last_index.get(prompt_id, 0))
        if not sample.problem:
            prompts[prompt_id] = sample.prompt
    for number, prompt in enumerate(prompts.values()):
        prompt_seed = stable_id(f"{seed}/{prompt.prompt_id}")
        rng = np.random.default_rng(int(prompt_seed, 16))
        num_before = int(number * per_prompt)
        num_with_this = int((number + 1) * per_prompt)
        for index in range(num_with_this - num_before):
            response = task.plant_faults(prompt, rng)
            if response is None:
                raise UserError(
                    f"annotate.planted={per_prompt:g}: task {task.name} plants no faults for prompt "
                    f"{prompt.prompt_id}; set it to 0, or give the task a method plant_faults (task tiny has one)"
                )
            sample_index = last_index[prompt.prompt_id] + 1 + index
            planted.append(Sample(prompt, sample_index, response))
    return planted


class Annotator:
    """Makes the record of a sample: `respond`, then `judge`."""

    def __init__(self, feedback: FeedbackSource, sample_responses: SampleResponses | None = None) -> None:
        """Take the source of the judgements.

        Args:
            sample_responses: Called once for each prompt that has samples without a response.
        """
        self._feedback = feedback
        self._sample_responses = sample_responses
        self._sampled: dict[str, asyncio.Future[Sequence[str | None]]] = {}  # by prompt id

    async def respond(self, sample: Sample) -> SampledResponse:
        """Return the sample with its response, sampled unless it is given."""
        if sample.response is not None:
            return SampledResponse(sample, sample.response)
        assert self._sample_responses is not None, "samples without a response need sample_responses"
        prompt_id = sample.prompt.prompt_id
        if prompt_id not in self._sampled:
            self._sampled[prompt_id] = asyncio.ensure_future(self._sample_responses(sample.prompt))
        responses = await self._sampled[prompt_id]
        return SampledResponse(sample, responses[sample.sample_index])

    async def judge(self, _key: str, sampled: SampledResponse) -> AnnotatedRecord:
        """Return the record of a sample; failed feedback gives a record with that status."""
        sample = sampled.sample
        if sampled.response is None:
            feedback = make_failed_feedback("unparsable", source=self._feedback.name, version="", reason=NO_ANSWER)
        else:
            feedback = await self._feedback.judge(sample.prompt, sampled.response)
        response = sampled.response or ""
        return make_annotated_record(sample.prompt, response, feedback, sample_index=sample.sample_index)


def make_refused_record(sample: Sample, source: str) -> AnnotatedRecord:
    """Return the failed record of a sample with a problem; no source judges it."""
    failed = make_failed_feedback("failed", source=source, version="", reason=sample.problem)
    return make_annotated_record(sample.prompt, "", failed, sample_index=sample.sample_index)


def select_heldout_prompts(prompts: Iterable[str], share: float) -> set[str]:
    """Return the prompt texts, or groups of samples, whose records the reward model never trains on.

    Selects texts whose hash is below `share`, so that other data do not change the selection. Texts are used because
    a prompt with two ids must not be on both sides. At least one is selected and at most all but one; none of one.
    """
    by_hash: list[tuple[float, str]] = []
    for prompt in set(prompts):
        fraction = int(stable_id(prompt), 16) / 2**64
        by_hash.append((fraction, prompt))
    by_hash.sort()
    num_below = sum(fraction < share for fraction, _ in by_hash)
    count = min(max(num_below, 1), len(by_hash) - 1)
    selected = by_hash[: max(count, 0)]
    return {prompt for _, prompt in selected}


def summarize(records: Sequence[AnnotatedRecord], left_out: Iterable[str] = ()) -> dict[str, Any]:
    """Return counts and shares of `records` (at least one), and the reasons of unusable records.

    Args:
        left_out: The problems of samples that made no record.

    Returns:
        failed_share: share of records that are neither ok nor empty.
        spans_per_response: mean over usable records; None without one.
        located_share: share of the quotes that occur in their response; None without a quote.
        agreement: mean over records with several annotators; None without one.
        reasons, left_out: [(count, first example)], most frequent first; left_out only if there is any.
    """
    statuses: Counter[str] = Counter()
    modes: Counter[str] = Counter()
    agreements = []
    reasons = []
    num_usable = 0
    num_spans = 0
    num_quotes = 0
    num_located = 0
    for record in records:
        statuses[record.status] += 1
        num_quotes += record.num_quotes
        num_located += record.num_located
        mode = record.execution.get("mode")
        if mode in MODES:  # a feedback function may have a mode of its own
            modes[mode] += 1
        if not record.usable:
            reasons.append(record.reason or f"status {record.status}")
            continue
        num_usable += 1
        num_spans += len(record.spans or ())
        if record.agreement is not None:
            agreements.append(record.agreement)

    summary: dict[str, Any] = {"records": len(records)}
    for status in STATUSES:
        summary[status] = statuses[status]
    summary["failed_share"] = (len(records) - num_usable) / len(records)
    summary["spans_per_response"] = _divide(num_spans, num_usable)
    summary["located_share"] = _divide(num_located, num_quotes)
    summary["agreement"] = _divide(sum(agreements), len(agreements))
    for mode, count in sorted(modes.items()):
        summary[f"sandbox_{mode}_share"] = count / modes.total()
    summary["reasons"] = group_reasons(reasons)
    reasons_left_out = group_reasons(left_out)
    if reasons_left_out:
        summary["left_out"] = reasons_left_out
    return summary


def _divide(total: float, count: int) -> float | None:
    return total / count if count else None


def group_reasons(reasons: Iterable[str]) -> list[tuple[int, str]]:
    """Return (count, first example) of the most frequent kinds; reasons of one kind differ only in their numbers."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kind = re.sub(r"\d+", "#", reason)
        kinds.setdefault(kind, []).append(reason)
    most_frequent = sorted(kinds.values(), key=len, reverse=True)[:MAX_REASONS]
    return [(len(examples), examples[0]) for examples in most_frequent]


def format_summary(summary: dict[str, Any]) -> str:
    """Return the lines that describe a result of `summarize` to a user."""
    counts = [f"{summary[status]} {status}" for status in STATUSES if summary[status]]
    line = f"{summary['records']} records: {', '.join(counts)}"
    for name, template in _MEANS.items():
        if summary[name] is not None:
            line += "; " + template.format(summary[name])
    lines = [f"{count} x {reason}" for count, reason in summary["reasons"]]
    for count, reason in summary.get("left_out", ()):
        lines.append(f"left out: {count} x {reason}")
    return "\n  ".join([line, *lines])
