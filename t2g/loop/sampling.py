"""What is asked of rollout engines and feedback source, the same for PPO and for the baselines it is compared with.

The responses of a training step with their feedback, and the scores of held-out responses. Everything random is a
function of (run.seed, step), so that two methods see the same prompts, and the same samples of the same weights.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from t2g.concurrency import gather_all
from t2g.config import PolicyEvaluationJob, PolicyJob
from t2g.errors import RunStopped, UserError
from t2g.feedback.sources.noise import NoisyFeedback
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.steps import sampling_seed
from t2g.runs.log import RunLog
from t2g.sandbox import SandboxConfig
from t2g.tasks.base import Task
from t2g.types import Prompt, Rollout, SpanFeedback

JudgedResponse = tuple[Prompt, Rollout, SpanFeedback]


@dataclass(frozen=True, kw_only=True)
class JudgedStep:
    """One step's samples before the learner has seen them."""

    pairs: tuple[JudgedResponse, ...]
    generate_s: float  # waited for the last response
    feedback_s: float  # from then for the last critique: scoring overlaps with sampling
    unsampled: Mapping[str, str] = field(default_factory=dict)  # prompts without a response, and why: by prompt_id
    num_unsampled: int = 0  # responses that they would have had


def make_sampling(config: PolicyJob | PolicyEvaluationJob, split: str, step: int, *, num_samples: int) -> Sampling:
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


def select_usable(judged: JudgedStep, config: PolicyJob, *, step: int, source: str) -> list[JudgedResponse]:
    """Those whose feedback can be used. RunStopped when more than `feedback.max_failed_share` of the step is lost."""
    kept = [(p, r, f) for p, r, f in judged.pairs if f.usable]
    num_asked = len(judged.pairs) + judged.num_unsampled
    lost_share = 1 - len(kept) / num_asked
    if lost_share > config.feedback.max_failed_share or not kept:
        counts = {s: sum(f.status == s for _, _, f in judged.pairs) for s in ("failed", "unparsable")}
        unsampled = f"{judged.num_unsampled} not sampled, " if judged.unsampled else ""
        raise RunStopped(
            f"step {step}: {lost_share:.0%} of {num_asked} samples have no usable feedback "
            f"({unsampled}{counts['failed']} failed, {counts['unparsable']} unparsable) from {source}; "
            f"feedback.max_failed_share allows {config.feedback.max_failed_share:.0%}"
        )
    return kept


def make_dropped_records(judged: JudgedStep) -> list[dict[str, Any]]:
    """What of a step is not trained on, and why: the lines of dropped.jsonl. No sample_index: a whole prompt."""
    prompts = [{"prompt_id": i, "sample_index": None, "reason": why} for i, why in judged.unsampled.items()]
    return prompts + [
        {
            "prompt_id": r.prompt_id,
            "sample_index": r.sample_index,
            "reason": f"feedback {f.status}" + (f": {f.reason}" if f.reason else ""),
        }
        for _, r, f in judged.pairs
        if not f.usable
    ]


async def measure(
    task: Task, prompt: Prompt, rollout: Rollout, sandbox: SandboxConfig, turn: asyncio.Semaphore
) -> dict[str, float]:
    """Return the task's own metrics of a response, `score_name` among them. In a thread: a task may run programs.

    Raises:
        UserError: `Task.can_measure` accepted the prompt, and `Task.measure` does not measure the response.
    """
    async with turn:
        metrics = await asyncio.to_thread(task.measure, prompt, rollout.response_text, sandbox=sandbox)
    if not metrics or task.score_name not in metrics:
        raise UserError(
            f"task {task.name}: measure gives no {task.score_name} for prompt {prompt.prompt_id}, and can_measure says "
            "that it does; correct one of the two methods"
        )
    return metrics


async def sample_held_out(
    config: PolicyJob, prompts: Sequence[Prompt], rollouts: RolloutSource
) -> list[tuple[Prompt, Rollout]]:
    """Responses to the held-out prompts, with the same seeds at every evaluation and in every arm."""
    sampling = make_sampling(config, "eval", 0, num_samples=config.eval.samples_per_prompt)
    groups = await gather_all(rollouts.sample(prompt, sampling) for prompt in prompts)
    return [(p, r) for p, group in zip(prompts, groups, strict=True) for r in group]


async def compute_held_out_metrics(
    config: PolicyJob,
    task: Task,
    pairs: Sequence[tuple[Prompt, Rollout]],
    feedback: FeedbackSource,
    log: RunLog,
    *,
    step: int,
) -> dict[str, float]:
    """Means over held-out responses: `eval/score` is the task's own measure.

    A task without one is scored by the feedback: good less poor spans by their number, -1 to 1 and 0 where there is
    none. A rate and no count, which would grow with the response. The first ones go into samples.jsonl with theirs.
    """
    turn = asyncio.Semaphore(config.feedback.sandbox.max_concurrent)
    measurable = pairs if all(task.can_measure(prompt) for prompt, _ in pairs) else ()
    rows = await gather_all(measure(task, *pair, config.feedback.sandbox, turn) for pair in measurable)
    first = pairs[: config.log.num_samples]  # of the same prompts each time: the report's before and after
    asked = first if rows else pairs
    said = await gather_all(feedback.judge(p, r.response_text) for p, r in asked)
    log.write_samples(step, "eval", [(*pair, judged) for pair, judged in zip(first, said, strict=False)])
    metrics = {"eval/length_mean": float(np.mean([len(r.response_ids) for _, r in pairs]))}
    if rows:
        metrics |= {f"eval/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        return metrics | {"eval/score": metrics[f"eval/{task.score_name}"]}
    rules, kept = config.objective.rewards, [f for f in said if f.usable]
    values = [[rules.good if s.label > 0 else rules.poor[s.severity - 1] for s in f.spans] for f in kept]
    shares = [sum(row) / sum(map(abs, row)) if any(row) else 0.0 for row in values]
    score = float(np.mean(shares)) if shares else float("-inf")
    return metrics | {"eval/score": score, "eval/failed_share": 1 - len(kept) / len(said)}
