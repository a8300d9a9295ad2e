"""Requests to rollout engines and feedback sources, shared by PPO and the baselines it is compared with.

They cover the judged responses of a training step and the scores of held-out responses. All randomness is a function
of (run.seed, step): two methods see the same prompts, and the same samples if their weights are equal.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from t2g import metrics as m
from t2g.concurrency import gather_all
from t2g.config import PolicyEvaluationJob, PolicyJob
from t2g.errors import RunStopped
from t2g.feedback.conversations import NEXT_MESSAGE
from t2g.feedback.outcome_rewards import list_history, measure
from t2g.feedback.parse import make_failed_feedback
from t2g.feedback.rewards import score_spans
from t2g.feedback.sources.combined import combine_feedback
from t2g.feedback.sources.noise import NoisyFeedback
from t2g.feedback.tool_spans import TOOL_RESULTS, dump_results
from t2g.interfaces import FeedbackSource, RolloutSource, Sampling
from t2g.loop.resampling import FilteredGroups
from t2g.loop.steps import make_sampling_seed
from t2g.loop.tool_metrics import tool_metrics
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
    filtered: FilteredGroups = field(default_factory=FilteredGroups)  # judged as well, and not trained on

    @property
    def all_responses(self) -> tuple[JudgedResponse, ...]:
        """Return all responses that were sampled for the step."""
        return self.responses + self.filtered.responses

    @property
    def num_sampled_tokens(self) -> int:
        return sum(int(response.rollout.policy_mask.sum()) for response in self.all_responses)


def make_sampling(config: PolicyJob | PolicyEvaluationJob, split: str, step: int, *, num_samples: int) -> Sampling:
    """Return the sampling parameters of a step."""
    rollout = config.rollout
    return Sampling(
        num_samples=num_samples,
        temperature=rollout.temperature,
        max_new_tokens=rollout.max_new_tokens,
        seed=make_sampling_seed(config.run.seed, split, step),
    )


def make_training_feedback(config: PolicyJob, feedback: FeedbackSource) -> FeedbackSource:
    """Return the source for training: with the noise of a study. Evaluation uses the source without noise."""
    noise = config.feedback.noise
    return feedback if noise is None else NoisyFeedback(feedback, noise, seed=config.run.seed)


def select_usable(judged: JudgedStep, config: PolicyJob, *, step: int) -> list[JudgedResponse]:
    """Return the responses to train on: those with usable feedback.

    Raises:
        RunStopped: More than `feedback.max_failed_share` of the step has no usable feedback. The share is of all
            samples, those of replaced and further prompts included.
    """
    usable = [response for response in judged.responses if response.feedback.usable]
    num_requested = len(judged.all_responses) + judged.num_unsampled
    num_usable = sum(response.feedback.usable for response in judged.all_responses)
    num_lost = num_requested - num_usable
    lost_share = num_lost / num_requested  # 1 - num_usable / num_requested would round 1 of 20 to more than .05
    max_share = config.feedback.max_failed_share
    if usable and lost_share <= max_share:
        return usable

    counts: Counter[str] = Counter()
    first_reason = next(iter(judged.unsampled.values()), "")
    for response in judged.all_responses:
        feedback = response.feedback
        counts[feedback.status] += 1
        if not feedback.usable:
            first_reason = first_reason or feedback.reason
    num_failed = counts["failed"]
    num_unparsable = counts["unparsable"]
    reason = f"; the first: {first_reason}" if first_reason else ""
    unsampled = f"{judged.num_unsampled} not sampled, " if judged.unsampled else ""
    limit = f"feedback.max_failed_share allows {max_share:g}" if lost_share > max_share else "none is left to train on"
    raise RunStopped(
        f"step {step}: {num_lost} of {num_requested} samples have no usable feedback "
        f"({unsampled}{num_failed} failed, {num_unparsable} unparsable) from feedback.source="
        f"{config.feedback.describe()}; {limit}{reason}"
    )


def make_dropped_records(judged: JudgedStep) -> list[dict[str, Any]]:
    """Return the lines of dropped.jsonl: responses that are not trained on, and why. sample_index None: all of them."""
    records: list[dict[str, Any]] = []
    for prompt_id, reason in judged.unsampled.items():
        records.append({"prompt_id": prompt_id, "sample_index": None, "reason": reason})
    for response in judged.all_responses:
        feedback = response.feedback
        if feedback.usable:
            continue
        detail = f": {feedback.reason}" if feedback.reason else ""
        reason = f"feedback {feedback.status}{detail}"
        rollout = response.rollout
        records.append({"prompt_id": rollout.prompt_id, "sample_index": rollout.sample_index, "reason": reason})
    for prompt_id, reason in judged.filtered.reasons.items():
        records.append({"prompt_id": prompt_id, "sample_index": None, "reason": reason})
    return records


async def judge_answer(feedback: FeedbackSource, prompt: Prompt, rollout: Rollout) -> SpanFeedback:
    """Return the feedback on the answer of a response, with the spans in characters of `response_text`.

    The source sees the answer alone, or the transcript of a conversation without its thinking. A response without any
    answer, which ended within its thinking, is not judged: it has no spans.
    """
    if rollout.failure:
        return make_failed_feedback("failed", source=feedback.name, version="", reason=rollout.failure)
    if rollout.environment_turns and feedback.judges_turns:
        judged = await _judge_turns(feedback, prompt, rollout)
        return replace(judged, metrics=rollout.metrics | judged.metrics)
    if not rollout.has_answer:
        return SpanFeedback(critique="", spans=(), status="empty", source=feedback.name, version="", reason=NO_ANSWER)
    if not rollout.environment_turns:
        return shift_spans(await feedback.judge(prompt, rollout.answer), rollout.answer_start or 0)
    positions = judged_characters(rollout)
    transcript = "".join(rollout.response_text[position] for position in positions)
    judged = await feedback.judge(prompt, transcript)
    spans = []
    for span in judged.spans:
        start = int(positions[span.start])
        end = int(positions[span.end - 1]) + 1
        spans.append(replace(span, start=start, end=end))
    return replace(judged, spans=tuple(spans), metrics=rollout.metrics | judged.metrics)


async def _judge_turns(feedback: FeedbackSource, prompt: Prompt, rollout: Rollout) -> SpanFeedback:
    """Return the feedback on the turns of a conversation, each with the reply to it as its next message.

    The turns are criteria of the feedback: turn_1, turn_2.
    """

    async def judge(turn: PolicyTurn, history: Sequence[Message]) -> SpanFeedback:
        if not turn.reply.strip():  # the environment is done, without a word, or there was no answer
            reason = NO_ANSWER if turn.answer_start is None else ""
            return SpanFeedback(critique="", spans=(), status="empty", source=feedback.name, version="", reason=reason)
        payload = prompt.payload | {NEXT_MESSAGE: turn.reply, TOOL_RESULTS: dump_results(turn.results)}
        turn_prompt = replace(prompt, messages=(*prompt.chat, *history), payload=payload)
        judged = await feedback.judge(turn_prompt, rollout.answer_of(turn))
        return shift_spans(judged, turn.answer_start or 0)

    works = []
    for index, turn in enumerate(rollout.environment_turns):
        history = list_history(rollout, index)
        works.append(judge(turn, history))
    judgements = await gather_all(works)
    by_turn = {f"turn_{number}": judgement for number, judgement in enumerate(judgements, start=1)}
    return combine_feedback(by_turn, required=by_turn, names_single=True)


def shift_spans(feedback: SpanFeedback, offset: int) -> SpanFeedback:
    """Return the feedback with its spans `offset` characters later; `critique_range` counts the critique and stays."""
    if not offset:
        return feedback
    spans = []
    for span in feedback.spans:
        start = span.start + offset
        end = span.end + offset
        spans.append(replace(span, start=start, end=end))
    return replace(feedback, spans=tuple(spans))


async def sample_held_out(
    config: PolicyJob, prompts: Sequence[Prompt], rollouts: RolloutSource
) -> list[tuple[Prompt, Rollout]]:
    """Return responses to the held-out prompts; seeds are the same in every evaluation and for every method."""
    sampling = make_sampling(config, "eval", 0, num_samples=config.eval.samples_per_prompt)
    groups = await gather_all(rollouts.sample(prompt, sampling) for prompt in prompts)
    pairs = []
    for prompt, group in zip(prompts, groups, strict=True):
        pairs += [(prompt, rollout) for rollout in group]
    return pairs


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

    Without such a measure the feedback gives the score of a response: the rewards of its spans over the sum of their
    absolute values (`score_spans`), 0 without a reward. A conversation whose environment failed has no measure. The
    first responses are written to samples.jsonl with their feedback.
    """
    measured = await _measure_held_out(config, task, pairs)
    logged = pairs[: config.log.num_samples]  # the same prompts each time: the report compares before and after
    judged_pairs = logged if measured else pairs
    feedbacks = await gather_all(judge_answer(feedback, prompt, rollout) for prompt, rollout in judged_pairs)
    samples = []
    for (prompt, rollout), judgement in zip(logged, feedbacks, strict=False):
        samples.append(JudgedResponse(prompt, rollout, judgement))
    log.write_samples(step, "eval", samples)

    lengths = [rollout.policy_mask.sum() for _, rollout in pairs]
    metrics = {m.HELD_OUT_LENGTH: float(np.mean(lengths))}
    calls = tool_metrics([rollout for _, rollout in pairs])
    metrics |= {m.EVAL + name.removeprefix(m.TURNS_PREFIX): share for name, share in calls.items()}
    if measured:
        return metrics | _average_measures(config, task, measured, num_responses=len(pairs))

    usable = [judgement for judgement in feedbacks if judgement.usable]
    score = partial(score_spans, rule=config.objective.rewards, weights=config.feedback.weights)
    scores = [score(judgement.spans) for judgement in usable]
    metrics[m.HELD_OUT_SCORE] = float(np.mean(scores)) if scores else float("-inf")
    metrics[m.HELD_OUT_FAILED] = 1 - len(usable) / len(feedbacks)
    return metrics


class _ResponseMeasures(NamedTuple):
    """The task's measures of one held-out response."""

    prompt_id: str
    by_turn: list[dict[str, float]]  # after each turn

    @property
    def final(self) -> dict[str, float]:
        return self.by_turn[-1]


async def _measure_held_out(
    config: PolicyJob, task: Task, pairs: Sequence[tuple[Prompt, Rollout]]
) -> list[_ResponseMeasures]:
    """Return the measures of the responses whose environment did not fail; [] if the task cannot measure a prompt."""
    if not all(task.can_measure(prompt) for prompt, _ in pairs):
        return []
    sandbox = config.feedback.sandbox
    limit = asyncio.Semaphore(sandbox.max_concurrent)

    async def measure_turns(prompt: Prompt, rollout: Rollout) -> _ResponseMeasures:
        answers = map(rollout.answer_of, rollout.turns)
        by_turn = await gather_all(measure(task, prompt, answer, sandbox, limit) for answer in answers)
        return _ResponseMeasures(prompt.prompt_id, by_turn)

    works = [measure_turns(prompt, rollout) for prompt, rollout in pairs if not rollout.failure]
    return await gather_all(works)


def _average_measures(
    config: PolicyJob, task: Task, measured: Sequence[_ResponseMeasures], *, num_responses: int
) -> dict[str, float]:
    """Return the means of the task's measures, and the standard error of its score over prompts."""
    score_name = task.score_name
    metrics: dict[str, float] = {}
    for name in measured[0].final:
        values = [response.final[name] for response in measured]
        metrics[m.EVAL + name] = float(np.mean(values))
    if config.environment:
        metrics[m.HELD_OUT_FAILED] = 1 - len(measured) / num_responses
        for number in range(1, config.rollout.max_turns):
            scores = []
            for response in measured:
                last_turn = response.by_turn[:number][-1]
                scores.append(last_turn[score_name])
            metrics[f"{m.EVAL}{score_name}_turn_{number}"] = float(np.mean(scores))

    scores_by_prompt: dict[str, list[float]] = {}
    for response in measured:
        scores_by_prompt.setdefault(response.prompt_id, []).append(response.final[score_name])
    prompt_means = [*map(np.mean, scores_by_prompt.values())]
    deviation = np.std(prompt_means, ddof=1) if len(prompt_means) > 1 else np.inf
    metrics[m.HELD_OUT_SCORE] = metrics[m.EVAL + score_name]
    metrics[m.HELD_OUT_ERROR] = float(deviation / np.sqrt(len(prompt_means)))
    return metrics
