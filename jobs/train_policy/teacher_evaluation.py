"""Whether the teacher of objective.teacher is better than the policy: measured before anything is trained.

The policy responds to held-out prompts and the feedback source criticises the responses. The teacher is the same
weights with the critique of their own response in the prompt; the control reads that of another prompt's response. Both
score the tokens of the policy, since a teacher that follows critiques makes poor ones less likely, and both respond.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from actors.engines.rollout import RolloutFleet
from jobs.common.fleets import wait_for_engines
from jobs.train_policy.policy_data import PolicyData
from t2g.concurrency import gather_all, gather_unless_stopped
from t2g.config import PolicyJob
from t2g.data.prompts import encode_teacher_prompt
from t2g.errors import RunStopped
from t2g.feedback.outcome_rewards import measure
from t2g.interfaces import FeedbackSource
from t2g.loop.sampling import make_sampling
from t2g.loop.scoring import score_response
from t2g.loop.teacher import split_teacher_gap, teacher_contrast, teacher_critiques
from t2g.study.paired import Draws, compare, make_mean, with_interval
from t2g.study.targeting import sample_and_judge
from t2g.types import JudgedResponse, Prompt

TEACHER_FILE = "teacher.json"
MIN_PROMPTS = 2  # an interval needs two
TEACHERS = ("teacher", "shuffled")
Gaps = Mapping[str, np.ndarray]  # gaps of a response, see `split_teacher_gap`


class TeacherPrompts(NamedTuple):
    """A judged response, and its prompt with the critique that the teacher and the control read."""

    judged: JudgedResponse
    teacher_prompt: Prompt
    control_prompt: Prompt


class TeacherMeasures(NamedTuple):
    """The gaps of teacher and control, and the scores of policy, teacher and control; no scores without a measure."""

    gaps: list[Gaps]
    scores: list[float]


def evaluate_teacher(
    config: PolicyJob,
    data: PolicyData,
    rollouts: RolloutFleet,
    source: FeedbackSource,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Return the content of teacher.json: log-ratios and mean scores with 95 % intervals over prompts, and `advice`.

    A smoke run measures as many prompts as a step has responses. Without a measure of the task there are no scores.

    Args:
        rollouts: Engines with the weights of the start.

    Raises:
        RunStopped: Fewer than two prompts have both critiques.
        Stopped: `should_stop()` returned True.
    """
    wait_for_engines(source.fleet, rollouts, should_stop=should_stop)
    rollout = config.rollout
    prompts = data.eval_prompts or data.prompts[: config.eval.num_prompts]
    if config.run.smoke:
        prompts = prompts[: rollout.prompts_per_step * rollout.samples_per_prompt]
    measuring = measure_teacher(config, data, prompts, rollouts, source)
    (result,) = asyncio.run(gather_unless_stopped([measuring], should_stop))
    return result


async def measure_teacher(
    config: PolicyJob, data: PolicyData, prompts: Sequence[Prompt], rollouts: RolloutFleet, source: FeedbackSource
) -> dict[str, Any]:
    """Return what `evaluate_teacher` returns, of these prompts."""
    task = data.task
    max_tokens = config.rollout.max_prompt_tokens
    is_measured = bool(task.score_name) and all(map(task.can_measure, prompts))
    sampling = make_sampling(config, "eval", 0, num_samples=1)
    judged = await sample_and_judge(prompts, rollouts, source, sampling)

    compared = add_critiques(judged, data, max_tokens=max_tokens)
    if len(compared) < MIN_PROMPTS:
        raise RunStopped(
            f"{len(compared)} of {len(prompts)} prompts have two critiques, their own and another prompt's, that fit "
            f"into a prompt of {max_tokens} tokens, and a comparison needs {MIN_PROMPTS} such prompts; add prompts, or "
            "raise rollout.max_model_len"
        )

    sandbox = config.feedback.sandbox
    limit = asyncio.Semaphore(sandbox.max_concurrent)

    async def score(row: TeacherPrompts) -> list[float]:
        """Return the scores of policy, teacher and control."""
        prompts_with_critique = (row.teacher_prompt, row.control_prompt)
        sampled = await gather_all(rollouts.sample(prompt, sampling) for prompt in prompts_with_critique)
        responses = [row.judged.rollout, *(rollout for (rollout,) in sampled)]
        measuring = (measure(task, row.judged.prompt, rollout.answer, sandbox, limit) for rollout in responses)
        return [measures[task.score_name] for measures in await gather_all(measuring)]

    async def compare_teachers(row: TeacherPrompts) -> TeacherMeasures:
        gaps = await measure_gaps(config, row, data, rollouts)
        return TeacherMeasures(gaps, await score(row) if is_measured else [])

    measured = await gather_all(map(compare_teachers, compared))
    score_name = task.score_name if is_measured else None
    summary = summarize(measured, score_name=score_name)
    return summary | {"advice": advise(summary)}


def summarize(measured: Sequence[TeacherMeasures], *, score_name: str | None) -> dict[str, Any]:
    """Return the scores, if there are any, the gaps and the number of prompts."""
    summary: dict[str, Any] = {}
    if score_name is not None:
        scores = np.array([response.scores for response in measured])
        summary = summarize_scores(*scores.T, name=score_name)
    gaps: dict[str, Any] = {}
    for index, name in enumerate(TEACHERS):
        teacher_gaps = [response.gaps[index] for response in measured]
        gaps[name] = summarize_gaps(teacher_gaps)
    return summary | {"gaps": gaps, "prompts": len(measured)}


def add_critiques(judged: Sequence[JudgedResponse], data: PolicyData, *, max_tokens: int) -> list[TeacherPrompts]:
    """Return the responses that have both critiques, their own and another prompt's, in prompts of `max_tokens`."""

    def add_critique(prompt: Prompt, critique: str) -> Prompt | None:
        if not critique:
            return None
        ids = encode_teacher_prompt(data.task, prompt, critique, data.tokenizer, max_tokens)
        if ids is None:
            return None
        # The seed depends on the prompt_id: the teacher's response needs another one than the policy's.
        return replace(prompt, prompt_id=f"{prompt.prompt_id}/teacher", prompt_ids=ids)

    prompt_ids = [response.prompt.prompt_id for response in judged]
    feedbacks = [response.feedback for response in judged]
    critiques = [feedback.critique if feedback.usable else "" for feedback in feedbacks]
    own_critiques = teacher_critiques(prompt_ids, critiques, shuffled=False)
    other_critiques = teacher_critiques(prompt_ids, critiques, shuffled=True)

    compared: list[TeacherPrompts] = []
    for response, own_critique, other_critique in zip(judged, own_critiques, other_critiques, strict=True):
        teacher = add_critique(response.prompt, own_critique)
        control = add_critique(response.prompt, other_critique)
        if teacher is not None and control is not None:
            compared.append(TeacherPrompts(response, teacher, control))
    return compared


async def measure_gaps(config: PolicyJob, row: TeacherPrompts, data: PolicyData, rollouts: RolloutFleet) -> list[Gaps]:
    """Return the log-probabilities of teacher and control less the policy's, at temperature 1, token by token."""
    prompt, response, feedback = row.judged
    prompts = (prompt, row.teacher_prompt, row.control_prompt)
    requests = (rollouts.compute_logprobs(read_prompt, response.response_ids) for read_prompt in prompts)
    policy, *others = await gather_all(requests)
    scored = score_response(response, feedback, config=config, task=data.task, tokenizer=data.tokenizer)
    span_values = scored.span_values[: len(policy)]  # as in training
    return [split_teacher_gap(logprobs - policy, span_values) for logprobs in others]


def summarize_gaps(responses: Sequence[Gaps]) -> dict[str, dict[str, float]]:
    """Return the mean over tokens of each kind that occurs, nats, with its interval over responses."""
    draws = Draws(len(responses), seed=0)
    intervals: dict[str, dict[str, float]] = {}
    for kind in responses[0]:
        sums = [(gaps[kind].sum(), gaps[kind].size) for gaps in responses]
        columns = np.array(sums, float)
        drawn = mean_over_tokens(draws.sum_resamples(columns))
        value = mean_over_tokens(columns.sum(0))
        if columns[:, 1].any():
            intervals[kind] = with_interval(drawn, value, len(responses))
    return intervals


def mean_over_tokens(columns: np.ndarray) -> np.ndarray:
    """Return the mean of the columns [..., 2], which have the sum of the values and the number of tokens."""
    num_tokens = np.maximum(columns[..., 1], 1)
    return columns[..., 0] / num_tokens


def summarize_scores(policy: np.ndarray, teacher: np.ndarray, control: np.ndarray, *, name: str) -> dict[str, Any]:
    """Return mean scores, and differences with intervals. All arrays are [N]."""
    draws = Draws(len(policy), seed=0)
    compute_mean = make_mean(len(policy))

    def subtract(scores: np.ndarray, others: np.ndarray) -> dict[str, float]:
        interval = compare(scores[:, None], others[:, None], compute_mean, draws)
        return {key: interval[key] for key in ("value", "low", "high")}

    return {
        "measure": name,
        "policy": float(policy.mean()),
        "teacher": float(teacher.mean()),
        "shuffled": float(control.mean()),
        "teacher_less_policy": subtract(teacher, policy),
        "teacher_less_shuffled": subtract(teacher, control),
    }


def advise(result: Mapping[str, Any]) -> str:
    """Return what the measurement tells the user, warnings first."""
    gaps = {kind: interval["value"] for kind, interval in result["gaps"]["teacher"].items()}
    contrast = teacher_contrast(gaps).get("contrast")
    has_scores = "measure" in result
    warnings: list[str] = []
    if has_scores and result["teacher_less_policy"]["high"] <= 0:
        warnings.append("it is not better than the policy")
    if contrast is not None and contrast < 0:
        warnings.append(f"it makes poor tokens likelier, or good ones less likely than poor ones ({contrast:.2f} nats)")
    if warnings:
        return f"the teacher will not help: {', and '.join(warnings)}; train without objective.teacher"
    unclear = "{prompts} prompts do not tell whether the teacher is better than {}; measure more prompts"
    if has_scores and result["teacher_less_policy"]["low"] <= 0:
        return unclear.format("the policy", **result)
    if has_scores and result["teacher_less_shuffled"]["high"] <= 0:
        return "another prompt's critique helps as much: the gain is not what the critiques say"
    if has_scores and result["teacher_less_shuffled"]["low"] <= 0:
        return unclear.format("the control, which reads another prompt's critique", **result)
    if contrast is None and not has_scores:
        return "the task has no measure and the critiques have no poor spans: nothing tells whether the teacher helps"
    return "the teacher follows the critiques: objective.teacher can help"


def format_result(result: Mapping[str, Any]) -> str:
    """Return the lines that describe the result to a user."""

    def line(name: str, interval: Mapping[str, float]) -> str:
        return f"  {name:<22} {interval['value']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]"

    lines: list[str] = []
    if "measure" in result:
        lines.append(f"{result['measure']} on {result['prompts']} prompts")
        lines += [f"  {name:<22} {result[name]:.3f}" for name in ("policy", *TEACHERS)]
        lines += [line(name, result[name]) for name in ("teacher_less_policy", "teacher_less_shuffled")]
    lines.append("log-probability less the policy's, nats, of the policy's tokens")
    for name, kinds in result["gaps"].items():
        lines += [line(f"{name}, {kind}", interval) for kind, interval in kinds.items()]
    return "\n".join([*lines, result["advice"]])
