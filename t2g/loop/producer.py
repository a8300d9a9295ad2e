"""The responses of coming steps: sampled side by side, each judged as soon as it is there, handed out step by step.

Which prompts a step has, and with which seeds, depends on (run.seed, step) alone: in whatever order responses arrive,
every run trains on the same prompts in the same steps, each once per epoch.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from t2g.concurrency import cancel_all, gather_all, wait_unless_stopped
from t2g.config import PolicyJob
from t2g.data.buffer import Group
from t2g.errors import SamplingFailed
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.sampling import JudgedStep, make_sampling
from t2g.loop.steps import select_prompts
from t2g.types import Prompt


class Producer:
    """Used as `async with`, at whose end all that still runs is cancelled.

    finished: groups by step that need not be sampled again, from a checkpoint.
    """

    def __init__(
        self,
        config: PolicyJob,
        prompts: Sequence[Prompt],
        rollouts: RolloutSource,
        feedback: FeedbackSource,
        finished: Mapping[int, Sequence[Group]] | None = None,
    ) -> None:
        self._config, self._prompts, self._rollouts, self._feedback = config, prompts, rollouts, feedback
        self._restored = dict(finished or {})
        self._steps: dict[int, list[asyncio.Task[Group]]] = {}
        self._sampled_at: dict[int, float] = {}  # when a step's last response came

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all([task for tasks in self._steps.values() for task in tasks])

    def admit(self, step: int) -> None:
        """Begin with a step's prompts, unless they were begun before. UserError when there are too few."""
        if step in self._steps:
            return
        rollout = self._config.rollout
        chosen = select_prompts(
            num_prompts=len(self._prompts), per_step=rollout.prompts_per_step, step=step, seed=self._config.run.seed
        )
        sampling = make_sampling(self._config, "train", step, num_samples=rollout.samples_per_prompt)
        finished = {group.prompt.prompt_id: group for group in self._restored.pop(step, ())}
        self._sampled_at[step] = 0.0
        self._steps[step] = [
            asyncio.ensure_future(self._group(step, self._prompts[i], sampling, finished)) for i in chosen
        ]

    async def _group(self, step: int, prompt: Prompt, sampling: Sampling, finished: Mapping[str, Group]) -> Group:
        if prompt.prompt_id in finished:
            return finished[prompt.prompt_id]
        try:
            sampled = await self._rollouts.sample(prompt, sampling)
        except SamplingFailed as error:
            return Group(prompt=prompt, samples=(), failure=str(error))
        self._sampled_at[step] = time.monotonic()
        said = await gather_all(self._feedback.judge(prompt, rollout.response_text) for rollout in sampled)
        return Group(prompt=prompt, samples=tuple(zip(sampled, said, strict=True)))

    async def take(self, step: int, stop: Callable[[], bool]) -> JudgedStep:
        """The samples of a step that was admitted, once they are all there. Stopped soon after `stop()` says so."""
        started = time.monotonic()
        groups = await wait_unless_stopped(self._steps[step], stop)
        del self._steps[step]
        unsampled = {group.prompt.prompt_id: group.failure for group in groups if not group.samples}
        generate_s = max(0.0, self._sampled_at.pop(step) - started)
        return JudgedStep(
            pairs=tuple((group.prompt, *sample) for group in groups for sample in group.samples),
            generate_s=generate_s,
            feedback_s=time.monotonic() - started - generate_s,
            unsampled=unsampled,
            num_unsampled=len(unsampled) * self._config.rollout.samples_per_prompt,
        )

    def finished(self) -> dict[int, list[Group]]:
        """By step, the groups that wait for the others of their step; a prompt that nobody answered is none."""
        found = {step: list(groups) for step, groups in self._restored.items()}
        for step, tasks in self._steps.items():
            done = [t.result() for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
            found[step] = [group for group in done if group.samples]
        return {step: groups for step, groups in found.items() if groups}

    def num_waiting(self) -> int:
        """Samples in `finished`."""
        return sum(len(group.samples) for groups in self.finished().values() for group in groups)
