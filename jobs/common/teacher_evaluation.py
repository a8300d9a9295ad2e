"""Whether the teacher of objective.teacher is better than the policy: measured before anything is trained.

The policy responds to held-out prompts and the feedback source criticises the responses. The teacher is the same
weights with the critique of their own response in the prompt; the control reads that of another prompt's response. Both
score the tokens of the policy, since a teacher that follows critiques makes poor ones less likely, and both respond.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actors.engines.rollout import RolloutFleet
from jobs.common.fleets import wait_for_engines
from jobs.common.policy_runs import PolicyData
from t2g.concurrency import gather_all
from t2g.config import PolicyJob
from t2g.data.prompts import encode_teacher_prompt
from t2g.errors import RunStopped
from t2g.feedback import token_offsets, token_rewards
from t2g.interfaces import FeedbackSource
from t2g.loop.sampling import make_sampling, measure
from t2g.loop.steps import split_teacher_gap, teacher_contrast, teacher_critiques
from t2g.study.paired import Draws, compare, mean_of, with_interval
from t2g.study.targeting import sample_and_judge
from t2g.types import JudgedResponse, Prompt

TEACHER_FILE = "teacher.json"
MIN_PROMPTS = 2  # an interval needs two
TEACHERS = ("teacher", "shuffled")
Gaps = Mapping[str, np.ndarray]  # of a response, see `split_teacher_gap`


def evaluate_teacher(
    config: PolicyJob, data: PolicyData, rollouts: RolloutFleet, source: FeedbackSource
) -> dict[str, Any]:
    """Return the content of teacher.json: log-ratios and mean scores with 95 % intervals over prompts, and `advice`.

    A smoke run measures as many prompts as a step has responses. Without a measure of the task there are no scores.

    Args:
        rollouts: Engines with the weights of the start.

    Raises:
        RunStopped: Fewer than two prompts have both critiques.
    """
    wait_for_engines(source.fleet, rollouts)
    rollout = config.rollout
    limit = rollout.prompts_per_step * rollout.samples_per_prompt if config.run.smoke else None
    prompts = (data.eval_prompts or data.prompts[: config.eval.num_prompts])[:limit]
    return asyncio.run(measure_teacher(config, data, prompts, rollouts, source))


async def measure_teacher(
    config: PolicyJob, data: PolicyData, prompts: Sequence[Prompt], rollouts: RolloutFleet, source: FeedbackSource
) -> dict[str, Any]:
    """Return what `evaluate_teacher` returns, of these prompts."""
    task, sandbox, sampling = data.task, config.feedback.sandbox, make_sampling(config, "eval", 0, num_samples=1)
    limit, max_tokens = asyncio.Semaphore(sandbox.max_concurrent), config.rollout.max_prompt_tokens
    is_measured = bool(task.score_name) and all(map(task.can_measure, prompts))

    def add_critique(prompt: Prompt, critique: str) -> Prompt | None:
        ids = encode_teacher_prompt(task, prompt, critique, data.tokenizer, max_tokens) if critique else None
        # The seed depends on the prompt_id: the teacher's response needs another one than the policy's.
        return None if ids is None else replace(prompt, prompt_id=f"{prompt.prompt_id}/teacher", prompt_ids=ids)

    async def compare_teachers(judged: JudgedResponse, *teachers: Prompt) -> tuple[list[Gaps], list[float]]:
        """Return the gaps of teacher and control, and the scores of policy, teacher and control."""
        prompt, response, feedback = judged
        policy, *found = await gather_all(
            rollouts.compute_logprobs(p, response.response_ids) for p in (prompt, *teachers)
        )
        offsets = token_offsets(data.tokenizer, response.response_ids)
        deltas = token_rewards(offsets, feedback.spans, text=response.response_text)[: len(policy)]
        gaps = [split_teacher_gap(logprobs - policy, deltas) for logprobs in found]
        if not is_measured:
            return gaps, []
        others = [one for (one,) in await gather_all(rollouts.sample(p, sampling) for p in teachers)]
        scores = await gather_all(measure(task, prompt, r.answer, sandbox, limit) for r in (response, *others))
        return gaps, [score[task.score_name] for score in scores]

    judged = await sample_and_judge(prompts, rollouts, source, sampling)
    feedbacks = [response.feedback for response in judged]
    critiques = [feedback.critique if feedback.usable else "" for feedback in feedbacks]
    own, shuffled = [
        map(add_critique, prompts, teacher_critiques([p.prompt_id for p in prompts], critiques, shuffled=control))
        for control in (False, True)
    ]
    rows = [(row, a, b) for row, a, b in zip(judged, own, shuffled, strict=True) if a is not None and b is not None]
    if len(rows) < MIN_PROMPTS:
        raise RunStopped(
            f"{len(rows)} of {len(prompts)} prompts have two critiques, their own and another prompt's, that fit "
            f"into a prompt of {max_tokens} tokens, and a comparison needs {MIN_PROMPTS} such prompts; add prompts, or "
            "raise rollout.max_model_len"
        )
    gaps, scores = zip(*await gather_all(compare_teachers(*row) for row in rows), strict=True)
    found = summarize_scores(*np.array(scores).T, name=task.score_name) if is_measured else {}
    found["gaps"] = {name: summarize_gaps(of) for name, of in zip(TEACHERS, zip(*gaps, strict=True), strict=True)}
    found["prompts"] = len(rows)
    return found | {"advice": advise(found)}


def summarize_gaps(responses: Sequence[Gaps]) -> dict[str, dict[str, float]]:
    """Return the mean over tokens of each kind, nats, with its interval over responses; kinds without a token lack."""
    draws, found = Draws(len(responses), seed=0), {}
    for kind in responses[0]:
        columns = np.array([[gaps[kind].sum(), gaps[kind].size] for gaps in responses], float)
        sums = draws.resampled(columns), columns.sum(0)
        drawn, value = (of[..., 0] / np.maximum(of[..., 1], 1) for of in sums)
        found |= {kind: with_interval(drawn, value, len(responses))} if columns[:, 1].any() else {}
    return found


def summarize_scores(policy: np.ndarray, teacher: np.ndarray, control: np.ndarray, *, name: str) -> dict[str, Any]:
    """Return mean scores, and differences with intervals. All arrays are [N]."""
    draws, figure = Draws(len(policy), seed=0), mean_of(len(policy))

    def subtract(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
        interval = compare(a[:, None], b[:, None], figure, draws)
        return {key: interval[key] for key in ("value", "low", "high")}

    return {
        "measure": name,
        **{key: float(of.mean()) for key, of in (("policy", policy), ("teacher", teacher), ("shuffled", control))},
        "teacher_less_policy": subtract(teacher, policy),
        "teacher_less_shuffled": subtract(teacher, control),
    }


def advise(result: Mapping[str, Any]) -> str:
    """Return what the measurement tells the user, warnings first."""
    contrast = teacher_contrast({kind: of["value"] for kind, of in result["gaps"]["teacher"].items()}).get("contrast")
    has_scores, warnings = "measure" in result, []
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
        return unclear.format("with another prompt's critique", **result)
    if contrast is None and not has_scores:
        return "the task has no measure and the critiques have no poor spans: nothing tells whether the teacher helps"
    return "the teacher follows the critiques: objective.teacher can help"


def format_result(result: Mapping[str, Any]) -> str:
    """Return the lines that describe the result to a user."""

    def line(name: str, interval: Mapping[str, float]) -> str:
        return f"  {name:<22} {interval['value']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]"

    lines = []
    if "measure" in result:
        lines += [f"{result['measure']} on {result['prompts']} prompts"]
        lines += [f"  {name:<22} {result[name]:.3f}" for name in ("policy", *TEACHERS)]
        lines += [line(name, result[name]) for name in ("teacher_less_policy", "teacher_less_shuffled")]
    lines += ["log-probability less the policy's, nats, of the policy's tokens"]
    lines += [line(f"{name}, {kind}", of) for name, kinds in result["gaps"].items() for kind, of in kinds.items()]
    return "\n".join([*lines, result["advice"]])
