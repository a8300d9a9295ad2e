"""Run the baselines of the paper (arXiv 2505.22338) that are not PPO on the harness of PPO.

The same base policy, prompts, seeds, feedback source, number of samples and evaluation:

    dpo         the samples of all steps of the base; of each prompt the better against the worse, by `actors.learner`
    ilf         imitation learning from language feedback (Scheurer et al., arXiv 2303.16755): of the samples of a
                prompt one is a response and the others are revisions of it, written with its critique in view; the
                base is fine-tuned on the best of these
    reflection  nothing is trained: the policy answers a held-out prompt, reads the critique and answers again

All is measured by the summed rewards of a response, which is what scalar PPO pays: the same information. Written
against the Protocols: who serves a model and who trains one is given by the caller (`jobs.common.policy_runs`).
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from t2g.concurrency import gather_unless_stopped
from t2g.config import ModelConfig, PolicyJob, RoleConfig, RolloutConfig, SFTLoRAConfig, SFTOptions, with_overrides
from t2g.data.prompts import encode_revision
from t2g.errors import RunStopped, UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.examples import encode_target
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.producer import Producer
from t2g.loop.sampling import (
    JudgedResponse,
    JudgedStep,
    compute_held_out_metrics,
    make_sampling,
    sample_held_out,
    select_usable,
    training_feedback,
)
from t2g.runs.log import RunLog
from t2g.runs.progress import show_progress
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, TrainSequence

POLICY = "policy"  # folder of the result, where something was trained

Metrics = dict[str, float]
# (model, how it is served, what is asked of its engines) -> the answer; the engines live as long as that takes
Serve = Callable[[ModelConfig, RolloutConfig, Callable[[RolloutSource], Coroutine[Any, Any, Any]]], Any]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run. `job.model` is the base. Training leaves its model in POLICY; whoever is stopped raises Stopped."""

    job: PolicyJob
    task: Task
    tokenizer: Any  # of the base
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    feedback: FeedbackSource
    reviser: ModelConfig
    reviser_tokenizer: Any
    log: RunLog
    stop: Callable[[], bool]
    serve: Serve
    train: Callable[[Sequence[Any]], Metrics]  # on PreferencePairs for dpo, on TrainSequences for ilf


class Scored(NamedTuple):
    """A response with usable feedback and what it is worth."""

    prompt: Prompt
    rollout: Rollout
    reward: float  # sum of its token rewards, with the truncation penalty


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """What DPO learns from: the sampled ids, never text that was encoded again."""

    prompt_ids: np.ndarray  # [P] int32
    chosen_ids: np.ndarray  # [R] int32
    rejected_ids: np.ndarray  # [R'] int32


def check(procedure: str, job: PolicyJob) -> None:
    """UserError, before any engine starts, for settings with which the method makes no sense."""
    compares = {"dpo": "two responses to compare", "ilf": "a response and a revision of it"}.get(procedure)
    if compares and job.rollout.samples_per_prompt < 2:
        raise UserError(f"{procedure} needs {compares}: rollout.samples_per_prompt is 1; set it to 2 or more")
    if procedure != "dpo" and not job.feedback.style.critique:
        raise UserError(f"{procedure} shows the critique to a model, and feedback.style.critique=false has none")
    if job.eval_data is None:
        raise UserError(f"{procedure} is measured on held-out prompts; eval_data is missing")
    if compares and job.objective.outcome_rewards > 0:
        raise UserError(
            f"{procedure} ranks responses by their spans alone, and does not use "
            f"objective.outcome_rewards={job.objective.outcome_rewards:g}: set it to 0, or leave the method out"
        )


# ------------------------------------------------------------------------------------------------------------- methods
def dpo(arm: Arm) -> Metrics:
    steps = arm.serve(arm.job.model, arm.job.rollout, partial(ask_base, arm, arm.job.rollout.samples_per_prompt))[1]
    scored = score(arm, steps, arm.tokenizer)
    pairs, ties = preference_pairs(scored)
    if not pairs:
        raise RunStopped(f"dpo has nothing to learn from: in all {ties} pairs both responses are worth the same")
    began = time.monotonic()
    trained = arm.train(pairs)
    metrics = {f"dpo/{name}": value for name, value in trained.items()}
    metrics |= {"dpo/pairs": float(len(pairs)), "dpo/ties_share": ties / (ties + len(pairs))}
    learnt = [one for group in scored for one in group]
    return metrics | run_metrics(arm.job, steps, learnt, learn_s=time.monotonic() - began) | score_result(arm)


def ilf(arm: Arm) -> Metrics:
    steps = arm.serve(arm.job.model, arm.job.rollout, partial(ask_base, arm, 1))[1]
    revised = arm.serve(arm.reviser, revising_rollout(arm.job), partial(revise_steps, arm, steps))
    best = [max(group, key=lambda one: one.reward) for group in score(arm, revised, arm.reviser_tokenizer)]
    if not best:
        raise RunStopped("ilf has nothing to imitate: no response has a critique that the reviser has room for")
    began = time.monotonic()
    trained = arm.train(imitation_examples(best, arm.tokenizer))
    metrics = {"ilf/loss": trained["loss"], "ilf/revised_share": len(best) / sum(len(one.pairs) for one in steps)}
    metrics |= run_metrics(arm.job, [*steps, *revised], best, learn_s=time.monotonic() - began)
    return metrics | score_result(arm)


def reflection(arm: Arm) -> Metrics:
    """A response without a critique that the reviser has room for stays as it is."""
    held_out = arm.serve(arm.job.model, arm.job.rollout, partial(ask_base, arm, 0))[0]

    async def answer_again(rollouts: RolloutSource) -> tuple[list[tuple[Prompt, Rollout]], Metrics]:
        began = time.monotonic()
        judged = await judge(arm, arm.feedback, held_out)
        revisions = await revise(arm, judged, rollouts, split="eval", step=0, num_samples=1)
        pairs = [(p, replace(new[0], sample_index=r.sample_index) if new else r) for (p, r, _), new in revisions]
        share = float(mean(bool(new) for _, new in revisions))
        seconds = time.monotonic() - began
        return pairs, {"samples": 0.0, "reflection/revised_share": share, "reflection/revise_s": seconds}

    pairs, metrics = arm.serve(arm.reviser, revising_rollout(arm.job), answer_again)
    return metrics | asyncio.run(measure(arm, pairs, step=arm.job.num_steps))


METHODS: dict[str, Callable[[Arm], Metrics]] = {"dpo": dpo, "ilf": ilf, "reflection": reflection}


# ------------------------------------------------------------------------------------------------- responses and marks
async def ask_base(
    arm: Arm, num_samples: int, rollouts: RolloutSource
) -> tuple[list[tuple[Prompt, Rollout]], list[JudgedStep]]:
    """Held-out responses of the base, whose score becomes step 0; and `num_samples` to each prompt of every step."""
    job, steps = arm.job, []
    held_out, metrics = await score_held_out(arm, rollouts, step=0)
    arm.log.write_step(0, metrics)
    if num_samples == 0:
        return held_out, []
    asked = with_overrides(job, {"rollout.samples_per_prompt": num_samples})
    with show_progress(f"{job.run.name}: samples of the base", job.num_steps) as bar:
        async with Producer(asked, arm.prompts, rollouts, training_feedback(job, arm.feedback)) as producer:
            for step in range(1, job.num_steps + 1):
                producer.admit(step)
                steps.append(await producer.take(step, arm.stop))
                bar.advance()
    return held_out, steps


async def revise_steps(arm: Arm, steps: Sequence[JudgedStep], rollouts: RolloutSource) -> list[JudgedStep]:
    """Of each step the revisions of its responses, judged: as many as PPO's samples of a prompt, less the response."""
    job, revised = arm.job, []
    feedback, num_samples = training_feedback(job, arm.feedback), job.rollout.samples_per_prompt - 1
    with show_progress(f"{job.run.name}: revisions", job.num_steps) as bar:
        for step, judged in enumerate(steps, start=1):
            kept = select_usable(judged, job, step=step, source=feedback.name)
            began = time.monotonic()
            found = await revise(arm, kept, rollouts, split="revise", step=step, num_samples=num_samples)
            sampled_at = time.monotonic()
            pairs = await judge(arm, feedback, [(prompt, new) for (prompt, _, _), some in found for new in some])
            feedback_s = time.monotonic() - sampled_at
            revised.append(JudgedStep(pairs=tuple(pairs), generate_s=sampled_at - began, feedback_s=feedback_s))
            bar.advance()
    return revised


async def judge(arm: Arm, feedback: FeedbackSource, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[JudgedResponse]:
    said = await gather_unless_stopped((feedback.judge(p, r.response_text) for p, r in pairs), arm.stop)
    return [(p, r, f) for (p, r), f in zip(pairs, said, strict=True)]


async def revise(
    arm: Arm, judged: Sequence[JudgedResponse], rollouts: RolloutSource, *, split: str, step: int, num_samples: int
) -> list[tuple[JudgedResponse, list[Rollout]]]:
    """`num_samples` revisions of each response, none where there is no critique or no room for it."""
    room = revising_rollout(arm.job).max_prompt_tokens
    sampling = make_sampling(arm.job, split, step, num_samples=num_samples)
    asked = [revision_prompt(arm.task, one, arm.reviser_tokenizer, room) for one in judged]
    answers = iter(
        await gather_unless_stopped((rollouts.sample(prompt, sampling) for prompt in asked if prompt), arm.stop)
    )
    return [(one, next(answers) if prompt else []) for one, prompt in zip(judged, asked, strict=True)]


async def score_held_out(
    arm: Arm, rollouts: RolloutSource, *, step: int
) -> tuple[list[tuple[Prompt, Rollout]], Metrics]:
    began = time.monotonic()
    pairs = await sample_held_out(arm.job, arm.eval_prompts, rollouts)
    return pairs, await measure(arm, pairs, step=step) | {"time/eval_s": time.monotonic() - began}


async def measure(arm: Arm, pairs: Sequence[tuple[Prompt, Rollout]], *, step: int) -> Metrics:
    return await compute_held_out_metrics(arm.job, arm.task, pairs, arm.feedback, arm.log, step=step)


def score_result(arm: Arm) -> Metrics:
    """The held-out score of the trained policy: the same prompts and seeds as the base's."""
    model = ModelConfig(policy=str(arm.job.run.folder / POLICY))
    return arm.serve(model, arm.job.rollout, partial(score_held_out, arm, step=arm.job.num_steps))[1]


def run_metrics(job: PolicyJob, steps: Sequence[JudgedStep], learnt: Sequence[Scored], *, learn_s: float) -> Metrics:
    """Samples and seconds of the whole run as if it were one step; learnt: what the policy was trained on.

    samples are those that the run was given, as PPO counts responses whose feedback failed.
    """
    rollout = job.rollout
    responses = [pair for one in steps for pair in one.pairs]
    generate_s, feedback_s = sum(one.generate_s for one in steps), sum(one.feedback_s for one in steps)
    return {
        "samples": float(job.num_steps * rollout.prompts_per_step * rollout.samples_per_prompt),
        "reward/response_mean": mean(one.reward for one in learnt),
        "response/length_mean": mean(len(r.response_ids) for _, r, _ in responses),
        "response/truncated_share": mean(r.is_truncated for _, r, _ in responses),
        "feedback/failed_share": mean(not f.usable for _, _, f in responses),
        "time/generate_s": generate_s,
        "time/feedback_s": feedback_s,
        "time/learn_s": learn_s,
        "time/step_s": generate_s + feedback_s + learn_s,
    }


# ---------------------------------------------------------------------------------------------------- what is learnt
def score(arm: Arm, steps: Sequence[JudgedStep], tokenizer: Any) -> list[list[Scored]]:
    """The usable responses of every step by prompt, in order, with their summed rewards.

    tokenizer: of the model that wrote them.
    """
    groups: dict[tuple[int, str], list[Scored]] = defaultdict(list)
    for step, judged in enumerate(steps, start=1):
        asked = judged.pairs or judged.unsampled
        for p, r, f in select_usable(judged, arm.job, step=step, source=arm.feedback.name) if asked else ():
            offsets = token_offsets(tokenizer, r.response_ids)
            objective = arm.job.objective
            paid = token_rewards(offsets, f.spans, text=r.response_text, rule=objective.rewards).sum()
            reward = float(paid) + (objective.truncation_penalty if r.is_truncated else 0.0)
            groups[step, p.prompt_id].append(Scored(prompt=p, rollout=r, reward=reward))
    return list(groups.values())


def preference_pairs(groups: Iterable[Sequence[Scored]]) -> tuple[list[PreferencePair], int]:
    """Of each prompt's responses the best with the worst, the second best with the second worst, and so on; and the
    number of pairs that are left out since both are worth the same.

    A response stands in one pair at most, so that a pass over the pairs is a pass over the samples. Of equals the
    earlier sample comes first; the middle one of an odd number has no partner.

    Rewards 2, 0, 1, 0 -> (2, 0), (1, 0); rewards 1, 1 -> no pair, one tie.
    """
    pairs, ties = [], 0
    for group in groups:
        ranking = sorted(group, key=lambda one: -one.reward)  # stable
        for chosen, rejected in zip(ranking[: len(ranking) // 2], reversed(ranking), strict=False):
            if chosen.reward == rejected.reward:
                ties += 1
                continue
            pairs.append(
                PreferencePair(
                    prompt_ids=chosen.prompt.prompt_ids,
                    chosen_ids=chosen.rollout.response_ids,
                    rejected_ids=rejected.rollout.response_ids,
                )
            )
    return pairs, ties


def imitation_examples(best: Sequence[Scored], tokenizer: Any) -> list[TrainSequence]:
    """The policy's own prompts with the revised responses as targets; the reviser's tokenizer may be another one."""
    targets = [encode_target(one.rollout.response_text, tokenizer) for one in best]
    return [
        TrainSequence(prompt_ids=one.prompt.prompt_ids, response_ids=ids, weights=np.ones(len(ids), np.float32))
        for one, ids in zip(best, targets, strict=True)
    ]


def revision_prompt(task: Task, judged: JudgedResponse, tokenizer: Any, max_prompt_tokens: int) -> Prompt | None:
    """What asks for the response again, with the critique in view; None where there is no critique, or no room for it.

    tokenizer: of the model that is asked.
    """
    prompt, rollout, feedback = judged
    if not feedback.usable or not feedback.critique.strip():
        return None
    ids = encode_revision(task, prompt, rollout.response_text, feedback.critique, tokenizer, max_prompt_tokens)
    # A prompt may have several responses: the revisions of each are sampled with a seed of their own.
    prompt_id = f"{prompt.prompt_id}/{rollout.sample_index}"
    return None if ids is None else replace(prompt, prompt_id=prompt_id, prompt_ids=ids)


# ------------------------------------------------------------------------------------------------------------- settings
def batch_size(job: PolicyJob, num_items: int) -> int:
    """Items of one optimizer step: a pass over them has as many steps as PPO makes in a pass over its samples."""
    return ceil(num_items / (job.num_steps * job.learner.minibatches_per_epoch))


def sft_options(job: PolicyJob, num_examples: int) -> SFTOptions:
    """Supervised training with the learner's resources, optimizer and passes."""
    learner = job.learner
    shared = {"dtype", "num_epochs", "tokens_per_microbatch", "gradient_checkpointing", "offload"}
    return SFTOptions(
        **learner.model_dump(include=shared | RoleConfig.model_fields.keys()),
        optim=learner.policy,
        batch_size=batch_size(job, num_examples),
        lora=SFTLoRAConfig(**learner.lora.model_dump(), dropout=0) if learner.lora else None,
        timeout_s=learner.step_timeout_s,
    )


def revising_rollout(job: PolicyJob) -> RolloutConfig:
    """Engines with room for a critique beside prompt and response: as much as the feedback's engines have for all."""
    return with_overrides(job.rollout, {"max_model_len": job.revision_window})
