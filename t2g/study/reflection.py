"""A policy that answers, criticises its own answer, and answers again with the critique in view; nothing is trained."""

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
    """Engines of a policy, seen as those of the policy that reflects. Its first answers are the policy's own."""

    rollouts: RolloutSource
    task: Task
    tokenizer: Any  # of the policy
    max_prompt_tokens: int

    async def sample(self, prompt: Prompt, sampling: Sampling) -> Sequence[Rollout]:
        """An answer stays as it is where its critique is empty, or the window has no room for all."""
        first = await self.rollouts.sample(prompt, sampling)
        return await gather_all(self._again(prompt, rollout, replace(sampling, num_samples=1)) for rollout in first)

    async def _again(self, prompt: Prompt, first: Rollout, sampling: Sampling) -> Rollout:
        def asked(what: str, ids: Any) -> Prompt:  # of each answer, with seeds of its own
            return replace(prompt, prompt_id=f"{prompt.prompt_id}/{first.sample_index}/{what}", prompt_ids=ids)

        build: Callable[..., list[Message]] = partial(self.task.critique_messages, prompt, first.response_text)
        ids = fit_chat(build, self.tokenizer, self.max_prompt_tokens, input_chars=len(prompt.prompt_text))
        if ids is None:
            return first
        (critique,) = await self.rollouts.sample(asked("critique", ids), sampling)
        if not (said := critique.response_text.strip()):
            return first
        ids = encode_revision(self.task, prompt, first.response_text, said, self.tokenizer, self.max_prompt_tokens)
        if ids is None:
            return first
        (second,) = await self.rollouts.sample(asked("again", ids), sampling)
        return replace(second, prompt_id=prompt.prompt_id, sample_index=first.sample_index)
