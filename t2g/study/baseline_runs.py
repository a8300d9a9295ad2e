"""The three baselines that are not PPO, written against the Protocols: what is asked of whom, in which order.

Who serves a model and who trains one is given by the caller (`jobs.common`); pairs, revisions and settings are made
in `t2g.study.baselines`. `stop` ends a run by the exception Stopped.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any, TypeVar

from t2g.concurrency import unless_stopped
from t2g.config import ModelConfig, PolicyJob, RolloutConfig, with_overrides
from t2g.errors import RunStopped
from t2g.feedback.examples import SFTExample
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.producer import Producer
from t2g.loop.sampling import (
    Judged,
    JudgedResponse,
    held_out_metrics,
    sample_held_out,
    sampling_of,
    training_feedback,
    usable,
)
from t2g.runs.metrics import RunLog
from t2g.runs.progress import stage
from t2g.study import baselines
from t2g.study.baselines import PreferencePair, Scored
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout

Metrics = dict[str, float]
Result = TypeVar("Result")
# (model, how it is served, what is asked of its engines) -> the answer; the engines live as long as that takes
Serve = Callable[[ModelConfig, RolloutConfig, Callable[[RolloutSource], Coroutine[Any, Any, Any]]], Any]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run. `job.model` is the base. Training leaves its model in `result`; whoever is stopped raises Stopped."""

    job: PolicyJob
    task: Task
    tokenizer: Any  # of the base
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    feedback: FeedbackSource
    reviser: ModelConfig
    reviser_tokenizer: Any
    result: ModelConfig
    log: RunLog
    stop: Callable[[], bool]
    serve: Serve
    train_pairs: Callable[[Sequence[PreferencePair]], Metrics]
    train_examples: Callable[[Sequence[SFTExample]], Metrics]


# ------------------------------------------------------------------------------------------------------------- methods
def dpo(arm: Arm) -> Metrics:
    job = arm.job
    _, steps = arm.serve(job.model, job.rollout, partial(ask_base, arm, job.rollout.samples_per_prompt))
    scored = [scored_of(arm, step, judged, arm.tokenizer) for step, judged in enumerate(steps, start=1)]
    found = [baselines.preference_pairs(one) for one in scored]
    pairs, ties = [pair for some, _ in found for pair in some], sum(ties for _, ties in found)
    if not pairs:
        raise RunStopped(f"dpo has nothing to learn from: in all {ties} pairs both responses are worth the same")
    began = time.monotonic()
    trained = arm.train_pairs(pairs)
    metrics = {f"dpo/{name}": value for name, value in trained.items()}
    metrics |= {"dpo/pairs": float(len(pairs)), "dpo/ties_share": ties / (ties + len(pairs))}
    metrics |= run_metrics(job, steps, [one for some in scored for one in some], learn_s=time.monotonic() - began)
    return metrics | score_result(arm)


def ilf(arm: Arm) -> Metrics:
    job = arm.job
    _, steps = arm.serve(job.model, job.rollout, partial(ask_base, arm, 1))
    revised = arm.serve(arm.reviser, baselines.revising_rollout(job), partial(revise_steps, arm, steps))
    scored = [scored_of(arm, step, judged, arm.reviser_tokenizer) for step, judged in enumerate(revised, start=1)]
    best = [one for some in scored for one in baselines.best_of_each(some)]
    if not best:
        raise RunStopped("ilf has nothing to imitate: no response has a critique that the reviser has room for")
    began = time.monotonic()
    trained = arm.train_examples(baselines.imitation_examples(best, arm.tokenizer))
    metrics = {"ilf/loss": trained["loss"], "ilf/revised_share": len(best) / sum(len(one.pairs) for one in steps)}
    metrics |= run_metrics(job, [*steps, *revised], best, learn_s=time.monotonic() - began)
    return metrics | score_result(arm)


def reflection(arm: Arm) -> Metrics:
    """A response without a critique that the reviser has room for stays as it is."""
    job = arm.job
    held_out, _ = arm.serve(job.model, job.rollout, partial(ask_base, arm, 0))

    async def answer_again(rollouts: RolloutSource) -> tuple[list[tuple[Prompt, Rollout]], Metrics]:
        began = time.monotonic()
        said = await unless_stopped((arm.feedback.judge(p, r.response_text) for p, r in held_out), arm.stop)
        judged = [(p, r, f) for (p, r), f in zip(held_out, said, strict=True)]
        revisions = await revise(arm, judged, rollouts, split="eval", step=0, num_samples=1)
        pairs = [(p, replace(new[0], sample_index=r.sample_index) if new else r) for (p, r, _), new in revisions]
        share = mean(bool(new) for _, new in revisions)
        seconds = time.monotonic() - began
        return pairs, {"samples": 0.0, "reflection/revised_share": float(share), "reflection/revise_s": seconds}

    pairs, metrics = arm.serve(arm.reviser, baselines.revising_rollout(job), answer_again)
    return metrics | asyncio.run(held_out_metrics(job, arm.task, pairs, arm.feedback, arm.log, step=job.num_steps))


# ------------------------------------------------------------------------------------------------- responses and marks
async def ask_base(
    arm: Arm, num_samples: int, rollouts: RolloutSource
) -> tuple[list[tuple[Prompt, Rollout]], list[Judged]]:
    """Held-out responses of the base, whose score becomes step 0; and `num_samples` to each prompt of every step."""
    job = arm.job
    began = time.monotonic()
    held_out = await sample_held_out(job, arm.eval_prompts, rollouts)
    metrics = await held_out_metrics(job, arm.task, held_out, arm.feedback, arm.log, step=0)
    arm.log.step(0, metrics | {"time/eval_s": time.monotonic() - began})
    if num_samples == 0:
        return held_out, []
    asked = with_overrides(job, {"rollout.samples_per_prompt": num_samples})
    feedback, steps = training_feedback(job, arm.feedback), []
    with stage(f"{job.run.name}: samples of the base", job.num_steps) as bar:
        async with Producer(asked, arm.prompts, rollouts, feedback) as producer:
            for step in range(1, job.num_steps + 1):
                producer.admit(step)
                steps.append(await producer.take(step, arm.stop))
                bar.advance()
    return held_out, steps


async def revise_steps(arm: Arm, steps: Sequence[Judged], rollouts: RolloutSource) -> list[Judged]:
    """Of each step the revisions of its responses, judged: as many as PPO's samples of a prompt, less the response."""
    job = arm.job
    feedback, revised = training_feedback(job, arm.feedback), []
    num_samples = job.rollout.samples_per_prompt - 1
    with stage(f"{job.run.name}: revisions", job.num_steps) as bar:
        for step, judged in enumerate(steps, start=1):
            kept = usable(judged, job, step=step, source=feedback.name)
            began = time.monotonic()
            found = await revise(arm, kept, rollouts, split="revise", step=step, num_samples=num_samples)
            written = [(prompt, new) for (prompt, _, _), some in found for new in some]
            sampled_at = time.monotonic()
            said = await unless_stopped((feedback.judge(p, r.response_text) for p, r in written), arm.stop)
            revised.append(
                Judged(
                    pairs=tuple((p, r, f) for (p, r), f in zip(written, said, strict=True)),
                    generate_s=sampled_at - began,
                    feedback_s=time.monotonic() - sampled_at,
                )
            )
            bar.advance()
    return revised


async def revise(
    arm: Arm, judged: Sequence[JudgedResponse], rollouts: RolloutSource, *, split: str, step: int, num_samples: int
) -> list[tuple[JudgedResponse, list[Rollout]]]:
    """`num_samples` revisions of each response, none where there is no critique or no room for it."""
    room = baselines.revising_rollout(arm.job).max_prompt_tokens
    sampling = sampling_of(arm.job, split, step, num_samples=num_samples)
    asked = [baselines.revision_prompt(arm.task, one, arm.reviser_tokenizer, room) for one in judged]
    answers = iter(await unless_stopped((rollouts.sample(prompt, sampling) for prompt in asked if prompt), arm.stop))
    return [(one, next(answers) if prompt else []) for one, prompt in zip(judged, asked, strict=True)]


def scored_of(arm: Arm, step: int, judged: Judged, tokenizer: Any) -> list[Scored]:
    """tokenizer: of the model that was sampled."""
    if not judged.pairs and not judged.unsampled:
        return []
    kept = usable(judged, arm.job, step=step, source=arm.feedback.name)
    return baselines.score(kept, tokenizer, arm.job.objective.rewards)


def run_metrics(job: PolicyJob, steps: Sequence[Judged], learnt: Sequence[Scored], *, learn_s: float) -> Metrics:
    """Samples and seconds of the whole run as if it were one step; learnt: what the policy was trained on.

    samples are those that the run was given, as PPO counts responses whose feedback failed.
    """
    rollout = job.rollout
    responses = [pair for one in steps for pair in one.pairs]
    generate_s, feedback_s = sum(one.generate_s for one in steps), sum(one.feedback_s for one in steps)
    return {
        "samples": float(job.num_steps * rollout.prompts_per_step * rollout.samples_per_prompt),
        "reward/response_mean": mean(one.delta for one in learnt),
        "response/length_mean": mean(len(r.response_ids) for _, r, _ in responses),
        "feedback/failed_share": mean(not f.usable for _, _, f in responses),
        "time/generate_s": generate_s,
        "time/feedback_s": feedback_s,
        "time/learn_s": learn_s,
        "time/step_s": generate_s + feedback_s + learn_s,
    }


def score_result(arm: Arm) -> Metrics:
    """The held-out score of the trained policy: the same prompts and seeds as the base's."""

    async def ask(rollouts: RolloutSource) -> Metrics:
        began = time.monotonic()
        pairs = await sample_held_out(arm.job, arm.eval_prompts, rollouts)
        step = arm.job.num_steps
        metrics = await held_out_metrics(arm.job, arm.task, pairs, arm.feedback, arm.log, step=step)
        return metrics | {"time/eval_s": time.monotonic() - began}

    return arm.serve(arm.result, arm.job.rollout, ask)
