"""Stage 1: which responses want feedback, what was said of them, and what is left to ask.

Written against the seams of `t2g.interfaces`: whether the feedback source is a program, a person or a model is its own
business. Files, signals and engines are the job's.
"""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from pydantic_core import to_json

from t2g.errors import UserError
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.records import AnnotatedRecord, make_annotated_record
from t2g.interfaces import FeedbackSource
from t2g.tasks.base import Record, Task, stable_id
from t2g.types import FeedbackStatus, Prompt

STATUSES: tuple[FeedbackStatus, ...] = ("ok", "empty", "unparsable", "failed")
MAX_REASONS = 5  # kinds of failure that a summary names
Write = Callable[[Prompt], Awaitable[Sequence[str]]]  # the policy's responses by sample_index


@dataclass(frozen=True)
class Sample:
    """One response that wants feedback: one record of the output."""

    prompt: Prompt
    sample_index: int  # which of the responses to this prompt, from 0
    response: str | None = None  # none: the policy writes it, or the data lacks it
    problem: str = ""  # why the data lacks it, in a sentence

    @cached_property
    def key(self) -> str:
        """Equal for samples that one judgement will do for."""
        which = self.sample_index if self.response is None else self.response
        return _key(self.prompt.prompt_id, self.prompt.prompt_text, self.prompt.payload, which)


def record_keys(record: AnnotatedRecord) -> tuple[str, str]:
    """Return the keys of the samples that the record answers: with this response, and with this number and none.

    A given or planted response is known by its text, so that a changed one is judged anew wherever it stands in the
    file. A sampled response is known by its number, since it is not known beforehand.
    """
    prompt = record.prompt_id, record.prompt, record.payload
    return _key(*prompt, record.response), _key(*prompt, record.sample_index)


def _key(prompt_id: str, prompt_text: str, payload: dict[str, Any], which: str | int) -> str:
    # As the record's line holds the payload: a date or a NaN there is read back as text and null.
    content = to_json([prompt_id, prompt_text, payload, which], inf_nan_mode="null")
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def make_samples(records: Sequence[Record], task: Task) -> list[Sample]:
    """A sample for each record, in order, with the response that the record holds; no tokenizer is needed.

    Several responses to one prompt, or under one id, are numbered by sample_index. A record without a usable prompt or
    response has a `problem` that names its number, from 1.
    """
    samples = []
    seen: Counter[str] = Counter()
    for number, record in enumerate(records, start=1):
        text, payload, response, problem = "", {}, None, ""
        try:
            text, payload = task.prompt_text(record), task.payload(record)
            response = task.response(record)
            if response is None:
                problem = f"data record {number} has no response; it has {', '.join(record)}"
        except ValueError as error:
            problem = f"data record {number}: {error}"
        prompt_id = task.prompt_id(record) or stable_id(text or f"record {number}")
        prompt = Prompt(prompt_id=prompt_id, prompt_text=text, task=task.name, payload=payload)
        samples.append(Sample(prompt, seen[prompt_id], response, problem))
        seen[prompt_id] += 1
    return samples


def plant_samples(samples: Sequence[Sample], task: Task, per_prompt: float, *, seed: int) -> list[Sample]:
    """Return a sample with planted faults for every prompt of `samples`, or for a part of them.

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
    """Lets `at_once` judgements be under way. After `close` none begins, and those under way go on."""

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._open = True
        self.num_under_way = 0

    def close(self) -> None:
        self._open = False

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[bool]:
        """Whether the judgement may begin, once it is its turn."""
        async with self._free:
            begins = self._open
            self.num_under_way += begins
            try:
                yield begins
            finally:
                self.num_under_way -= begins


async def annotate(
    samples: Sequence[Sample],
    feedback: FeedbackSource,
    on_record: Callable[[Sample, AnnotatedRecord], None],
    limit: ConcurrencyLimit,
    *,
    write: Write | None = None,
) -> None:
    """`on_record` hears of a record for each sample, as soon as it is made, in no fixed order.

    Failed feedback is a record of that status. `write` is asked once for each prompt with samples that have no
    response; those with a problem do not belong here, see `refused`. What had no turn before `limit` closed has none.
    """
    by_prompt: dict[str, list[Sample]] = {}

    async def judged(sample: Sample, response: str) -> None:
        async with limit.acquire() as begins:
            if begins:
                said = await feedback.judge(sample.prompt, response)
                on_record(
                    sample, make_annotated_record(sample.prompt, response, said, sample_index=sample.sample_index)
                )

    async def written(of_prompt: Sequence[Sample]) -> None:
        assert write is not None, "samples without a response, and nobody who writes one"
        responses = await write(of_prompt[0].prompt)
        await asyncio.gather(*(judged(sample, responses[sample.sample_index]) for sample in of_prompt))

    given = []
    for sample in samples:
        if sample.response is None:
            by_prompt.setdefault(sample.prompt.prompt_id, []).append(sample)
        else:
            given.append(judged(sample, sample.response))
    await asyncio.gather(*given, *(written(of_prompt) for of_prompt in by_prompt.values()))


def make_refused_record(sample: Sample, source: str) -> AnnotatedRecord:
    """The failed record of a sample with a problem, which nobody needs to be asked about."""
    nothing = make_failed_feedback("failed", source=source, version="", reason=sample.problem)
    return make_annotated_record(sample.prompt, "", nothing, sample_index=sample.sample_index)


def select_heldout_prompts(prompts: Iterable[str], share: float) -> set[str]:
    """The prompts (texts, so that one with two ids is not on both sides) whose records the reward model never learns.

    Those whose hash is below `share`: the same ones whatever else the data holds. At least one, and at most all but
    one; none of a single prompt.
    """
    order = sorted((int(stable_id(prompt), 16) / 2**64, prompt) for prompt in set(prompts))
    count = sum(fraction < share for fraction, _ in order)
    count = min(max(count, 1), len(order) - 1)
    return {prompt for _, prompt in order[: max(count, 0)]}


def summarize(records: Sequence[AnnotatedRecord]) -> dict[str, Any]:
    """Counts and shares of `records` (at least one), and the reasons of those that are of no use.

    failed_share: neither ok nor empty, of all; spans_per_response: of the usable ones; located_share: of the quotes
    that were given, those that stand in the response; agreement: mean over records with several annotators. The last
    three are None where there is nothing to tell. reasons: [count, first example], most frequent first.
    """
    usable = [record for record in records if record.usable]
    statuses = Counter(record.status for record in records)
    num_quotes = sum(record.num_quotes for record in usable)
    modes = Counter(record.execution["mode"] for record in records if "mode" in record.execution)
    agreements = [record.agreement for record in usable if record.agreement is not None]
    return {
        "records": len(records),
        **{status: statuses[status] for status in STATUSES},
        "failed_share": 1 - len(usable) / len(records),
        "spans_per_response": sum(len(record.spans or ()) for record in usable) / len(usable) if usable else None,
        "located_share": sum(record.num_located for record in usable) / num_quotes if num_quotes else None,
        "agreement": sum(agreements) / len(agreements) if agreements else None,
        **{f"sandbox_{mode}_share": count / modes.total() for mode, count in sorted(modes.items())},
        "reasons": _grouped(r.reason or f"status {r.status}" for r in records if not r.usable),
    }


def _grouped(reasons: Iterable[str]) -> list[tuple[int, str]]:
    """How often each kind, and one example: reasons that differ in their numbers only are of one kind."""
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        kinds.setdefault(re.sub(r"\d+", "#", reason), []).append(reason)
    largest = sorted(kinds.values(), key=len, reverse=True)[:MAX_REASONS]
    return [(len(alike), alike[0]) for alike in largest]


def format_summary(summary: dict[str, Any]) -> str:
    """One line of counts, then a line for each kind of failure."""
    counts = ", ".join(f"{summary[status]} {status}" for status in STATUSES if summary[status])
    line = f"{summary['records']} records: {counts}"
    for name, words in (
        ("spans_per_response", "{:.1f} spans each"),
        ("located_share", "{:.0%} of the quotes located"),
        ("agreement", "agreement {:.2f}"),
    ):
        if summary[name] is not None:
            line += "; " + words.format(summary[name])
    return "\n".join([line, *(f"  {count} x {reason}" for count, reason in summary["reasons"])])
