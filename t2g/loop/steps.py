"""The pure functions of one step: prompts, seeds and training samples. They do not wait and keep no state."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from t2g.algo.corrections import MAX_LOG_RATIO
from t2g.algo.kl import adapt_kl_coef, sequence_kl
from t2g.algo.teacher_weights import weigh_by_teacher
from t2g.config import ModelConfig, ObjectiveConfig, TeacherConfig
from t2g.errors import Diverged, RunStopped, UserError
from t2g.loop.step_advantages import compute_advantages, find_trained_tokens, pad_sampled
from t2g.text.thinking import find_last_tag, find_thinking_tags
from t2g.types import (
    DistillationSample,
    Prompt,
    Rollout,
    ScoredRollout,
    TeacherStats,
    TokenStats,
    TrainSample,
)


def select_prompts(*, num_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """Return the indices of the prompts of a step (1, 2, ...).

    Each epoch is a permutation, cut into whole steps; the remainder is left out, so no step holds a prompt twice. A
    step that needs more prompts than there are repeats all of them, and takes the rest from a permutation. The result
    depends on the arguments only: a resumed run continues with the same prompts.
    """
    if per_step > num_prompts:
        repeats, rest = divmod(per_step - 1, num_prompts)
        once_more = select_prompts(num_prompts=num_prompts, per_step=rest + 1, step=step, seed=seed)
        all_prompts = [*range(num_prompts)]
        return all_prompts * repeats + once_more

    epoch, index = divmod(step - 1, num_prompts // per_step)
    order = np.random.default_rng([seed, epoch]).permutation(num_prompts)
    start = index * per_step
    return order[start : start + per_step].tolist()


def check_truncation_penalty(tokenizer: Any, prompts: Sequence[Prompt], model: ModelConfig, penalty: float) -> None:
    """Check that a model that thinks pays for a response without an answer.

    A prompt that closes the thinking needs no penalty: a model that opens one nevertheless is rare.

    Raises:
        UserError: `objective.truncation_penalty` is 0, and the thinking is not switched off in every prompt.
    """
    tags = find_thinking_tags(tokenizer, model.thinking_tags)
    if tags is None or penalty < 0:
        return
    closing_tag = tags[1]
    if all(find_last_tag(tokenizer, prompt.prompt_ids, tags) == closing_tag for prompt in prompts):
        return
    raise UserError(
        f"{model.policy} may think before {closing_tag}, and with objective.truncation_penalty=0 a response without an "
        "answer is worth more than a criticised one: set it to -1, switch thinking off as in "
        "'model.chat_template_kwargs={enable_thinking: false}', or set 'model.thinking_tags=[]' where the model never "
        "thinks"
    )


def make_sampling_seed(seed: int, split: str, step: int) -> int:
    """Return the sampling seed of a step of a split ("train", "eval"); it differs between splits and steps."""
    digest = hashlib.blake2b(f"{seed}/{split}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)


def compute_token_staleness(rollouts: Sequence[Rollout], *, policy_version: int, max_staleness: int) -> np.ndarray:
    """Return, for each sampled token, the updates between the weights that sampled it and those it trains: [N] int.

    Raises:
        RunStopped: A sample is older than `max_staleness`, or newer than the learner.
    """
    staleness = []
    allowed = set(range(policy_version - max_staleness, policy_version + 1))
    for rollout in rollouts:
        versions = {version for _, _, version in rollout.policy_versions}
        if not versions <= allowed:
            raise RunStopped(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_index} was sampled with weights of version "
                f"{sorted(versions)}, and the learner is at {policy_version}: rollout.max_staleness={max_staleness} "
                "forbids it"
            )
        for start, end, version in rollout.policy_versions:
            staleness.append(np.full(end - start, policy_version - version))
    return np.concatenate(staleness)


def check_finite(step: int, scored: Sequence[ScoredRollout], stats: Sequence[TokenStats]) -> None:
    """Raise for the first number that is not finite, with its step, prompt, sample and token.

    Raises:
        RunStopped: A reward is not finite.
        Diverged: The learner or an engine computed the number: its weights must not be saved.
    """
    for response, token_stats in zip(scored, stats, strict=True):
        rollout = response.rollout
        not_last = np.zeros_like(response.token_rewards[1:])
        columns = {
            "reward": response.token_rewards,
            "outcome reward": np.append(not_last, response.outcome_reward),  # paid at the last token
            "rollout logprob": rollout.rollout_logprobs,
            **vars(token_stats),
        }
        for name, values in columns.items():
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size == 0:
                continue
            token = bad[0]
            sample = f"step {step}: prompt {rollout.prompt_id}, sample {rollout.sample_index}"
            message = f"{sample}: the {name} of token {token} is {values[token]}"
            if name.endswith("reward"):
                raise RunStopped(message)
            raise Diverged(f"{message}; the last checkpoint is kept")


def make_train_samples(
    scored: Sequence[ScoredRollout],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
    *,
    kl_coef: float,
    seed: int,
    teacher: Sequence[TeacherStats | None] = (),
) -> list[TrainSample]:
    """Return the samples of an update with their advantages and returns, see `compute_advantages`.

    Tokens that an environment inserted have weight 0, and returns and baselines pass over them.

    Args:
        teacher: With `objective.teacher`, the teacher's log-probabilities for each response; None if the teacher has
            no critique of it. A teacher that scales leaves its advantages as they are; one that is distilled leaves it
            without a loss if its weight is 1.

    Raises:
        RunStopped: No token has a loss weight.
    """
    step = compute_advantages(scored, stats, objective, kl_coef=kl_coef, seed=seed)
    samples: list[TrainSample] = []
    for response, token_stats, advantage_row, return_row in zip(
        scored, stats, step.advantages, step.returns, strict=True
    ):
        rollout = response.rollout
        is_sampled = rollout.policy_mask
        sample = TrainSample(
            prompt_ids=rollout.prompt_ids,
            response_ids=rollout.response_ids,
            weights=_weigh_tokens(response, objective),
            advantages=_spread(advantage_row, is_sampled),
            returns=_spread(return_row, is_sampled),
            values=token_stats.values,
            old_logprobs=token_stats.old_logprobs,
            rollout_logprobs=rollout.rollout_logprobs,
            ref_logprobs=token_stats.ref_logprobs,
        )
        samples.append(sample)

    if not objective.train_thinking and not any(sample.weights.any() for sample in samples):
        raise RunStopped(
            "every response ended within its thinking, and objective.train_thinking=false trains no thinking: "
            "raise rollout.max_new_tokens"
        )
    if objective.teacher is None:
        return samples
    return _apply_teacher(samples, stats, teacher, objective.teacher)


def _apply_teacher(
    samples: Sequence[TrainSample],
    stats: Sequence[TokenStats],
    teacher: Sequence[TeacherStats | None],
    rule: TeacherConfig,
) -> list[TrainSample]:
    """Return the samples that also learn from the teacher, or whose advantages it scales."""
    with_teacher: list[TrainSample] = []
    for sample, token_stats, teacher_stats in zip(samples, stats, teacher, strict=True):
        if rule.use == "distill":
            with_teacher.append(_add_teacher(sample, token_stats.top_ids, teacher_stats, rule.weight))
        else:
            with_teacher.append(_scale_by_teacher(sample, teacher_stats, rule.bound))
    return with_teacher


def _weigh_tokens(scored: ScoredRollout, objective: ObjectiveConfig) -> np.ndarray:
    """Return the loss weights of the tokens of a response, [R] float32."""
    is_trained = find_trained_tokens(scored, objective)
    if objective.loss_aggregation == "token":
        return is_trained * np.float32(1)
    num_trained = max(1, int(is_trained.sum()))
    return is_trained * np.float32(1 / num_trained)


def _spread(row: Any, is_sampled: np.ndarray) -> np.ndarray:
    """Return the numbers of sampled tokens at their positions, [R] float32, and 0 for inserted tokens."""
    spread = np.zeros(len(is_sampled), np.float32)
    num_sampled = is_sampled.sum()
    spread[is_sampled] = row.numpy()[:num_sampled]
    return spread


def _scale_by_teacher(sample: TrainSample, teacher_stats: TeacherStats | None, bound: float) -> TrainSample:
    """Return the sample with advantages times `weigh_by_teacher`; unchanged without a teacher."""
    if teacher_stats is None:
        return sample
    gap = teacher_stats.logprobs - sample.old_logprobs
    factors = weigh_by_teacher(gap, sample.weights > 0, bound=bound)
    return replace(sample, advantages=sample.advantages * factors)


def _add_teacher(
    sample: TrainSample, top_ids: np.ndarray, teacher_stats: TeacherStats | None, weight: float
) -> TrainSample:
    """Return the sample with the teacher's log-probabilities of the tokens `top_ids`, [R, k].

    Without a teacher (None) the sample has the loss of its rewards alone: no loss if the teacher's `weight` is 1.
    """
    fields = vars(sample)
    if teacher_stats is None:
        has_loss = weight < 1
        weights = sample.weights * np.float32(has_loss)
        return DistillationSample(
            **fields | {"weights": weights},
            top_ids=top_ids,
            teacher_logprobs=np.zeros(top_ids.shape, np.float32),
            teacher_mask=np.zeros(len(top_ids), np.float32),
        )
    return DistillationSample(
        **fields,
        top_ids=top_ids,
        teacher_logprobs=teacher_stats.top_logprobs,
        teacher_mask=np.ones(len(top_ids), np.float32),
    )


def make_token_columns(samples: Sequence[TrainSample], stats: Sequence[TokenStats]) -> dict[str, list[np.ndarray]]:
    """Return the per-token numbers [R] for samples.jsonl: advantages, and probability ratios of learner to engine.

    The ratios are those before the update, clipped to exp(+-MAX_LOG_RATIO).
    """
    advantages = []
    ratios = []
    for response, token_stats in zip(samples, stats, strict=True):
        log_ratios = token_stats.old_logprobs - response.rollout_logprobs
        bounded = np.clip(log_ratios, -MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages.append(response.advantages)
        ratios.append(np.exp(bounded))
    return {"token_advantages": advantages, "token_ratios": ratios}


def compute_step_kl(scored: Sequence[ScoredRollout], stats: Sequence[TokenStats]) -> float:
    """Return the KL to the reference for the KL controller, nats per sequence."""
    old_logprobs = [token_stats.old_logprobs for token_stats in stats]
    ref_logprobs = [token_stats.ref_logprobs for token_stats in stats]
    masks = [np.ones_like(row) for row in old_logprobs]
    pad = partial(pad_sampled, scored)
    return sequence_kl(pad(old_logprobs), pad(ref_logprobs), pad(masks))


def next_kl_coef(
    objective: ObjectiveConfig, kl_coef: float, *, kl: float, scored: Sequence[ScoredRollout], num_samples: int
) -> float:
    """Return the KL coefficient of the next step, which moves the KL towards its target.

    Args:
        kl: To the reference, nats per response (`compute_step_kl`).
        scored: The responses of the step, whose length counts for `objective.kl_target_per_token`.
        num_samples: Responses of the step's batch.
    """
    target = objective.kl_target
    if objective.kl_target_per_token is not None:
        lengths = [response.rollout.policy_mask.sum() for response in scored]
        target = objective.kl_target_per_token * float(np.mean(lengths))
    if target is None:
        return kl_coef
    return adapt_kl_coef(kl_coef, kl=kl, target=target, num_samples=num_samples, horizon=objective.kl_horizon)
