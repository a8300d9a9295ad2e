"""Stage 1: sample the policy, criticise each response, one annotated record per response.

Written against two of the four seams: whether the critic is a program, a person or a model is the source's business.
"""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence

from t2g.data.records import AnnotatedRecord, annotated_record
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.types import Prompt, Rollout

SampleKey = tuple[str, int]  # prompt_id, sample_index


async def annotate(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    rollouts: RolloutSource,
    feedback: FeedbackSource,
    on_record: Callable[[AnnotatedRecord], None],
    *,
    done: Collection[SampleKey] = frozenset(),
) -> None:
    """`on_record` hears of `sampling.num_samples` records per prompt, each as soon as it is made, in no fixed order.

    Failed feedback is a record of that status. Samples in `done` are not judged again, and a prompt that has all of
    them is not sampled.
    """

    async def judged(prompt: Prompt, rollout: Rollout) -> None:
        on_record(annotated_record(prompt, rollout, await feedback.judge(prompt, rollout.response_text)))

    async def one(prompt: Prompt) -> None:
        if all((prompt.prompt_id, index) in done for index in range(sampling.num_samples)):
            return
        sampled = await rollouts.sample(prompt, sampling)
        await asyncio.gather(*(judged(prompt, r) for r in sampled if (r.prompt_id, r.sample_index) not in done))

    await asyncio.gather(*(one(prompt) for prompt in prompts))


def in_prompt_order(records: Iterable[AnnotatedRecord], prompts: Sequence[Prompt]) -> list[AnnotatedRecord]:
    """One record per sample of `prompts`, in their order; the rest, of other prompts or texts, is left out."""
    place = {(prompt.prompt_id, prompt.prompt_text): number for number, prompt in enumerate(prompts)}
    found = {
        (place[record.prompt_id, record.prompt], record.sample_index): record
        for record in records
        if (record.prompt_id, record.prompt) in place
    }
    return [found[key] for key in sorted(found)]


def is_heldout(prompt_id: str, share: float) -> bool:
    """Whether a prompt's records are kept for the reward model's report: a function of its id alone."""
    digest = hashlib.blake2b(prompt_id.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
