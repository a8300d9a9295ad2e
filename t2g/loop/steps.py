"""The pure functions of one step: prompts, advantages and metrics. They do not wait and keep no state."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from t2g.algo.advantages import combine_rewards, gae, group_advantages, whiten
from t2g.algo.corrections import MAX_LOG_RATIO
from t2g.algo.kl import sequence_kl
from t2g.config import ModelConfig, ObjectiveConfig
from t2g.errors import Diverged, RunStopped, UserError
from t2g.feedback.rewards import apply_placement, compute_label_shares
from t2g.runs import metrics as m
from t2g.tasks.base import Task
from t2g.text.thinking import find_last_tag, find_thinking_tags
from t2g.types import (
    DistillationSample,
    Prompt,
    Rollout,
    ScoredRollout,
    SpanFeedback,
    TeacherStats,
    TokenStats,
    TrainSample,
    WeightSyncResult,
)


def select_prompts(*, num_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """Return the indices of the prompts of a step (1, 2, ...).

    Each epoch is a permutation, cut into whole steps; the remainder is left out, so no step holds a prompt twice. Only
    if a step needs more prompts than there are, it holds all of them as often as they fit, and others of each epoch
    once more. The result depends on the arguments only: a resumed run continues with the same prompts.
    """
    if per_step > num_prompts:
        repeats, rest = divmod(per_step - 1, num_prompts)
        once_more = select_prompts(num_prompts=num_prompts, per_step=rest + 1, step=step, seed=seed)
        return [*range(num_prompts)] * repeats + once_more
    epoch, index = divmod(step - 1, num_prompts // per_step)
    order = np.random.default_rng([seed, epoch]).permutation(num_prompts)
    return order[index * per_step : (index + 1) * per_step].tolist()


def check_truncation_penalty(tokenizer: Any, prompts: Sequence[Prompt], model: ModelConfig, penalty: float) -> None:
    """Check that a model that thinks pays for a response without an answer.

    A prompt that closes the thinking needs no penalty: a model that opens one nevertheless is rare.

    Raises:
        UserError: `objective.truncation_penalty` is 0, and the thinking is not switched off in every prompt.
    """
    tags = find_thinking_tags(tokenizer, model.thinking_tags)
    if tags is None or penalty < 0 or all(find_last_tag(tokenizer, p.prompt_ids, tags) == tags[1] for p in prompts):
        return
    raise UserError(
        f"{model.policy} may think before {tags[1]}, and with objective.truncation_penalty=0 a response without an "
        "answer is worth more than a criticised one: set it to -1, switch thinking off as in "
        "'model.chat_template_kwargs={enable_thinking: false}', or set 'model.thinking_tags=[]' where the model never "
        "thinks"
    )


def sampling_seed(seed: int, split: str, step: int) -> int:
    """Return the sampling seed of a step of a split ("train", "eval"); it differs between splits and steps."""
    digest = hashlib.blake2b(f"{seed}/{split}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)


def token_staleness(rollouts: Sequence[Rollout], *, policy_version: int, max_staleness: int) -> np.ndarray:
    """Return, for each sampled token, the updates between the weights that sampled it and those it trains: [N] int.

    Raises:
        RunStopped: A sample is older than `max_staleness`, or newer than the learner.
    """
    ages = []
    for rollout in rollouts:
        versions = {version for _, _, version in rollout.policy_versions}
        if not versions <= set(range(policy_version - max_staleness, policy_version + 1)):
            raise RunStopped(
                f"prompt {rollout.prompt_id}, sample {rollout.sample_index} was sampled with weights of version "
                f"{sorted(versions)}, and the learner is at {policy_version}: rollout.max_staleness={max_staleness} "
                "forbids it"
            )
        ages += [np.full(end - start, policy_version - version) for start, end, version in rollout.policy_versions]
    return np.concatenate(ages)


def pad_rows(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return ragged [R] float arrays as one [B, max R] float32 tensor, right-padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(np.array(r, np.float32)) for r in rows], batch_first=True)


def pad_sampled(scored: Sequence[ScoredRollout], rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return `pad_rows` of the numbers of sampled tokens: those that an environment inserted are left out."""
    return pad_rows([row[s.rollout.policy_mask] for s, row in zip(scored, rows, strict=True)])


def check_finite(step: int, scored: Sequence[ScoredRollout], stats: Sequence[TokenStats]) -> None:
    """Raise Diverged for the first number that is not finite, with its step, prompt, sample and token."""
    for s, t in zip(scored, stats, strict=True):
        columns = {
            "reward": s.token_rewards,
            "outcome reward": np.append(np.zeros_like(s.token_rewards[1:]), s.outcome_reward),  # paid at the last token
            "rollout logprob": s.rollout.rollout_logprobs,
            **vars(t),
        }
        for name, values in columns.items():
            bad = np.flatnonzero(~np.isfinite(values))
            if bad.size:
                raise Diverged(
                    f"step {step}: prompt {s.rollout.prompt_id}, sample {s.rollout.sample_index}: the {name} of token "
                    f"{bad[0]} is {values[bad[0]]}; the last good checkpoint is kept"
                )


def make_train_samples(
    scored: Sequence[ScoredRollout],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
    *,
    kl_coef: float,
    seed: int,
    teacher: Sequence[TeacherStats | None] = (),
) -> list[TrainSample]:
    """Turn rewards into whitened advantages and returns.

    Advantages are whitened over all sampled tokens of the step; returns belong to the unwhitened advantages. Tokens
    that an environment inserted have weight 0, and returns and baselines pass over them.

    Args:
        teacher: With `objective.teacher`, the teacher's log-probabilities for each response; None if the teacher has
            no critique of it. Such a response has no loss if the teacher's weight is 1.

    Raises:
        RunStopped: No token has a loss weight.
    """
    pad = partial(pad_sampled, scored)
    mask = pad([np.ones(len(s.rollout.response_ids)) for s in scored])
    old, ref = pad([t.old_logprobs for t in stats]), pad([t.ref_logprobs for t in stats])
    rewards = combine_rewards(
        pad([_move_rewards(s, objective, seed) for s in scored]),
        torch.tensor([s.outcome_reward + s.truncation_penalty for s in scored]),
        old,
        ref,
        mask,
        span_coef=objective.span_coef,
        kl_coef=0.0 if objective.kl_in_loss else kl_coef,
    )
    gamma = pad([_discounts(s.rollout, objective) for s in scored])
    if objective.uses_critic:
        values = pad([t.values for t in stats])
        advantages, returns = gae(rewards, values, mask, gamma, objective.lam)
    else:
        group_of = {s.rollout.prompt_id: i for i, s in enumerate(scored)}  # a number for each prompt
        groups = torch.tensor([group_of[s.rollout.prompt_id] for s in scored])
        normalise = objective.advantages == "group_normalised"
        advantages, returns = group_advantages(rewards, mask, groups, gamma, normalise=normalise)
    advantages = whiten(advantages, mask, objective.whiten)
    samples: list[TrainSample] = []
    for row, (s, t) in enumerate(zip(scored, stats, strict=True)):
        is_sampled = s.rollout.policy_mask
        is_trained = is_sampled if objective.train_thinking else s.answer_tokens
        share = 1 if objective.loss_aggregation == "token" else 1 / max(1, int(is_trained.sum()))
        samples.append(
            TrainSample(
                prompt_ids=s.rollout.prompt_ids,
                response_ids=s.rollout.response_ids,
                weights=is_trained * np.float32(share),
                advantages=_spread(advantages[row], is_sampled),
                returns=_spread(returns[row], is_sampled),
                values=t.values,
                old_logprobs=t.old_logprobs,
                rollout_logprobs=s.rollout.rollout_logprobs,
                ref_logprobs=t.ref_logprobs,
            )
        )
    if not (objective.train_thinking or any(sample.weights.any() for sample in samples)):
        raise RunStopped(
            "every response ended within its thinking, and objective.train_thinking=false trains no thinking: "
            "raise rollout.max_new_tokens"
        )
    if objective.teacher is not None:
        return [
            _add_teacher(sample, t.top_ids, teacher_stats, objective.teacher.weight)
            for sample, t, teacher_stats in zip(samples, stats, teacher, strict=True)
        ]
    return samples


def _move_rewards(scored: ScoredRollout, objective: ObjectiveConfig, seed: int) -> np.ndarray:
    """Return the token rewards after `rewards.placement`, which moves them among the tokens of the answers, [R]."""
    rewards, is_answer = scored.token_rewards.copy(), scored.answer_tokens
    rewards[is_answer] = apply_placement(
        rewards[is_answer], objective.rewards.placement, step_ids=scored.step_ids[is_answer],
        seed=seed, prompt_id=scored.rollout.prompt_id, sample_index=scored.rollout.sample_index,
    )  # fmt: skip
    return rewards


def _discounts(rollout: Rollout, objective: ObjectiveConfig) -> np.ndarray:
    """Return the discount from each token to the next, [R]: gamma, times turn_gamma from one turn to the next."""
    discounts = np.full(len(rollout.response_ids), objective.gamma)
    for turn in rollout.conversation:
        discounts[turn.tokens[1] - 1] *= objective.turn_gamma
    return discounts


def _spread(row: torch.Tensor, is_sampled: np.ndarray) -> np.ndarray:
    """Return the numbers of sampled tokens at their positions, [R] float32, and 0 for inserted tokens."""
    spread = np.zeros(len(is_sampled), np.float32)
    spread[is_sampled] = row.numpy()[: is_sampled.sum()]
    return spread


def _add_teacher(
    sample: TrainSample, top_ids: np.ndarray, teacher_stats: TeacherStats | None, weight: float
) -> TrainSample:
    """Return the sample with the teacher's log-probabilities of the tokens `top_ids`, [R, k].

    Without a teacher (None) the sample has the loss of its rewards alone: no loss if the teacher's `weight` is 1.
    """
    if teacher_stats is None:
        return DistillationSample(
            **vars(sample) | {"weights": sample.weights * np.float32(weight < 1)},
            top_ids=top_ids,
            teacher_logprobs=np.zeros(top_ids.shape, np.float32),
            teacher_mask=np.zeros(len(top_ids), np.float32),
        )
    return DistillationSample(
        **vars(sample),
        top_ids=top_ids,
        teacher_logprobs=teacher_stats.top_logprobs,
        teacher_mask=np.ones(len(top_ids), np.float32),
    )


def make_token_columns(samples: Sequence[TrainSample], stats: Sequence[TokenStats]) -> dict[str, list[np.ndarray]]:
    """Return the per-token numbers [R] for samples.jsonl: advantages, and probability ratios of learner to engine.

    The ratios are those before the update, clipped to exp(+-MAX_LOG_RATIO).
    """
    log_ratios = [t.old_logprobs - s.rollout_logprobs for s, t in zip(samples, stats, strict=True)]
    ratios = [np.exp(np.clip(row, -MAX_LOG_RATIO, MAX_LOG_RATIO)) for row in log_ratios]
    return {"token_advantages": [s.advantages for s in samples], "token_ratios": ratios}


def step_kl(scored: Sequence[ScoredRollout], stats: Sequence[TokenStats]) -> float:
    """Return the KL to the reference for the KL controller, nats per sequence."""
    pad = partial(pad_sampled, scored)
    mask = pad([np.ones_like(t.old_logprobs) for t in stats])
    return sequence_kl(pad([t.old_logprobs for t in stats]), pad([t.ref_logprobs for t in stats]), mask)


def step_metrics(
    judged: Sequence[tuple[Prompt, Rollout, SpanFeedback]],
    scored: Sequence[ScoredRollout],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
    *,
    kl: float,
    kl_coef: float,
) -> dict[str, float]:
    """Return the driver's metrics of a step, see `t2g.runs.metrics`. Shares are of answer tokens or of samples."""
    masks = [s.rollout.policy_mask for s in scored]
    deltas = np.concatenate([s.deltas[s.answer_tokens] for s in scored])
    rewards = np.concatenate([s.rewards[mask] for s, mask in zip(scored, masks, strict=True)])
    gaps = np.concatenate(
        [(t.old_logprobs - s.rollout.rollout_logprobs)[m] for s, t, m in zip(scored, stats, masks, strict=True)]
    )
    quotes = sum(f.num_quotes for _, _, f in judged)
    sources = [f.source for _, _, f in judged]
    shares = {f"tokens/{label}_share": share for label, share in compute_label_shares(deltas).items()}
    shares |= {f"feedback/source/{name}": sources.count(name) / len(sources) for name in sorted(set(sources))}
    modes = [f.execution["mode"] for _, _, f in judged if "mode" in f.execution]
    shares |= {f"sandbox/{mode}_share": modes.count(mode) / len(modes) for mode in sorted(set(modes))}
    shares |= _means(m.FEEDBACK_METRICS, [f.metrics for _, _, f in judged])
    # A response without an answer is not judged: it has no criteria, and counts as a reward of 0. A conversation that
    # has fewer turns than others does not count for the turns that it lacks.
    for name in dict.fromkeys(name for _, _, f in judged for name in f.criteria):
        failed = [not f.criteria[name].usable for _, _, f in judged if name in f.criteria]
        shares[f"{m.CRITERION_FAILED}{name}"] = float(np.mean(failed))
        found = [s for s in scored if name in s.feedback.criteria or not s.feedback.criteria]
        if found:
            criterion_rewards = [s.criterion_rewards.get(name, 0.0) for s in found]
            shares[f"{m.CRITERION_REWARD}{name}"] = float(np.mean(criterion_rewards))
    rollouts = [r for _, r, _ in judged]
    if any(turn.answer_start != turn.characters[0] for r in rollouts for turn in r.turns):  # the model thinks
        shares[m.UNANSWERED_SHARE] = float(np.mean([r.answer_start is None for r in rollouts]))
    if conversations := [(r, f) for _, r, f in judged if r.conversation]:
        shares |= _conversation_metrics(conversations)
    totals = [objective.span_coef * s.token_rewards.sum() + s.truncation_penalty + s.outcome_reward for s in scored]
    if objective.outcome_rewards:
        shares[m.OUTCOME_MEAN] = float(np.mean([s.outcome_reward for s in scored]))
        shares |= _means(m.OUTCOME_REWARD, [s.feedback.outcomes for s in scored])
    return shares | {
        m.TOTAL_REWARD: float(np.mean(totals)),
        "reward/token_mean": float(rewards.mean()),
        "reward/response_mean": float(np.mean([s.rewards.sum() for s in scored])),
        "policy/kl": kl,
        "policy/kl_coef": kl_coef,
        "policy/entropy": float(np.concatenate([t.entropy[mask] for t, mask in zip(stats, masks, strict=True)]).mean()),
        "response/length_mean": float(np.mean([r.policy_mask.sum() for _, r, _ in judged])),
        m.TRUNCATED_SHARE: float(np.mean([r.is_truncated for _, r, _ in judged])),
        "gap/logprob_mean": float(np.abs(gaps).mean()),
        "gap/p95": float(np.quantile(np.abs(gaps), 0.95)),
        "feedback/failed_share": 1 - len(scored) / len(judged),
        "feedback/empty_share": sum(f.status == "empty" and not f.reason for _, _, f in judged) / len(judged),
        m.LOCATED_RATE: sum(f.num_located for _, _, f in judged) / quotes if quotes else 1.0,
    }


def _conversation_metrics(pairs: Sequence[tuple[Rollout, SpanFeedback]]) -> dict[str, float]:
    spans = [(s, r) for r, f in pairs for s in f.spans]
    unpaid = [
        not any(s.start < turn.characters[1] and turn.characters[0] < s.end for turn in r.turns) for s, r in spans
    ]
    return {
        m.TURNS: float(np.mean([len(r.turns) for r, _ in pairs])),
        "turns/window_share": float(np.mean([r.is_window_full for r, _ in pairs])),
        "turns/unpaid_share": float(np.mean(unpaid)) if unpaid else 0.0,
    }


def _means(prefix: str, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return for each name the mean over the rows that have it."""
    names = sorted({name for row in rows for name in row})
    return {f"{prefix}{name}": float(np.mean([row[name] for row in rows if name in row])) for name in names}


def fault_recall(task: Task, judged: Sequence[tuple[Prompt, Rollout, SpanFeedback]]) -> dict[str, float]:
    """Return how well the feedback finds the faults that the task knows.

    Returns:
        For each fault class the share that overlaps a poor span; `feedback/faults_praised` is the share of all faults
        that overlaps a good span, which is rewarded instead of penalised.
    """
    recalled: dict[str, list[bool]] = {}
    praised = []
    for prompt, rollout, feedback in judged:
        first = rollout.answer_start  # None: not judged
        for kind, start, end in task.faults(prompt, rollout.answer) if feedback.usable and first is not None else ():
            labels = {s.label for s in feedback.spans if s.start < first + end and first + start < s.end}
            recalled.setdefault(f"{m.RECALL}{kind}", []).append(-1 in labels)
            praised.append(1 in labels)
    shares = {name: float(np.mean(hits)) for name, hits in sorted(recalled.items())}
    return shares | ({"feedback/faults_praised": float(np.mean(praised))} if praised else {})


def teacher_critiques(prompt_ids: Sequence[str], critiques: Sequence[str], *, shuffled: bool) -> list[str]:
    """Return the critique that the teacher reads for each response, "" for none.

    Args:
        shuffled: Take a critique of the next prompt that has any; "" only if no other prompt has a critique.
    """
    stripped = [critique.strip() for critique in critiques]
    if not shuffled:
        return stripped
    by_prompt: dict[str, list[str]] = {prompt_id: [] for prompt_id in prompt_ids}
    for prompt_id, critique in zip(prompt_ids, stripped, strict=True):
        by_prompt[prompt_id] += [critique] if critique else []
    prompts, others = [*by_prompt], dict[str, Iterator[str]]()
    for index, prompt_id in enumerate(prompts):
        following = prompts[index + 1 :] + prompts[:index]
        others[prompt_id] = cycle(next((by_prompt[other] for other in following if by_prompt[other]), [""]))
    return [next(others[prompt_id]) for prompt_id in prompt_ids]


def split_teacher_gap(gap: np.ndarray, deltas: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gaps of a response's good tokens, of its poor ones, and of the first token of each run of poor ones.

    Args:
        gap: Teacher's log-probability less the policy's of each sampled token, [R].
        deltas: See `ScoredRollout.deltas`.
    """
    poor = deltas < 0
    return {"good": gap[deltas > 0], "poor": gap[poor], "poor_first": gap[poor & ~np.append(False, poor[:-1])]}


def teacher_contrast(means: Mapping[str, float]) -> dict[str, float]:
    """Return `contrast`, the mean gap of good tokens, at most 0, less that of first poor tokens; {} without the latter.

    Below 0 the teacher does not tell poor tokens from good ones: it makes the poor ones likelier, or the good ones
    less likely than the poor ones.

    >>> teacher_contrast({"good": -1.25, "poor_first": -0.25}), teacher_contrast({"good": 0.5, "poor_first": -0.25})
    ({'contrast': -1.0}, {'contrast': 0.25})
    """
    return {"contrast": min(0.0, means.get("good", 0.0)) - means["poor_first"]} if "poor_first" in means else {}


def teacher_metrics(
    scored: Sequence[ScoredRollout], teacher: Sequence[TeacherStats | None], stats: Sequence[TokenStats]
) -> dict[str, float]:
    """Return the share of the step with a teacher, the means of `split_teacher_gap`, and `teacher_contrast`."""
    rows = [
        split_teacher_gap(teacher_stats.logprobs - t.old_logprobs, s.deltas)
        for s, t, teacher_stats in zip(scored, stats, teacher, strict=True)
        if teacher_stats is not None
    ]
    gaps = {kind: np.concatenate([row[kind] for row in rows]) for kind in (rows[0] if rows else ())}
    means = {kind: float(gap.mean()) for kind, gap in gaps.items() if gap.size}
    metrics = {f"gap_{kind}": mean for kind, mean in means.items()} | teacher_contrast(means)
    return {f"teacher/{name}": value for name, value in metrics.items()} | {"teacher/share": len(rows) / len(teacher)}


def sync_metrics(result: WeightSyncResult) -> dict[str, float]:
    """Return the metrics of a weight sync."""
    return {f"sync/{name}_s": seconds for name, seconds in result.timings.items()} | {
        "time/sync_s": result.seconds,
        "sync/bytes": float(result.bytes),
        "sync/probe_gap": result.probe_gap,
        "sync/calls": float(result.num_calls),
        "sync/missed": float(len(result.missed)),
    }
