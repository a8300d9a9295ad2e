"""A policy that answers, criticises its own answer and revises it. Nothing is trained."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from t2g.concurrency import gather_all
from t2g.data.prompts import encode_revision
from t2g.interfaces import RolloutSource, Sampling
from t2g.tasks.base import Task
from t2g.text.tokenizer import Message, fit_chat
from t2g.types import Prompt, Rollout


@dataclass(frozen=True, kw_only=True)
class Reflecting:
    """A rollout source that revises the responses of another one. Both phases use the engines of one policy."""

    rollouts: RolloutSource
    task: Task
    tokenizer: Any  # of the policy
    max_prompt_tokens: int

    async def sample(self, prompt: Prompt, sampling: Sampling, on_rollout: Any = None) -> Sequence[Rollout]:
        """Sample responses, and revise each one whose critique is not empty and fits the context window."""
        first = await self.rollouts.sample(prompt, sampling)
        single = replace(sampling, num_samples=1)
        return await gather_all(self._revise(prompt, rollout, single) for rollout in first)

    async def _revise(self, prompt: Prompt, first: Rollout, sampling: Sampling) -> Rollout:
        def follow_up(phase: str, ids: Any) -> Prompt:  # the prompt_id decides the seed: each answer gets its own
            return replace(prompt, prompt_id=f"{prompt.prompt_id}/{first.sample_index}/{phase}", prompt_ids=ids)

        build: Callable[..., list[Message]] = partial(self.task.critique_messages, prompt, first.answer)
        ids = fit_chat(build, self.tokenizer, self.max_prompt_tokens, input_chars=len(prompt.prompt_text))
        if ids is None:
            return first
        (answer,) = await self.rollouts.sample(follow_up("critique", ids), sampling)
        critique = answer.answer.strip()
        if not critique:
            return first
        ids = encode_revision(self.task, prompt, first.answer, critique, self.tokenizer, self.max_prompt_tokens)
        if ids is None:
            return first
        (second,) = await self.rollouts.sample(follow_up("again", ids), sampling)
        return replace(second, prompt_id=prompt.prompt_id, sample_index=first.sample_index)
