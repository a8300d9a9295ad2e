"""What is asked of rollout engines and feedback source, the same for PPO and for the baselines it is compared with.

The responses of a training step with their feedback, and the scores of held-out responses. Everything random is a
function of (run.seed, step), so that two methods see the same prompts, and the same samples of the same weights.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from t2g.config import PolicyJob
from t2g.errors import RunStopped
from t2g.feedback.noise import NoisyFeedback
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.metrics import RunLog
from t2g.sections import SandboxConfig
from t2g.steps import eval_metrics, prompt_indices, sampling_seed
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, SpanFeedback

STOP_POLL_S = 0.2  # a SIGTERM during generation is noticed within this time
JudgedResponse = tuple[Prompt, Rollout, SpanFeedback]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One step's samples before the learner has seen them."""

    pairs: tuple[JudgedResponse, ...]
    generate_s: float  # until the last response was there
    feedback_s: float  # from then until the last critique was there: scoring overlaps with sampling


def sampling_of(config: PolicyJob, split: str, step: int, *, num_samples: int) -> Sampling:
    """How the policy is sampled in this step; never otherwise than PPO assumes."""
    rollout = config.rollout
    return Sampling(
        num_samples=num_samples,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        seed=sampling_seed(config.run.seed, split, step),
    )


def training_feedback(config: PolicyJob, feedback: FeedbackSource) -> FeedbackSource:
    """The source as training hears it: with the noise of a study. Evaluation hears it as it is."""
    noise = config.feedback.noise
    return feedback if noise is None else NoisyFeedback(feedback, noise, seed=config.run.seed)


async def unless_stopped(
    coroutines: Sequence[Coroutine[Any, Any, Result]], stop: Callable[[], bool]
) -> list[Result] | None:
    """What they return, in order. None as soon as `stop()` says so: those that still run are cancelled."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, timeout=STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION)
            if stop():
                return None
            for task in done:
                task.result()  # raises here what was raised there, instead of waiting for the others
    finally:
        for task in tasks:
            task.cancel()
    return [task.result() for task in tasks]


async def sample_step(
    config: PolicyJob,
    prompts: Sequence[Prompt],
    rollouts: RolloutSource,
    feedback: FeedbackSource,
    stop: Callable[[], bool],
    *,
    step: int,
) -> Judged | None:
    """Sample this step's prompts and judge each response as soon as it is there. None if `stop()` came first."""
    rollout = config.rollout
    chosen = prompt_indices(
        num_prompts=len(prompts), per_step=rollout.prompts_per_step, step=step, seed=config.run.seed
    )
    sampling = sampling_of(config, "train", step, num_samples=rollout.samples_per_prompt)
    started = time.monotonic()
    sampled_at = [started]

    async def one(prompt: Prompt) -> list[JudgedResponse]:
        sampled = await rollouts.sample(prompt, sampling)
        sampled_at.append(time.monotonic())
        judged = await asyncio.gather(*(feedback.judge(prompt, r.response_text) for r in sampled))
        return [(prompt, r, f) for r, f in zip(sampled, judged, strict=True)]

    groups = await unless_stopped([one(prompts[i]) for i in chosen], stop)
    if groups is None:
        return None
    pairs = tuple(pair for group in groups for pair in group)
    generate_s = max(sampled_at) - started
    return Judged(pairs=pairs, generate_s=generate_s, feedback_s=time.monotonic() - started - generate_s)


def usable(pairs: Sequence[JudgedResponse], config: PolicyJob, *, step: int, source: str) -> list[JudgedResponse]:
    """Those whose feedback can be used. RunStopped when more than `feedback.max_failed_share` has none that can."""
    kept = [(p, r, f) for p, r, f in pairs if f.status in ("ok", "empty")]
    failed_share = 1 - len(kept) / len(pairs)
    if failed_share > config.feedback.max_failed_share or not kept:
        counts = {s: sum(f.status == s for _, _, f in pairs) for s in ("failed", "unparsable")}
        raise RunStopped(
            f"step {step}: {failed_share:.0%} of {len(pairs)} samples have no usable feedback "
            f"({counts['failed']} failed, {counts['unparsable']} unparsable) from {source}; "
            f"feedback.max_failed_share allows {config.feedback.max_failed_share:.0%}"
        )
    return kept


async def measure(
    task: Task, prompt: Prompt, rollout: Rollout, sandbox: SandboxConfig, turn: asyncio.Semaphore
) -> dict[str, float] | None:
    """What the task itself says of a response. In a thread: a task may run programs, for seconds each."""
    async with turn:
        return await asyncio.to_thread(task.measure, prompt, rollout.response_text, sandbox=sandbox)


async def sample_held_out(
    config: PolicyJob, prompts: Sequence[Prompt], rollouts: RolloutSource
) -> list[tuple[Prompt, Rollout]]:
    """Responses to the held-out prompts, with the same seeds at every evaluation and in every arm."""
    sampling = sampling_of(config, "eval", 0, num_samples=config.eval.samples_per_prompt)
    groups = await asyncio.gather(*(rollouts.sample(prompt, sampling) for prompt in prompts))
    return [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]


async def held_out_metrics(
    config: PolicyJob,
    task: Task,
    pairs: Sequence[tuple[Prompt, Rollout]],
    feedback: FeedbackSource,
    log: RunLog,
    *,
    step: int,
) -> dict[str, float]:
    """`eval_metrics` of held-out responses; a task without a measure of its own is scored by the feedback.

    The first ones go into samples.jsonl with their feedback.
    """
    turn = asyncio.Semaphore(config.feedback.concurrency)
    measured = await asyncio.gather(*(measure(task, *pair, config.feedback.sandbox, turn) for pair in pairs))
    judged = pairs if None in measured else pairs[: config.log.num_samples]  # the latter for the report only
    said = await asyncio.gather(*(feedback.judge(p, r.response_text) for p, r in judged))
    log.eval_samples(step, pairs, said)
    return eval_metrics(pairs, measured, said, task, config.objective.rewards)
