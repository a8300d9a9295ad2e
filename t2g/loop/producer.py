"""Sample and judge the responses of coming steps concurrently, and hand them out step by step.

The prompts and seeds of a step depend on (run.seed, step) only. So every run trains on the same prompts in the same
steps, each once per epoch, in whatever order responses arrive.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
        self._config, self._prompts, self._rollouts, self._feedback = config, prompts, rollouts, feedback
        self._restored, self._outcome_rewards = dict(finished), outcome_rewards
        self._steps: dict[int, list[asyncio.Task[Group]]] = {}
        self._sampled_at: dict[int, float] = {}  # time of a step's latest response
        self._unsampled: dict[int, set[str]] = {}  # ids of a step's prompts that wait for responses
        self._taken_step, self._on_phase = 0, on_phase

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await cancel_all([task for tasks in self._steps.values() for task in tasks])

    def admit(self, step: int) -> None:
        """Start to sample a step's prompts, unless they were started before.

        A prompt that a step holds n times gets n times as many samples, with seeds of their own.
        """
        if step in self._steps:
            return
        rollout = self._config.rollout
        indices = select_prompts(
            num_prompts=len(self._prompts), per_step=rollout.prompts_per_step, step=step, seed=self._config.run.seed
        )
        finished = {group.prompt.prompt_id: group for group in self._restored.pop(step, ())}
        self._sampled_at[step] = 0.0
        self._steps[step] = []
        self._unsampled[step] = {self._prompts[i].prompt_id for i in indices}
        for i, count in Counter(indices).items():
            sampling = make_sampling(self._config, "train", step, num_samples=count * rollout.samples_per_prompt)
            group = self._make_group(step, self._prompts[i], sampling, finished)
            self._steps[step].append(asyncio.ensure_future(group))

    async def _make_group(self, step: int, prompt: Prompt, sampling: Sampling, finished: Mapping[str, Group]) -> Group:
        if prompt.prompt_id in finished:
            self._on_sampled(step, prompt)
            return finished[prompt.prompt_id]
        judgements: dict[int, asyncio.Task[SpanFeedback]] = {}

        def start_judging(rollout: Rollout) -> None:
            if rollout.sample_index not in judgements:
                judgement = asyncio.ensure_future(judge_answer(self._feedback, prompt, rollout))
                judgements[rollout.sample_index] = judgement

        try:
            rollouts = await self._rollouts.sample(prompt, sampling, start_judging)
            self._sampled_at[step] = time.monotonic()
            self._on_sampled(step, prompt)
            for rollout in rollouts:
                start_judging(rollout)
            feedback = await asyncio.gather(*(judgements[rollout.sample_index] for rollout in rollouts))
            if self._outcome_rewards is not None:
                feedback = await self._outcome_rewards.score(prompt, [*zip(rollouts, feedback, strict=True)])
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
        unsampled = {group.prompt.prompt_id: group.failure for group in groups if not group.samples}
        generate_s = max(0.0, self._sampled_at.pop(step) - started)
        responses: list[JudgedResponse] = []
        for group in groups:
            responses += [JudgedResponse(group.prompt, *sample) for sample in group.samples]
        rollout = self._config.rollout
        return JudgedStep(
            responses=tuple(responses),
            generate_s=generate_s,
            feedback_s=time.monotonic() - started - generate_s,
            unsampled=unsampled,
            num_unsampled=rollout.prompts_per_step * rollout.samples_per_prompt - len(responses),
        )

    def collect_finished(self) -> dict[int, list[Group]]:
        """Return the finished groups of unfinished steps, by step; prompts that could not be sampled are left out."""
        finished = {step: list(groups) for step, groups in self._restored.items()}
        for step, tasks in self._steps.items():
            done = [t.result() for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
            finished[step] = [group for group in done if group.samples]
        return {step: groups for step, groups in finished.items() if groups}

    def count_waiting(self) -> int:
        """Return the number of samples in `collect_finished`."""
        return sum(len(group.samples) for groups in self.collect_finished().values() for group in groups)
