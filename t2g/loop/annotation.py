"""The annotation stage: which responses need feedback, their records, and a summary of all records.

Written against `t2g.interfaces`: a feedback source may be a program, a person or a model. Files, signals and engines
belong to the job.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
from pydantic_core import to_json

from t2g.errors import UserError
from t2g.feedback.conversations import CONVERSATION_FIELDS, NEXT_MESSAGE, read_conversation, split_conversation
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import Record, Task, describe_record, stable_id
from t2g.tasks.prompts_only import format_chat
from t2g.text.thinking import NO_ANSWER
from t2g.types import FeedbackStatus, Prompt

STATUSES: tuple[FeedbackStatus, ...] = get_args(FeedbackStatus)
MAX_REASONS = 5  # kinds of failure in a summary
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


def record_keys(record: AnnotatedRecord) -> tuple[str, str]:
    """Return the keys of the samples that the record answers: by its response, and by its sample_index.

    A given or planted response is identified by its text: a changed text is judged anew at any position in the file.
    A sampled response is identified by its index, because its text is not known in advance.
    """
    prompt = record.prompt_id, record.prompt, record.payload
    return _make_key(*prompt, record.response), _make_key(*prompt, record.sample_index)


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
        text, payload, messages, response, problem = "", {}, (), None, ""
        try:
            text, payload = task.prompt_text(record), task.payload(record)
            messages = tuple(task.policy_messages(record))
            response = task.response(record)
            if response is None:
                problem = f"{describe_record(record, number)} has no response; it has {', '.join(record)}"
        except ValueError as error:
            problem = f"{describe_record(record, number)}: {error}"
        prompt_id = task.prompt_id(record) or stable_id(text or f"record {number}")
        prompt = Prompt(
            prompt_id=prompt_id, prompt_text=text, task=task.name, payload=payload, messages=messages,
            data_file=getattr(record, "file", ""),
        )  # fmt: skip
        samples.append(Sample(prompt, num_responses[prompt_id], response, problem))
        num_responses[prompt_id] += 1
    return samples


def merge_judgements(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample for each response to a prompt, of records that judge some responses several times."""
    merged = dict[Any, Sample]()
    num_responses: Counter[str] = Counter()  # by prompt id
    for sample in samples:
        prompt_id = sample.prompt.prompt_id
        key = id(sample) if sample.problem else (prompt_id, sample.prompt.prompt_text, sample.response)
        if key not in merged:
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
        where, own_id, group = describe_record(record, number), task.prompt_id(record), ""
        common: dict[str, Any] = {"task": task.name, "data_file": getattr(record, "file", "")}
        whole = Prompt(prompt_id=own_id or stable_id(where), prompt_text="", **common)
        try:
            turns = [*split_conversation(*read_conversation(record))]
        except ValueError as error:
            samples.append(Sample(whole, 0, problem=f"{where}: {error}"))
            continue
        if not turns:
            samples.append(Sample(whole, 0, problem=f"{where} has no message by the assistant", is_left_out=True))
        others = {name: value for name, value in task.payload(record).items() if name not in CONVERSATION_FIELDS}
        for turn in turns:
            text, payload = format_chat(turn.history), {**others, NEXT_MESSAGE: turn.critique}
            prompt_id = f"{own_id}/{turn.number}" if own_id else stable_id(text)
            prompt = Prompt(prompt_id=prompt_id, prompt_text=text, payload=payload, messages=turn.history, **common)
            has_user = any(message["role"] == "user" for message in turn.history)
            group = group or (text if has_user else "")
            parts = {"message by a user before it": has_user, "text": turn.response.strip(), "reply": turn.critique}
            subject = f"{where}: the assistant's turn {turn.number}"
            lacks = [f"{subject} has no {name}" for name, part in parts.items() if not part]
            if turn.problem:
                lacks = [f"{subject} is not understood: {turn.problem}"]
            samples.append(
                Sample(prompt, num_responses[prompt_id], turn.response, "".join(lacks[:1]), bool(lacks), group)
            )
            num_responses[prompt_id] += not lacks
    return samples


def plant_samples(samples: Sequence[Sample], task: Task, per_prompt: float, *, seed: int) -> list[Sample]:
    """Return samples with planted faults for the prompts of `samples`.

    Args:
        per_prompt: Mean number per prompt: 0.5 plants one response for every second prompt, 2 plants two for each.

    Raises:
        UserError: The task plants no faults.
    """
    planted = []
    last_of_prompt = {sample.prompt.prompt_id: sample for sample in samples if not sample.problem}
    for number, last in enumerate(last_of_prompt.values()):
        rng = np.random.default_rng(int(stable_id(f"{seed}/{last.prompt.prompt_id}"), 16))
        for index in range(int((number + 1) * per_prompt) - int(number * per_prompt)):
            response = task.plant_faults(last.prompt, rng)
            if response is None:
                raise UserError(
                    f"annotate.planted={per_prompt:g}: task {task.name} plants no faults for prompt "
                    f"{last.prompt.prompt_id}; set it to 0, or give the task a method plant_faults (task tiny has one)"
                )
            planted.append(Sample(last.prompt, last.sample_index + 1 + index, response))
    return planted


class ConcurrencyLimit:
    """A limit of concurrent judgements. After `close` no judgement starts; those in flight finish."""

    def __init__(self, max_in_flight: int) -> None:
        self._slots = asyncio.Semaphore(max_in_flight)
        self._is_open = True
        self.num_in_flight = 0

    def close(self) -> None:
        self._is_open = False

    async def run(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Wait for a slot and await `work(*args)`, unless the limit is closed by then."""
        async with self._slots:
            if self._is_open:
                self.num_in_flight += 1
                try:
                    await work(*args)
                finally:
                    self.num_in_flight -= 1


async def annotate(
    samples: Sequence[Sample],
    feedback: FeedbackSource,
    on_record: Callable[[Sample, AnnotatedRecord], None],
    limit: ConcurrencyLimit,
    *,
    sample_responses: SampleResponses | None = None,
) -> None:
    """Judge every sample and call `on_record` with each record as soon as it is made, in no fixed order.

    Failed feedback gives a record with that status. A sample that has no slot before `limit` is closed gets no record.

    Args:
        samples: Samples without a `problem`; see `make_refused_record` for those with one.
        sample_responses: Called once for each prompt that has samples without a response.
    """

    sampled: dict[str, asyncio.Future[Sequence[str | None]]] = {}  # by prompt id

    async def judge(sample: Sample, response: str | None) -> None:
        if response is None:
            made = make_failed_feedback("unparsable", source=feedback.name, version="", reason=NO_ANSWER)
        else:
            made = await feedback.judge(sample.prompt, response)
        on_record(sample, make_annotated_record(sample.prompt, response or "", made, sample_index=sample.sample_index))

    async def sample_and_judge(sample: Sample) -> None:
        response, prompt = sample.response, sample.prompt
        if response is None:
            assert sample_responses is not None, "samples without a response need sample_responses"
            if prompt.prompt_id not in sampled:
                sampled[prompt.prompt_id] = asyncio.ensure_future(sample_responses(prompt))
            response = (await sampled[prompt.prompt_id])[sample.sample_index]
        await limit.run(judge, sample, response)

    await asyncio.gather(*map(sample_and_judge, samples))


def make_refused_record(sample: Sample, source: str) -> AnnotatedRecord:
    """Return the failed record of a sample with a problem; no source judges it."""
    failed = make_failed_feedback("failed", source=source, version="", reason=sample.problem)
    return make_annotated_record(sample.prompt, "", failed, sample_index=sample.sample_index)


def select_heldout_prompts(prompts: Iterable[str], share: float) -> set[str]:
    """Return the prompt texts, or groups of samples, whose records the reward model never trains on.

    Selects texts whose hash is below `share`, so that other data do not change the selection. Texts are used because
    a prompt with two ids must not be on both sides. At least one is selected and at most all but one; none of one.
    """
    order = sorted((int(stable_id(prompt), 16) / 2**64, prompt) for prompt in set(prompts))
    count = sum(fraction < share for fraction, _ in order)
    count = min(max(count, 1), len(order) - 1)
    return {prompt for _, prompt in order[: max(count, 0)]}


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
    usable = [record for record in records if record.usable]
    statuses = Counter(record.status for record in records)
    num_quotes = sum(record.num_quotes for record in records)
    modes = Counter(record.execution["mode"] for record in records if "mode" in record.execution)
    agreements = [record.agreement for record in usable if record.agreement is not None]
    return {
        "records": len(records),
        **{status: statuses[status] for status in STATUSES},
        "failed_share": 1 - len(usable) / len(records),
        "spans_per_response": sum(len(record.spans or ()) for record in usable) / len(usable) if usable else None,
        "located_share": sum(record.num_located for record in records) / num_quotes if num_quotes else None,
        "agreement": sum(agreements) / len(agreements) if agreements else None,
        **{f"sandbox_{mode}_share": count / modes.total() for mode, count in sorted(modes.items())},
        "reasons": group_reasons(r.reason or f"status {r.status}" for r in records if not r.usable),
        **({"left_out": reasons} if (reasons := group_reasons(left_out)) else {}),
    }


def group_reasons(reasons: Iterable[str]) -> list[tuple[int, str]]:
    """Return (count, first example) of the most frequent kinds; reasons of one kind differ only in their numbers."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(re.sub(r"\d+", "#", reason), []).append(reason)
    largest = sorted(kinds.values(), key=len, reverse=True)[:MAX_REASONS]
    return [(len(kind), kind[0]) for kind in largest]


def format_summary(summary: dict[str, Any]) -> str:
    """Return the lines that describe a result of `summarize` to a user."""
    counts = ", ".join(f"{summary[status]} {status}" for status in STATUSES if summary[status])
    line = f"{summary['records']} records: {counts}"
    for name, template in (
        ("spans_per_response", "{:.1f} spans each"),
        ("located_share", "{:.0%} of the quotes located"),
        ("agreement", "agreement {:.2f}"),
    ):
        if summary[name] is not None:
            line += "; " + template.format(summary[name])
    lines = [f"{count} x {reason}" for count, reason in summary["reasons"]]
    lines += [f"left out: {count} x {reason}" for count, reason in summary.get("left_out", ())]
    return "\n  ".join([line, *lines])
