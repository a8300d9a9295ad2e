"""Sample and judge the responses of coming steps concurrently, and hand them out step by step.

The prompts and seeds of a step depend on (run.seed, step) only. So every run trains on the same prompts in the same
steps, each once per epoch, in whatever order responses arrive.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Self

from t2g.concurrency import cancel_all, wait_unless_stopped
from t2g.config import PolicyJob
from t2g.data.buffer import Group
from t2g.errors import SamplingFailed
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.sampling import JudgedStep, judge_answer, make_sampling
from t2g.loop.steps import select_prompts
from t2g.types import JudgedResponse, Prompt, Rollout, SpanFeedback


class Producer:
    """Producer of judged steps, an async context manager: its exit cancels all unfinished work.

    Args:
        finished: Groups by step, from a checkpoint, that are not sampled again.
        outcome_rewards: Scores the responses to each prompt once they are judged.
        on_phase: Called with "sampling", and with "feedback" once all responses of the step are sampled that `take`
            waits for.
    """

    def __init__(
        self,
        config: PolicyJob,
        prompts: Sequence[Prompt],
        rollouts: RolloutSource,
        feedback: FeedbackSource,
        finished: Mapping[int, Sequence[Group]] = {},
        outcome_rewards: OutcomeRewards | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollouts = rollouts
        self._feedback = feedback
        self._restored = dict(finished)
        self._outcome_rewards = outcome_rewards
        self._on_phase = on_phase
        self._steps: dict[int, list[asyncio.Task[Group]]] = {}
        self._sampled_at: dict[int, float] = {}  # time of a step's latest response
        self._unsampled: dict[int, set[str]] = {}  # ids of a step's prompts that wait for responses
        self._taken_step = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all([*chain.from_iterable(self._steps.values())])

    def admit(self, step: int) -> None:
        """Start to sample a step's prompts, unless they were started before.

        A prompt that a step holds n times gets n times as many samples, with seeds of their own.
        """
        if step in self._steps:
            return
        rollout = self._config.rollout
        indices = select_prompts(
            num_prompts=len(self._prompts),
            per_step=rollout.prompts_per_step,
            step=step,
            seed=self._config.run.seed,
        )
        finished = {group.prompt.prompt_id: group for group in self._restored.pop(step, ())}
        self._sampled_at[step] = 0.0
        self._steps[step] = []
        self._unsampled[step] = {self._prompts[index].prompt_id for index in indices}
        for index, count in Counter(indices).items():
            num_samples = count * rollout.samples_per_prompt
            sampling = make_sampling(self._config, "train", step, num_samples=num_samples)
            group = self._make_group(step, self._prompts[index], sampling, finished)
            self._steps[step].append(asyncio.ensure_future(group))

    async def _make_group(self, step: int, prompt: Prompt, sampling: Sampling, finished: Mapping[str, Group]) -> Group:
        if prompt.prompt_id in finished:
            self._on_sampled(step, prompt)
            return finished[prompt.prompt_id]
        judgements: dict[int, asyncio.Task[SpanFeedback]] = {}

        def start_judging(rollout: Rollout) -> None:
            if rollout.sample_index in judgements:
                return
            judgement = judge_answer(self._feedback, prompt, rollout)
            judgements[rollout.sample_index] = asyncio.ensure_future(judgement)

        try:
            rollouts = await self._rollouts.sample(prompt, sampling, start_judging)
            self._sampled_at[step] = time.monotonic()
            self._on_sampled(step, prompt)
            for rollout in rollouts:
                start_judging(rollout)
            in_order = [judgements[rollout.sample_index] for rollout in rollouts]
            feedback = await asyncio.gather(*in_order)
            if self._outcome_rewards is not None:
                samples = [*zip(rollouts, feedback, strict=True)]
                feedback = await self._outcome_rewards.score(prompt, samples)
        except SamplingFailed as error:
            self._on_sampled(step, prompt)
            return Group(prompt=prompt, samples=(), failure=str(error))
        finally:
            await cancel_all(list(judgements.values()))
        return Group(prompt=prompt, samples=tuple(zip(rollouts, feedback, strict=True)))

    def _on_sampled(self, step: int, prompt: Prompt) -> None:
        """Note that a prompt of the step waits for responses no longer."""
        self._unsampled[step].discard(prompt.prompt_id)
        if step == self._taken_step and not self._unsampled[step]:
            self._on_phase("feedback")

    async def take(self, step: int, stop: Callable[[], bool]) -> JudgedStep:
        """Return all samples of an admitted step once they are judged.

        Raises:
            Stopped: `stop()` returned True.
        """
        started = time.monotonic()
        self._taken_step = step
        self._on_phase("sampling" if self._unsampled[step] else "feedback")
        groups = await wait_unless_stopped(self._steps[step], stop)
        del self._steps[step]
        del self._unsampled[step]
        generate_s = max(0.0, self._sampled_at.pop(step) - started)

        responses: list[JudgedResponse] = []
        unsampled: dict[str, str] = {}
        for group in groups:
            if not group.samples:
                unsampled[group.prompt.prompt_id] = group.failure
            for rollout, feedback in group.samples:
                responses.append(JudgedResponse(group.prompt, rollout, feedback))

        per_prompt = self._config.rollout.samples_per_prompt
        num_requested = self._config.rollout.prompts_per_step * per_prompt
        return JudgedStep(
            responses=tuple(responses),
            generate_s=generate_s,
            feedback_s=time.monotonic() - started - generate_s,
            unsampled=unsampled,
            num_unsampled=num_requested - len(responses),
        )

    def collect_finished(self) -> dict[int, list[Group]]:
        """Return the finished groups of unfinished steps, by step; prompts that could not be sampled are left out."""
        finished = {step: list(groups) for step, groups in self._restored.items()}
        for step, tasks in self._steps.items():
            finished[step] = _select_sampled(tasks)
        return {step: groups for step, groups in finished.items() if groups}

    def count_waiting(self) -> int:
        """Return the number of samples in `collect_finished`."""
        count = 0
        for groups in self.collect_finished().values():
            for group in groups:
                count += len(group.samples)
        return count


def _select_sampled(tasks: Sequence[asyncio.Task[Group]]) -> list[Group]:
    """Return the results of the tasks that succeeded and have samples."""
    groups = []
    for task in tasks:
        has_result = task.done() and not task.cancelled() and task.exception() is None
        if has_result and task.result().samples:
            groups.append(task.result())
    return groups
