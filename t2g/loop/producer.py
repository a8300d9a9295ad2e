"""Sample and judge the responses of coming steps concurrently, and hand them out step by step.

The prompts and seeds of a step depend on (run.seed, step) only. So every run trains on the same prompts in the same
steps, in whatever order responses arrive. With `rollout.resample_zero_groups` a step draws further prompts while its
groups are judged, see `t2g.loop.resampling`.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from t2g.concurrency import cancel_all, wait_unless_stopped
from t2g.config import PolicyJob
from t2g.data.buffer import Group
from t2g.errors import SamplingFailed
from t2g.feedback.outcome_rewards import OutcomeRewards
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.resampling import (
    RewardVariance,
    list_responses,
    needs_further_prompt,
    order_further_prompts,
    replace_groups,
)
from t2g.loop.sampling import JudgedStep, judge_answer, make_sampling
from t2g.loop.steps import select_prompts
from t2g.types import JudgedResponse, Prompt, Rollout, SpanFeedback


@dataclass(kw_only=True, eq=False)
class _StepWork:
    """The work of an admitted step."""

    own_ids: set[str]  # ids of the step's own prompts
    finished: Mapping[str, Group]  # by prompt_id, from a checkpoint
    further: list[Prompt]  # that may still be drawn, in order
    waiting_ids: set[str]  # ids of the prompts that wait for responses
    tasks: list[asyncio.Task[Group]] = field(default_factory=list)  # own prompts, then further ones as they are drawn
    variances: dict[str, RewardVariance] = field(default_factory=dict)  # by prompt_id; with resample_zero_groups
    sampled_at: float = 0.0  # time of the latest response


class Producer:
    """Producer of judged steps, an async context manager: its exit cancels all unfinished work.

    Args:
        finished: Groups by step, from a checkpoint, that are not sampled again.
        outcome_rewards: Scores the responses to each prompt once they are judged.
        find_reward_variance: Variance of a judged group; None: no further prompts are drawn.
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
        find_reward_variance: Callable[[Group], RewardVariance] | None = None,
        on_phase: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._rollouts = rollouts
        self._feedback = feedback
        self._restored = dict(finished)
        self._outcome_rewards = outcome_rewards
        self._find_reward_variance = find_reward_variance
        self._on_phase = on_phase
        self._steps: dict[int, _StepWork] = {}
        self._taken_step = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.cancel()

    async def cancel(self) -> None:
        """Abandon unfinished responses; `collect_finished` still returns the finished ones."""
        tasks = chain.from_iterable(work.tasks for work in self._steps.values())
        await cancel_all([*tasks])

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
        own_ids = {self._prompts[index].prompt_id for index in indices}
        finished = {group.prompt.prompt_id: group for group in self._restored.pop(step, ())}
        self._steps[step] = _StepWork(
            own_ids=own_ids,
            finished=finished,
            further=self._list_further_prompts(step, indices),
            waiting_ids={*own_ids},
        )
        for index, count in Counter(indices).items():
            num_samples = count * rollout.samples_per_prompt
            self._start_group(step, self._prompts[index], num_samples)

    def _list_further_prompts(self, step: int, own_indices: Sequence[int]) -> list[Prompt]:
        if self._find_reward_variance is None:
            return []
        indices = order_further_prompts(
            own_indices,
            num_prompts=len(self._prompts),
            step=step,
            seed=self._config.run.seed,
            count=self._config.rollout.resample_zero_groups,
        )
        return [self._prompts[index] for index in indices]

    def _start_group(self, step: int, prompt: Prompt, num_samples: int) -> None:
        sampling = make_sampling(self._config, "train", step, num_samples=num_samples)
        group = self._make_group(step, prompt, sampling)
        task = asyncio.ensure_future(group)
        self._steps[step].tasks.append(task)

    async def _make_group(self, step: int, prompt: Prompt, sampling: Sampling) -> Group:
        """Return the judged group of a prompt; a further prompt is drawn if this one needs it."""
        work = self._steps[step]
        group = work.finished.get(prompt.prompt_id)
        if group is None:
            group = await self._sample_group(step, prompt, sampling)
        else:
            self._on_sampled(step, prompt)
        if self._find_reward_variance is not None:
            variance = self._find_reward_variance(group)
            work.variances[prompt.prompt_id] = variance
            if needs_further_prompt(variance, is_own=prompt.prompt_id in work.own_ids):
                self._draw_further_prompt(step)
        return group

    def _draw_further_prompt(self, step: int) -> None:
        """Start to sample the next further prompt, if one is left."""
        work = self._steps[step]
        if not work.further:
            return
        prompt = work.further.pop(0)
        if step == self._taken_step and not work.waiting_ids:
            self._on_phase("sampling")
        work.waiting_ids.add(prompt.prompt_id)
        self._start_group(step, prompt, self._config.rollout.samples_per_prompt)

    async def _sample_group(self, step: int, prompt: Prompt, sampling: Sampling) -> Group:
        judgements: dict[int, asyncio.Task[SpanFeedback]] = {}

        def start_judging(rollout: Rollout) -> None:
            if rollout.sample_index in judgements:
                return
            judgement = judge_answer(self._feedback, prompt, rollout)
            judgements[rollout.sample_index] = asyncio.ensure_future(judgement)

        try:
            rollouts = await self._rollouts.sample(prompt, sampling, start_judging)
            self._steps[step].sampled_at = time.monotonic()
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
        waiting_ids = self._steps[step].waiting_ids
        waiting_ids.discard(prompt.prompt_id)
        if step == self._taken_step and not waiting_ids:
            self._on_phase("feedback")

    async def take(self, step: int, stop: Callable[[], bool]) -> JudgedStep:
        """Return all samples of an admitted step once they are judged.

        Raises:
            Stopped: `stop()` returned True.
        """
        started = time.monotonic()
        self._taken_step = step
        work = self._steps[step]
        self._on_phase("sampling" if work.waiting_ids else "feedback")
        groups = await _finish_tasks(work, stop)
        del self._steps[step]
        generate_s = max(0.0, work.sampled_at - started)

        num_own = len(work.own_ids)
        chosen = replace_groups(groups[:num_own], groups[num_own:], work.variances)
        responses: list[JudgedResponse] = []
        for group in chosen.trained:
            responses += list_responses(group)
        unsampled = {group.prompt.prompt_id: group.failure for group in groups if not group.samples}

        rollout = self._config.rollout
        num_prompts = rollout.prompts_per_step + chosen.filtered.num_further
        num_sampled = sum(len(group.samples) for group in groups)
        return JudgedStep(
            responses=tuple(responses),
            generate_s=generate_s,
            feedback_s=time.monotonic() - started - generate_s,
            unsampled=unsampled,
            num_unsampled=num_prompts * rollout.samples_per_prompt - num_sampled,
            filtered=chosen.filtered,
        )

    def collect_finished(self) -> dict[int, list[Group]]:
        """Return the finished groups of unfinished steps, by step; prompts that could not be sampled are left out."""
        finished = {step: list(groups) for step, groups in self._restored.items()}
        for step, work in self._steps.items():
            groups = _select_sampled(work.tasks)
            taken = {group.prompt.prompt_id for group in groups}
            unused = [group for prompt_id, group in work.finished.items() if prompt_id not in taken]
            finished[step] = groups + unused  # an earlier start had drawn the unused ones
        return {step: groups for step, groups in finished.items() if groups}

    def count_waiting(self) -> int:
        """Return the number of samples in `collect_finished`."""
        count = 0
        for groups in self.collect_finished().values():
            for group in groups:
                count += len(group.samples)
        return count


async def _finish_tasks(work: _StepWork, stop: Callable[[], bool]) -> list[Group]:
    """Return the groups of the step, further ones included, which are drawn before the tasks that need them end.

    Raises:
        Stopped: `stop()` returned True.
    """
    while True:
        tasks = [*work.tasks]
        groups = await wait_unless_stopped(tasks, stop)
        if len(work.tasks) == len(tasks):
            return groups


def _select_sampled(tasks: Sequence[asyncio.Task[Group]]) -> list[Group]:
    """Return the results of the tasks that succeeded and have samples."""
    groups = []
    for task in tasks:
        has_result = task.done() and not task.cancelled() and task.exception() is None
        if has_result and task.result().samples:
            groups.append(task.result())
    return groups
