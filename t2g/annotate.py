"""Stage 1: sample the policy, criticise each response, one annotated record per response.

Written against two of the four seams: whether the critic is a program, a person or a model is the source's business.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from t2g.data.records import AnnotatedRecord, annotated_record
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.types import Prompt, Rollout


async def annotate(
    prompts: Sequence[Prompt],
    sampling: Sampling,
    rollouts: RolloutSource,
    feedback: FeedbackSource,
    on_record: Callable[[AnnotatedRecord], None],
) -> list[AnnotatedRecord]:
    """`sampling.num_samples` records per prompt, in the order of `prompts`; failed feedback is a record of that status.

    `on_record` hears of each as soon as it is made.
    """

    async def judged(prompt: Prompt, rollout: Rollout) -> AnnotatedRecord:
        record = annotated_record(prompt, rollout, await feedback.judge(prompt, rollout.response_text))
        on_record(record)
        return record

    async def one(prompt: Prompt) -> list[AnnotatedRecord]:
        sampled = await rollouts.sample(prompt, sampling)
        return list(await asyncio.gather(*(judged(prompt, rollout) for rollout in sampled)))

    groups = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return [record for group in groups for record in group]


def is_heldout(prompt_id: str, share: float) -> bool:
    """Whether a prompt's records are kept for the reward model's report: a function of its id alone."""
    digest = hashlib.blake2b(prompt_id.encode("utf-8", errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
