"""Run the baselines of the paper (arXiv 2505.22338) that are not PPO.

They share PPO's base policy, prompts, seeds, feedback source, number of samples and evaluation:

    dpo         samples from the base policy at all steps; `actors.learner` trains on pairs of a better and a worse
                response to the same prompt
    ilf         imitation learning from language feedback (Scheurer et al., arXiv 2303.16755): one sample of a prompt is
                a response, the other samples revise it with its critique in the context; the response with the fixes
                of its spans is a revision without a model, and replaces one of them; the base policy is
                fine-tuned on the best one
    reflection  no training: the policy answers a held-out prompt, reads the critique and answers again

Responses are ranked by the sum of their token rewards, the reward of scalar PPO. This module depends on Protocols
only: the caller (`jobs.train_policy.baseline_runs`) provides the functions that serve and train a model.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import ceil, isclose
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from t2g import metrics as m
from t2g.concurrency import gather_unless_stopped
from t2g.config import ModelConfig, PolicyJob, RoleConfig, RolloutConfig, SFTLoRAConfig, SFTOptions, with_overrides
from t2g.config.run_values import POLICY
from t2g.data.prompts import encode_revision
from t2g.errors import RunStopped, UserError
from t2g.feedback import token_offsets, token_rewards
from t2g.feedback.examples import encode_target, end_thinking
from t2g.feedback.fixes import apply_fixes
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.producer import Producer
from t2g.loop.sampling import (
    JudgedStep,
    compute_held_out_metrics,
    judge_answer,
    make_sampling,
    make_training_feedback,
    sample_held_out,
    select_usable,
)
from t2g.runs.log import RunLog
from t2g.runs.progress import show_progress
from t2g.tasks.base import Task
from t2g.text.offsets import decode
from t2g.text.thinking import find_thinking_tags
from t2g.types import JudgedResponse, Prompt, Rollout, TrainSequence

Metrics = dict[str, float]
REWARD_TOLERANCE = 1e-6  # sums of the same float32 rewards in another order differ by less
# (model, engine settings, coroutine function) -> its result; the engines live until the coroutine has returned
Serve = Callable[[ModelConfig, RolloutConfig, Callable[[RolloutSource], Coroutine[Any, Any, Any]]], Any]


@dataclass(frozen=True, kw_only=True)
class BaselineRun:
    """The inputs of one baseline run.

    `job.model` is the base policy. `train` writes its model to the folder POLICY. A stop request raises RunStopped.
    """

    job: PolicyJob
    task: Task
    tokenizer: Any  # tokenizer of the base policy
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
    """A response with usable feedback, and its reward."""

    prompt: Prompt
    rollout: Rollout
    reward: float  # sum of its token rewards, with the truncation penalty


Response = tuple[Prompt, Rollout]


class BaseSamples(NamedTuple):
    """The responses of the base policy."""

    held_out: list[Response]
    steps: list[JudgedStep]


class Revised(NamedTuple):
    """A response with its revisions, [] without any."""

    judged: JudgedResponse
    revisions: list[Rollout]

    @property
    def final_rollout(self) -> Rollout:
        """Return the first revision, with the index of the response; the response itself if it has none."""
        original = self.judged.rollout
        if not self.revisions:
            return original
        return replace(self.revisions[0], sample_index=original.sample_index)


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """A training example of DPO: the ids as sampled, never re-encoded from text."""

    prompt_ids: np.ndarray  # [P] int32
    chosen_ids: np.ndarray  # [R] int32
    rejected_ids: np.ndarray  # [R'] int32


def check(procedure: str, job: PolicyJob) -> None:
    """Check, before any engine starts, that the method can run with the job's settings.

    Raises:
        UserError: A setting does not fit the method.
    """
    needs = {"dpo": "two responses to compare", "ilf": "a response and a revision of it"}
    compares = needs.get(procedure)
    if compares and job.rollout.samples_per_prompt < 2:
        raise UserError(f"{procedure} needs {compares}: rollout.samples_per_prompt is 1; set it to 2 or more")
    if procedure != "dpo" and not job.feedback.writes_critiques:
        raise UserError(f"{procedure} shows the critique to a model, and feedback.style.critique=false has none")
    if procedure == "dpo" and not job.objective.train_thinking:
        raise UserError("dpo trains whole responses; set objective.train_thinking=true, or leave the method out")
    number = job.rollout.resample_zero_groups
    if number:
        raise UserError(
            f"{procedure} trains on every prompt, and rollout.resample_zero_groups={number} would replace some: set it "
            "to 0, or in the method files that use it"
        )
    if job.environment is not None:
        raise UserError(f"{procedure} has responses of a single turn: remove environment, or leave the method out")
    if job.eval_data is None:
        raise UserError(f"{procedure} is evaluated on held-out prompts; eval_data is missing")
    if compares and job.objective.outcome_rewards:
        raise UserError(
            f"{procedure} ranks responses by their spans alone, and does not use "
            "objective.outcome_rewards: set it to [], or leave the method out"
        )


# ------------------------------------------------------------------------------------------------------------- methods
def dpo(baseline: BaselineRun) -> Metrics:
    """Train the base policy on preference pairs of its own samples."""
    num_samples = baseline.job.rollout.samples_per_prompt
    base = baseline.serve(baseline.job.model, baseline.job.rollout, partial(sample_base, baseline, num_samples))
    groups = score(baseline, base.steps, baseline.tokenizer)
    pairs, ties = preference_pairs(groups)
    if not pairs:
        raise RunStopped(f"dpo has nothing to learn from: in all {ties} pairs both responses have the same reward")
    began = time.monotonic()
    trained = baseline.train(pairs)
    learn_s = time.monotonic() - began

    metrics = {m.DPO + name: value for name, value in trained.items()}
    metrics[m.DPO_PAIRS] = float(len(pairs))
    metrics[m.DPO_TIES] = ties / (ties + len(pairs))
    responses = list(chain.from_iterable(groups))
    metrics |= run_metrics(baseline.job, base.steps, responses, learn_s=learn_s)
    return metrics | score_result(baseline)


def ilf(baseline: BaselineRun) -> Metrics:
    """Fine-tune the base policy on the best revision of each of its responses."""
    base = baseline.serve(baseline.job.model, baseline.job.rollout, partial(sample_base, baseline, 1))
    revised = baseline.serve(
        baseline.reviser, revising_rollout(baseline.job), partial(revise_steps, baseline, base.steps)
    )
    best: list[Scored] = []
    for group in score(baseline, revised, baseline.reviser_tokenizer):
        finished = [response for response in group if not response.rollout.is_unfinished]
        if finished:
            best.append(max(finished, key=lambda response: response.reward))
    if not best:
        raise RunStopped(
            "ilf has nothing to imitate: no response has both a critique that fits the reviser's context and a "
            "finished revision"
        )
    began = time.monotonic()
    tags = find_thinking_tags(baseline.tokenizer, baseline.job.model.thinking_tags)
    examples = imitation_examples(best, baseline.tokenizer)
    trained = baseline.train([end_thinking(example, baseline.tokenizer, tags) for example in examples])
    learn_s = time.monotonic() - began

    num_responses = sum(len(step.responses) for step in base.steps)
    is_fixed = [not response.rollout.policy_versions for response in best]  # a revision by fixes has no engine data
    metrics = {
        m.ILF_LOSS: trained["loss"],
        m.ILF_REVISED: len(best) / num_responses,
        m.ILF_FIXED: mean(is_fixed),
    }
    metrics |= run_metrics(baseline.job, [*base.steps, *revised], best, learn_s=learn_s)
    return metrics | score_result(baseline)


def reflection(baseline: BaselineRun) -> Metrics:
    """Revise the base policy's held-out responses and evaluate the revisions.

    A response is kept unrevised if it has no critique or the critique does not fit the reviser's context.
    """
    base = baseline.serve(baseline.job.model, baseline.job.rollout, partial(sample_base, baseline, 0))

    async def answer_again(rollouts: RolloutSource) -> tuple[list[Response], Metrics]:
        began = time.monotonic()
        judged = await judge(baseline, baseline.feedback, base.held_out)
        revised = await revise(baseline, judged, rollouts, split="eval", step=0, num_samples=1)
        pairs = [(response.judged.prompt, response.final_rollout) for response in revised]
        share = float(mean(bool(response.revisions) for response in revised))
        seconds = time.monotonic() - began
        return pairs, {m.SAMPLES: 0.0, m.REFLECTION_REVISED: share, m.REFLECTION_S: seconds}

    pairs, metrics = baseline.serve(baseline.reviser, revising_rollout(baseline.job), answer_again)
    return metrics | asyncio.run(measure(baseline, pairs, step=baseline.job.num_steps))


METHODS: dict[str, Callable[[BaselineRun], Metrics]] = {"dpo": dpo, "ilf": ilf, "reflection": reflection}


# ---------------------------------------------------------------------------------------------- responses and feedback
async def sample_base(baseline: BaselineRun, num_samples: int, rollouts: RolloutSource) -> BaseSamples:
    """Sample the base policy, and log its held-out score as step 0.

    Returns:
        The held-out responses, and for each step `num_samples` judged responses to each of its prompts.
    """
    job = baseline.job
    held_out, metrics = await score_held_out(baseline, rollouts, step=0)
    baseline.log.write_step(0, metrics)
    samples = BaseSamples(held_out, [])
    if num_samples == 0:
        return samples
    sampling_job = with_overrides(job, {"rollout.samples_per_prompt": num_samples})
    feedback = make_training_feedback(job, baseline.feedback)
    with show_progress(f"{job.run.name}: samples of the base", job.num_steps) as bar:
        async with Producer(sampling_job, baseline.prompts, rollouts, feedback) as producer:
            for step in range(1, job.num_steps + 1):
                producer.admit(step)
                samples.steps.append(await producer.take(step, baseline.stop))
                bar.advance()
    return samples


async def revise_steps(baseline: BaselineRun, steps: Sequence[JudgedStep], rollouts: RolloutSource) -> list[JudgedStep]:
    """Return each step's judged revisions of each response: by its fixes, if it has any, and by the reviser.

    They are `samples_per_prompt` - 1 at most, so that PPO has as many judged responses: a revision by fixes takes the
    place of the reviser's last one.
    """
    job = baseline.job
    feedback = make_training_feedback(job, baseline.feedback)
    num_samples = job.rollout.samples_per_prompt - 1
    revised_steps: list[JudgedStep] = []
    with show_progress(f"{job.run.name}: revisions", job.num_steps) as bar:
        for step, judged in enumerate(steps, start=1):
            responses = select_usable(judged, job, step=step)
            began = time.monotonic()
            revised = await revise(baseline, responses, rollouts, split="revise", step=step, num_samples=num_samples)
            sampled_at = time.monotonic()

            candidates: list[Response] = []
            for response in revised:
                revisions = revise_by_fixes(baseline, response.judged) + response.revisions
                candidates += [(response.judged.prompt, revision) for revision in revisions[:num_samples]]
            judged_revisions = await judge(baseline, feedback, candidates)
            revised_step = JudgedStep(
                responses=tuple(judged_revisions),
                generate_s=sampled_at - began,
                feedback_s=time.monotonic() - sampled_at,
            )
            revised_steps.append(revised_step)
            bar.advance()
    return revised_steps


def revise_by_fixes(baseline: BaselineRun, judged: JudgedResponse) -> list[Rollout]:
    """Return the response with its fixes applied, in the reviser's tokens and without engine data; [] without fixes.

    A response that is truncated, or exceeds `max_new_tokens` with its fixes, is not revised: it would be imitated.
    """
    rollout = judged.rollout
    text = apply_fixes(rollout.response_text, judged.feedback.spans)
    if rollout.is_truncated or text == rollout.response_text:
        return []
    ids = encode_target(text, baseline.reviser_tokenizer)
    if len(ids) > baseline.job.rollout.max_new_tokens:
        return []
    revision = replace(
        rollout,
        response_ids=ids,
        response_text=decode(baseline.reviser_tokenizer, ids),
        rollout_logprobs=np.zeros(len(ids), np.float32),
        policy_versions=(),
    )
    return [revision]


async def judge(baseline: BaselineRun, feedback: FeedbackSource, pairs: Sequence[Response]) -> list[JudgedResponse]:
    """Return the responses with the feedback on them."""
    requests = (judge_answer(feedback, prompt, rollout) for prompt, rollout in pairs)
    feedbacks = await gather_unless_stopped(requests, baseline.stop)
    return [JudgedResponse(*pair, answer) for pair, answer in zip(pairs, feedbacks, strict=True)]


async def revise(
    baseline: BaselineRun,
    judged: Sequence[JudgedResponse],
    rollouts: RolloutSource,
    *,
    split: str,
    step: int,
    num_samples: int,
) -> list[Revised]:
    """Return each response with `num_samples` revisions of it, or none if `revision_prompt` returns None."""
    max_tokens = revising_rollout(baseline.job).max_prompt_tokens
    sampling = make_sampling(baseline.job, split, step, num_samples=num_samples)
    prompts = [revision_prompt(baseline.task, response, baseline.reviser_tokenizer, max_tokens) for response in judged]
    requests = (rollouts.sample(prompt, sampling) for prompt in prompts if prompt)
    answers = iter(await gather_unless_stopped(requests, baseline.stop))
    revised: list[Revised] = []
    for response, prompt in zip(judged, prompts, strict=True):
        revisions = list(next(answers)) if prompt else []
        revised.append(Revised(response, revisions))
    return revised


async def score_held_out(
    baseline: BaselineRun, rollouts: RolloutSource, *, step: int
) -> tuple[list[Response], Metrics]:
    """Sample the held-out prompts and return the responses with their metrics."""
    began = time.monotonic()
    pairs = await sample_held_out(baseline.job, baseline.eval_prompts, rollouts)
    metrics = await measure(baseline, pairs, step=step)
    metrics[m.EVAL_S] = time.monotonic() - began
    return pairs, metrics


async def measure(baseline: BaselineRun, pairs: Sequence[Response], *, step: int) -> Metrics:
    """Return the held-out metrics of responses."""
    return await compute_held_out_metrics(
        baseline.job, baseline.task, pairs, baseline.feedback, baseline.log, step=step
    )


def score_result(baseline: BaselineRun) -> Metrics:
    """Return the held-out metrics of the trained policy, on the prompts and seeds of the base policy."""
    trained = baseline.job.run.folder / POLICY
    model = with_overrides(baseline.job.model, {"policy": str(trained), "revision": None})
    score = partial(score_held_out, baseline, step=baseline.job.num_steps)
    _, metrics = baseline.serve(model, baseline.job.rollout, score)
    return metrics


def run_metrics(job: PolicyJob, steps: Sequence[JudgedStep], trained: Sequence[Scored], *, learn_s: float) -> Metrics:
    """Return the samples and seconds of the run as if it were one step.

    `samples` is the run's budget: PPO, too, counts responses whose feedback failed.

    Args:
        trained: The responses that the policy was trained on.
    """
    rollout = job.rollout
    generate_s = sum(step.generate_s for step in steps)
    feedback_s = sum(step.feedback_s for step in steps)
    lengths: list[int] = []
    is_truncated: list[bool] = []
    has_failed: list[bool] = []
    for response in chain.from_iterable(step.responses for step in steps):
        lengths.append(len(response.rollout.response_ids))
        is_truncated.append(response.rollout.is_truncated)
        has_failed.append(not response.feedback.usable)
    metrics: Metrics = {m.SAMPLES: float(job.num_steps * rollout.prompts_per_step * rollout.samples_per_prompt)}
    metrics[m.RESPONSE_REWARD] = mean(response.reward for response in trained)
    metrics[m.LENGTH] = mean(lengths)
    metrics[m.TRUNCATED_SHARE] = mean(is_truncated)
    metrics[m.FAILED_SHARE] = mean(has_failed)
    metrics[m.GENERATE_S] = generate_s
    metrics[m.FEEDBACK_S] = feedback_s
    metrics[m.LEARN_S] = learn_s
    metrics[m.STEP_S] = generate_s + feedback_s + learn_s
    return metrics


# -------------------------------------------------------------------------------------------------- training examples
def score(baseline: BaselineRun, steps: Sequence[JudgedStep], tokenizer: Any) -> list[list[Scored]]:
    """Group the usable responses by step and prompt, in order, each with the sum of its rewards.

    Args:
        tokenizer: Tokenizer of the model that wrote the responses.
    """
    groups: dict[tuple[int, str], list[Scored]] = defaultdict(list)
    for step, judged in enumerate(steps, start=1):
        if not judged.responses and not judged.unsampled:
            continue
        for response in select_usable(judged, baseline.job, step=step):
            prompt = response.prompt
            reward = sum_rewards(baseline.job, response, tokenizer)
            scored = Scored(prompt=prompt, rollout=response.rollout, reward=reward)
            groups[step, prompt.prompt_id].append(scored)
    return list(groups.values())


def sum_rewards(job: PolicyJob, response: JudgedResponse, tokenizer: Any) -> float:
    """Return the sum of a response's token rewards, with the truncation penalty."""
    objective = job.objective
    rollout = response.rollout
    rewards = token_rewards(
        token_offsets(tokenizer, rollout.response_ids),
        response.feedback.spans,
        text=rollout.response_text,
        rule=objective.rewards,
        weights=job.feedback.weights,
    )
    penalty = objective.truncation_penalty if rollout.is_unfinished else 0.0
    return objective.span_coef * float(rewards.sum()) + penalty


def preference_pairs(groups: Iterable[Sequence[Scored]]) -> tuple[list[PreferencePair], int]:
    """Pair each prompt's best response with its worst, the second best with the second worst, and so on.

    A response is in one pair at most, so that a pass over the pairs is a pass over the samples. Responses of equal
    reward keep their order. The middle response of an odd number has no partner.

    Rewards 2, 0, 1, 0 -> (2, 0), (1, 0); rewards 1, 1 -> no pair, one tie.

    Returns:
        The pairs, and the number of ties: pairs left out because both responses have the same reward, up to rounding.
    """
    pairs: list[PreferencePair] = []
    ties = 0
    for group in groups:
        ranking = sorted(group, key=lambda response: -response.reward)  # stable
        better_half = ranking[: len(ranking) // 2]
        for chosen, rejected in zip(better_half, reversed(ranking), strict=False):
            if isclose(chosen.reward, rejected.reward, abs_tol=REWARD_TOLERANCE):
                ties += 1
                continue
            pair = PreferencePair(
                prompt_ids=chosen.prompt.prompt_ids,
                chosen_ids=chosen.rollout.response_ids,
                rejected_ids=rejected.rollout.response_ids,
            )
            pairs.append(pair)
    return pairs, ties


def imitation_examples(best: Sequence[Scored], tokenizer: Any) -> list[TrainSequence]:
    """Return the policy's prompts with the revised responses as targets, encoded by the policy's tokenizer."""
    examples: list[TrainSequence] = []
    for response in best:
        ids = encode_target(response.rollout.answer, tokenizer)
        weights = np.ones(len(ids), np.float32)
        example = TrainSequence(prompt_ids=response.prompt.prompt_ids, response_ids=ids, weights=weights)
        examples.append(example)
    return examples


def revision_prompt(task: Task, judged: JudgedResponse, tokenizer: Any, max_prompt_tokens: int) -> Prompt | None:
    """Return the prompt that asks for a revision of the response, with its critique in the context.

    Args:
        tokenizer: Tokenizer of the reviser.

    Returns:
        None if there is no critique, or if it does not fit in `max_prompt_tokens`.
    """
    prompt = judged.prompt
    rollout = judged.rollout
    feedback = judged.feedback
    if not feedback.usable or not feedback.critique.strip():
        return None
    ids = encode_revision(task, prompt, rollout.answer, feedback.critique, tokenizer, max_prompt_tokens)
    # The seed depends on the prompt_id: revisions of two responses to one prompt need different seeds.
    prompt_id = f"{prompt.prompt_id}/{rollout.sample_index}"
    return None if ids is None else replace(prompt, prompt_id=prompt_id, prompt_ids=ids)


# ------------------------------------------------------------------------------------------------------------- settings
def batch_size(job: PolicyJob, num_items: int) -> int:
    """Return the items per optimizer step such that an epoch has as many steps as an epoch of PPO over its samples."""
    return ceil(num_items / (job.num_steps * job.learner.minibatches_per_epoch))


def sft_options(job: PolicyJob, num_examples: int) -> SFTOptions:
    """Return settings of supervised training with the learner's resources, optimizer and epochs."""
    learner = job.learner
    shared = {"dtype", "num_epochs", "tokens_per_microbatch", "gradient_checkpointing", "offload"}
    lora = SFTLoRAConfig(**learner.lora.model_dump(), dropout=0) if learner.lora else None
    return SFTOptions(
        **learner.model_dump(include=shared | RoleConfig.model_fields.keys()),
        optim=learner.policy,
        batch_size=batch_size(job, num_examples),
        lora=lora,
        timeout_s=learner.step_timeout_s,
    )


def revising_rollout(job: PolicyJob) -> RolloutConfig:
    """Return engine settings with a context window for prompt, response and critique: `PolicyJob.revision_window`."""
    return with_overrides(job.rollout, {"max_model_len": job.revision_window})
