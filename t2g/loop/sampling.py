"""Requests to rollout engines and feedback sources, shared by PPO and the baselines it is compared with.

They cover the judged responses of a training step and the scores of held-out responses. All randomness is a function
of (run.seed, step): two methods see the same prompts, and the same samples if their weights are equal.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from t2g.concurrency import gather_all
from t2g.config import PolicyEvaluationJob, PolicyJob
from t2g.errors import RunStopped
from t2g.feedback.conversations import NEXT_MESSAGE
from t2g.feedback.outcome_rewards import list_messages, measure
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.rewards import score_spans
from t2g.feedback.sources.combined import combine_feedback
from t2g.feedback.sources.noise import NoisyFeedback
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.steps import sampling_seed
from t2g.runs.log import RunLog
from t2g.tasks.base import Task
from t2g.text.thinking import NO_ANSWER
from t2g.text.tokenizer import Message
from t2g.text.transcript import judged_characters
from t2g.types import JudgedResponse, PolicyTurn, Prompt, Rollout, SpanFeedback


@dataclass(frozen=True, kw_only=True)
class JudgedStep:
    """One step's samples before the learner sees them."""

    responses: tuple[JudgedResponse, ...]
    generate_s: float  # wait for the last response
    feedback_s: float  # from then to the last feedback: feedback overlaps with sampling
    unsampled: Mapping[str, str] = field(default_factory=dict)  # prompt_id -> why the prompt has no response
    num_unsampled: int = 0  # responses that these prompts lack


def make_sampling(config: PolicyJob | PolicyEvaluationJob, split: str, step: int, *, num_samples: int) -> Sampling:
    """Return the sampling parameters of a step."""
    rollout = config.rollout
    return Sampling(
        num_samples=num_samples,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        seed=sampling_seed(config.run.seed, split, step),
    )


def training_feedback(config: PolicyJob, feedback: FeedbackSource) -> FeedbackSource:
    """Return the source for training: with the noise of a study. Evaluation uses the source without noise."""
    noise = config.feedback.noise
    return feedback if noise is None else NoisyFeedback(feedback, noise, seed=config.run.seed)


def select_usable(judged: JudgedStep, config: PolicyJob, *, step: int) -> list[JudgedResponse]:
    """Return the responses with usable feedback.

    Raises:
        RunStopped: More than `feedback.max_failed_share` of the step has no usable feedback.
    """
    usable = [response for response in judged.responses if response.feedback.usable]
    num_requested = len(judged.responses) + judged.num_unsampled
    lost_share = 1 - len(usable) / num_requested
    if lost_share > config.feedback.max_failed_share or not usable:
        feedbacks = [response.feedback for response in judged.responses]
        counts = Counter(feedback.status for feedback in feedbacks)
        reasons = [feedback.reason for feedback in feedbacks if feedback.reason and not feedback.usable]
        reason = f"; the first: {reasons[0]}" if reasons else ""
        unsampled = f"{judged.num_unsampled} not sampled, " if judged.unsampled else ""
        raise RunStopped(
            f"step {step}: {lost_share:.0%} of {num_requested} samples have no usable feedback "
            f"({unsampled}{counts['failed']} failed, {counts['unparsable']} unparsable) from feedback.source="
            f"{config.feedback.describe()}; "
            f"feedback.max_failed_share allows {config.feedback.max_failed_share:.0%}{reason}"
        )
    return usable


def make_dropped_records(judged: JudgedStep) -> list[dict[str, Any]]:
    """Return the lines of dropped.jsonl: responses that are not trained on, and why. sample_index None: all of them."""
    records: list[dict[str, Any]] = []
    for prompt_id, reason in judged.unsampled.items():
        records.append({"prompt_id": prompt_id, "sample_index": None, "reason": reason})
    for response in judged.responses:
        feedback = response.feedback
        if feedback.usable:
            continue
        detail = f": {feedback.reason}" if feedback.reason else ""
        reason = f"feedback {feedback.status}{detail}"
        rollout = response.rollout
        records.append({"prompt_id": rollout.prompt_id, "sample_index": rollout.sample_index, "reason": reason})
    return records


async def judge_answer(feedback: FeedbackSource, prompt: Prompt, rollout: Rollout) -> SpanFeedback:
    """Return the feedback on the answer of a response, with the spans in characters of `response_text`.

    The source sees the answer alone, or the transcript of a conversation without its thinking. A response without any
    answer, which ended within its thinking, is not judged: it has no spans.
    """
    if rollout.failure:
        return make_failed_feedback("failed", source=feedback.name, version="", reason=rollout.failure)
    if rollout.conversation and feedback.judges_turns:
        judged = await _judge_turns(feedback, prompt, rollout)
        return replace(judged, metrics=rollout.metrics | judged.metrics)
    if all(turn.answer_start is None for turn in rollout.turns):
        return SpanFeedback(critique="", spans=(), status="empty", source=feedback.name, version="", reason=NO_ANSWER)
    if not rollout.conversation:
        return shift_spans(await feedback.judge(prompt, rollout.answer), rollout.answer_start or 0)
    positions = judged_characters(rollout)
    judged = await feedback.judge(prompt, "".join(rollout.response_text[i] for i in positions))
    spans = (replace(s, start=int(positions[s.start]), end=int(positions[s.end - 1]) + 1) for s in judged.spans)
    return replace(judged, spans=tuple(spans), metrics=rollout.metrics | judged.metrics)


async def _judge_turns(feedback: FeedbackSource, prompt: Prompt, rollout: Rollout) -> SpanFeedback:
    """Return the feedback on the turns of a conversation, each with the reply to it as its next message.

    The turns are criteria of the feedback: turn_1, turn_2.
    """

    async def judge(turn: PolicyTurn, history: Sequence[Message]) -> SpanFeedback:
        if not turn.reply.strip():  # the environment is done, without a word, or there was no answer
            reason = NO_ANSWER if turn.answer_start is None else ""
            return SpanFeedback(critique="", spans=(), status="empty", source=feedback.name, version="", reason=reason)
        payload = prompt.payload | {NEXT_MESSAGE: turn.reply}
        judged = await feedback.judge(
            replace(prompt, messages=(*opening, *history), payload=payload), rollout.answer_of(turn)
        )
        return shift_spans(judged, turn.answer_start or 0)

    opening = prompt.messages or ({"role": "user", "content": prompt.prompt_text},)
    messages = list_messages(rollout)
    judgements = await gather_all(judge(turn, messages[: 2 * i]) for i, turn in enumerate(rollout.conversation))
    by_turn = {f"turn_{number}": judgement for number, judgement in enumerate(judgements, start=1)}
    return combine_feedback(by_turn, required=by_turn, names_single=True)


def shift_spans(feedback: SpanFeedback, offset: int) -> SpanFeedback:
    """Return the feedback with its spans `offset` characters later; `critique_range` counts the critique and stays."""
    spans = (replace(span, start=span.start + offset, end=span.end + offset) for span in feedback.spans)
    return replace(feedback, spans=tuple(spans)) if offset else feedback


async def sample_held_out(
    config: PolicyJob, prompts: Sequence[Prompt], rollouts: RolloutSource
) -> list[tuple[Prompt, Rollout]]:
    """Return responses to the held-out prompts; seeds are the same in every evaluation and for every method."""
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
    """Return means over held-out responses; `eval/score` is the task's own measure.

    Without such a measure the feedback gives the score of a response: good less poor spans by their number, -1 to 1,
    and 0 without a span. It is a rate, because a count would grow with the length of the response. A conversation
    whose environment failed has no measure. The first responses are written to samples.jsonl with their feedback.
    """
    limit = asyncio.Semaphore(config.feedback.sandbox.max_concurrent)
    measurable = [pair for pair in pairs if not pair[1].failure]
    if not all(task.can_measure(prompt) for prompt, _ in pairs):
        measurable = []

    async def measure_turns(prompt: Prompt, rollout: Rollout) -> list[dict[str, float]]:
        answers = map(rollout.answer_of, rollout.turns)
        return await gather_all(measure(task, prompt, answer, config.feedback.sandbox, limit) for answer in answers)

    by_turn = await gather_all(measure_turns(*pair) for pair in measurable)
    rows = [turns[-1] for turns in by_turn]
    logged = pairs[: config.log.num_samples]  # the same prompts each time: the report compares before and after
    judged = await gather_all(judge_answer(feedback, p, r) for p, r in (logged if rows else pairs))
    samples = [JudgedResponse(*pair, feedback) for pair, feedback in zip(logged, judged, strict=False)]
    log.write_samples(step, "eval", samples)
    metrics = {"eval/length_mean": float(np.mean([r.policy_mask.sum() for _, r in pairs]))}
    if rows:
        metrics |= {f"eval/{name}": float(np.mean([row[name] for row in rows])) for name in rows[0]}
        if config.environment:
            metrics["eval/failed_share"] = 1 - len(rows) / len(pairs)
            for number in range(1, config.rollout.max_turns):
                after = [turns[:number][-1][task.score_name] for turns in by_turn]
                metrics[f"eval/{task.score_name}_turn_{number}"] = float(np.mean(after))
        scores: dict[str, list[float]] = {}
        for (prompt, _), row in zip(measurable, rows, strict=True):
            scores.setdefault(prompt.prompt_id, []).append(row[task.score_name])
        deviation = np.std([*map(np.mean, scores.values())], ddof=1) if len(scores) > 1 else np.inf
        error = float(deviation / np.sqrt(len(scores)))
        return metrics | {"eval/score": metrics[f"eval/{task.score_name}"], "eval/score_se": error}
    usable = [f for f in judged if f.usable]
    scores_of_spans = [score_spans(f.spans, config.objective.rewards, config.feedback.weights) for f in usable]
    score = float(np.mean(scores_of_spans)) if usable else float("-inf")
    return metrics | {"eval/score": score, "eval/failed_share": 1 - len(usable) / len(judged)}
