"""The pure functions of one step: prompts, advantages and metrics. They do not wait and keep no state."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from t2g.algo.advantages import distillation_advantages, gae, group_advantages, step_rewards, whiten
from t2g.algo.corrections import MAX_LOG_RATIO
from t2g.algo.kl import sequence_kl
from t2g.config import ObjectiveConfig
from t2g.errors import RunStopped, UserError
from t2g.feedback.rewards import apply_placement, compute_label_shares
from t2g.runs.metrics import RECALL, TRUNCATED_SHARE
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, ScoredRollout, SpanFeedback, TokenStats, TrainSample, WeightSyncResult


def select_prompts(*, num_prompts: int, per_step: int, step: int, seed: int) -> list[int]:
    """Return the indices of the prompts of a step (1, 2, ...).

    Each epoch is a permutation, cut into whole steps; the remainder is left out, so no step holds a prompt twice. The
    result depends on the arguments only: a resumed run continues with the same prompts.

    Raises:
        UserError: There are fewer prompts than a step needs.
    """
    if per_step > num_prompts:
        raise UserError(f"rollout.prompts_per_step={per_step}, and data.path has only {num_prompts} prompts; lower it")
    epoch, index = divmod(step - 1, num_prompts // per_step)
    order = np.random.default_rng([seed, epoch]).permutation(num_prompts)
    return order[index * per_step : (index + 1) * per_step].tolist()


def check_outcome_rewards(task: Task, prompts: Sequence[Prompt], coef: float) -> None:
    """Check that the task can measure the responses to every prompt; nothing is executed.

    Args:
        coef: The weight of the measure (`objective.outcome_rewards`); nothing is checked where it is 0.

    Raises:
        UserError: The task has no measure, or a prompt has nothing to measure a response against.
    """
    if coef == 0:
        return
    if not task.score_name:
        raise UserError(
            f"objective.outcome_rewards={coef:g} pays a measure of the task, and task {task.name} has none; set it to 0"
        )
    missing = [prompt.prompt_id for prompt in prompts if not task.can_measure(prompt)]
    if missing:
        raise UserError(
            f"objective.outcome_rewards={coef:g} pays {task.score_name}, and {len(missing)} of {len(prompts)} prompts "
            f"of data.path have no reference or tests to measure a response against, the first is prompt {missing[0]}; "
            "complete or remove their records, or set objective.outcome_rewards=0"
        )


def sampling_seed(seed: int, split: str, step: int) -> int:
    """Return the sampling seed of a step of a split ("train", "eval"); it differs between splits and steps."""
    digest = hashlib.blake2b(f"{seed}/{split}/{step}".encode(), digest_size=7).digest()
    return int.from_bytes(digest)


def token_staleness(rollouts: Sequence[Rollout], *, policy_version: int, max_staleness: int) -> np.ndarray:
    """Return, for each response token, the updates between the weights that sampled it and those it trains: [N] int.

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


def check_finite(step: int, scored: Sequence[ScoredRollout], stats: Sequence[TokenStats]) -> None:
    """Raise RunStopped for the first number that is not finite, with its step, prompt, sample and token."""
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
                raise RunStopped(
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
    teacher: Sequence[np.ndarray | None] = (),
) -> list[TrainSample]:
    """Turn rewards into whitened advantages and returns.

    Advantages are whitened over all response tokens of the step; returns belong to the unwhitened advantages.

    Args:
        teacher: With `objective.teacher`, the teacher's log-probabilities [R] of each response; None if the teacher has
            no critique of it. Such a response has no loss if the teacher's weight is 1.
    """
    mask = pad_rows([np.ones(len(s.rollout.response_ids)) for s in scored])
    rules = objective.rewards
    old, ref = pad_rows([t.old_logprobs for t in stats]), pad_rows([t.ref_logprobs for t in stats])
    placed = [
        apply_placement(
            s.token_rewards, rules.placement, step_ids=s.step_ids,
            seed=seed, prompt_id=s.rollout.prompt_id, sample_index=s.rollout.sample_index,
        )
        for s in scored
    ]  # fmt: skip
    for row, s in zip(placed, scored, strict=True):
        row[-1:] += s.truncation_penalty
    rewards = step_rewards(
        pad_rows(placed),
        torch.tensor([s.outcome_reward for s in scored]),
        old,
        ref,
        mask,
        span_coef=objective.span_coef,
        outcome_coef=objective.outcome_rewards,
        kl_coef=0.0 if objective.kl_in_loss else kl_coef,
    )
    if objective.uses_critic:
        values = pad_rows([t.values for t in stats])
        advantages, returns = gae(rewards, values, mask, objective.gamma, objective.lam)
    else:
        group_of = {s.rollout.prompt_id: i for i, s in enumerate(scored)}  # a number for each prompt
        groups = torch.tensor([group_of[s.rollout.prompt_id] for s in scored])
        normalise = objective.advantages == "group_normalised"
        advantages, returns = group_advantages(rewards, mask, groups, objective.gamma, normalise=normalise)
    advantages = whiten(advantages, mask, objective.whiten)
    samples = []
    for row, (s, t, logprobs) in enumerate(zip(scored, stats, teacher or [None] * len(scored), strict=True)):
        end = len(s.rollout.response_ids)
        blended, weights = _blend_teacher(advantages[row, :end].numpy(), s, t, objective, logprobs)
        samples.append(
            TrainSample(
                prompt_ids=s.rollout.prompt_ids,
                response_ids=s.rollout.response_ids,
                weights=weights,
                advantages=blended,
                returns=returns[row, :end].numpy(),
                values=t.values,
                old_logprobs=t.old_logprobs,
                rollout_logprobs=s.rollout.rollout_logprobs,
                ref_logprobs=t.ref_logprobs,
            )
        )
    return samples


def _blend_teacher(
    advantages: np.ndarray,
    scored: ScoredRollout,
    stats: TokenStats,
    objective: ObjectiveConfig,
    teacher: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and loss weights of one response, [R] each, blended with the teacher's if there is one."""
    share = 1 if objective.loss_aggregation == "token" else 1 / max(1, len(advantages))
    rule, weights = objective.teacher, np.full(len(advantages), share, np.float32)
    if rule is None:
        return advantages, weights
    if teacher is None:
        return (1 - rule.weight) * advantages, weights * np.float32(rule.weight < 1)
    where = np.ones_like(scored.deltas) if rule.where == "all" else scored.deltas != 0
    return distillation_advantages(advantages, teacher, stats.old_logprobs, where, rule.weight), weights


def make_token_columns(samples: Sequence[TrainSample], stats: Sequence[TokenStats]) -> dict[str, list[np.ndarray]]:
    """Return the per-token numbers [R] for samples.jsonl: advantages, and probability ratios of learner to engine.

    The ratios are those before the update, clipped to exp(+-MAX_LOG_RATIO).
    """
    log_ratios = [t.old_logprobs - s.rollout_logprobs for s, t in zip(samples, stats, strict=True)]
    ratios = [np.exp(np.clip(row, -MAX_LOG_RATIO, MAX_LOG_RATIO)) for row in log_ratios]
    return {"token_advantages": [s.advantages for s in samples], "token_ratios": ratios}


def step_kl(stats: Sequence[TokenStats]) -> float:
    """Return the KL to the reference for the KL controller, nats per sequence."""
    mask = pad_rows([np.ones_like(t.old_logprobs) for t in stats])
    return sequence_kl(pad_rows([t.old_logprobs for t in stats]), pad_rows([t.ref_logprobs for t in stats]), mask)


def step_metrics(
    pairs: Sequence[tuple[Prompt, Rollout, SpanFeedback]],
    scored: Sequence[ScoredRollout],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
    *,
    kl: float,
    kl_coef: float,
) -> dict[str, float]:
    """Return the driver's metrics of a step, see `t2g.runs.metrics`. Shares are of tokens or of samples."""
    deltas, rewards = (np.concatenate([getattr(s, name) for s in scored]) for name in ("deltas", "rewards"))
    gaps = np.concatenate([t.old_logprobs - s.rollout.rollout_logprobs for s, t in zip(scored, stats, strict=True)])
    quotes = sum(f.num_quotes for _, _, f in pairs)
    sources = [f.source for _, _, f in pairs]
    shares = {f"tokens/{label}_share": share for label, share in compute_label_shares(deltas).items()}
    shares |= {f"feedback/source/{name}": sources.count(name) / len(sources) for name in sorted(set(sources))}
    modes = [f.execution["mode"] for _, _, f in pairs if "mode" in f.execution]
    shares |= {f"sandbox/{mode}_share": modes.count(mode) / len(modes) for mode in sorted(set(modes))}
    if objective.outcome_rewards:
        shares["reward/outcome_mean"] = float(np.mean([s.outcome_reward for s in scored]))
    return shares | {
        "reward/token_mean": float(rewards.mean()),
        "reward/response_mean": float(np.mean([s.rewards.sum() for s in scored])),
        "policy/kl": kl,
        "policy/kl_coef": kl_coef,
        "policy/entropy": float(np.concatenate([t.entropy for t in stats]).mean()),
        "response/length_mean": float(np.mean([len(r.response_ids) for _, r, _ in pairs])),
        TRUNCATED_SHARE: float(np.mean([r.is_truncated for _, r, _ in pairs])),
        "gap/logprob_mean": float(np.abs(gaps).mean()),
        "gap/p95": float(np.quantile(np.abs(gaps), 0.95)),
        "feedback/failed_share": 1 - len(scored) / len(pairs),
        "feedback/located_rate": sum(f.num_located for _, _, f in pairs) / quotes if quotes else 1.0,
    }


def fault_recall(task: Task, pairs: Sequence[tuple[Prompt, Rollout, SpanFeedback]]) -> dict[str, float]:
    """Return how well the feedback finds the faults that the task knows.

    Returns:
        For each fault class the share that overlaps a poor span; `feedback/faults_praised` is the share of all faults
        that overlaps a good span, which is rewarded instead of penalised.
    """
    recalled: dict[str, list[bool]] = {}
    praised = []
    for prompt, rollout, feedback in pairs:
        for kind, start, end in task.faults(prompt, rollout.response_text) if feedback.usable else ():
            labels = {span.label for span in feedback.spans if span.start < end and start < span.end}
            recalled.setdefault(f"{RECALL}{kind}", []).append(-1 in labels)
            praised.append(1 in labels)
    shares = {name: float(np.mean(hits)) for name, hits in sorted(recalled.items())}
    return shares | ({"feedback/faults_praised": float(np.mean(praised))} if praised else {})


def teacher_contexts(scored: Sequence[ScoredRollout], *, sibling: bool) -> list[list[str]]:
    """Return the contexts that the teacher may read about each response, the longest first.

    The last context is the critique. With `sibling`, the first one adds the response to the same prompt with the
    highest reward, if its reward is higher (SDPO, arXiv 2601.20802).
    """
    best: dict[str, ScoredRollout] = {}
    for s in sorted(scored, key=lambda s: -s.rewards.sum()):  # a stable sort: the first of equal rewards counts
        best.setdefault(s.rollout.prompt_id, s)
    contexts = []
    for s in scored:
        critique, better = s.feedback.critique.strip(), best[s.rollout.prompt_id]
        contexts.append([critique] if critique else [])
        if sibling and better.rewards.sum() > s.rewards.sum():
            contexts[-1].insert(0, f"{critique}\nBetter: {better.rollout.response_text}".lstrip())
    return contexts


def teacher_metrics(teacher: Sequence[np.ndarray | None], stats: Sequence[TokenStats]) -> dict[str, float]:
    """Return the share of a step with a teacher, and the teacher's distance from the policy."""
    gaps = [row - t.old_logprobs for row, t in zip(teacher, stats, strict=False) if row is not None]
    if not gaps:
        return {}
    gap = float(np.abs(np.concatenate(gaps)).mean())
    return {"teacher/share": len(gaps) / len(stats), "teacher/gap_mean": gap}


def sync_metrics(result: WeightSyncResult) -> dict[str, float]:
    """Return the metrics of a weight sync."""
    return {f"sync/{stage}_s": seconds for stage, seconds in result.stages.items()} | {
        "time/sync_s": result.seconds,
        "sync/bytes": float(result.bytes),
        "sync/probe_gap": result.probe_gap,
        "sync/calls": float(result.num_calls),
        "sync/missed": float(len(result.missed)),
    }
