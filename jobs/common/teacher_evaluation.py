"""Whether the teacher of objective.teacher is better than the policy: measured before anything is trained.

The policy responds to held-out prompts; the feedback source criticises the responses; the same weights respond again
with the critique of their own response in the prompt, and with that of another prompt's response, which is the control.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jobs.common.fleets import Fleets
from jobs.common.policy_runs import PolicyData
from t2g.concurrency import gather_all
from t2g.config import PolicyJob
from t2g.data.prompts import encode_teacher_prompt
from t2g.errors import RunStopped, UserError
from t2g.files import write_atomic
from t2g.interfaces import FeedbackSource, RolloutSource
from t2g.loop.sampling import judge_answer, make_sampling, measure
from t2g.loop.steps import teacher_critiques
from t2g.study.paired import Draws, compare, mean_of
from t2g.types import Prompt, Rollout

TEACHER_FILE = "teacher.json"
MIN_PROMPTS = 2  # an interval needs two


def evaluate_teacher(config: PolicyJob, data: PolicyData, fleets: Fleets) -> dict[str, Any]:
    """Write teacher.json and return its content: mean scores, and differences with 95 % intervals over prompts.

    Raises:
        UserError: The task has no measure, or a prompt cannot be measured.
        RunStopped: Fewer than two prompts have both critiques.
    """
    prompts = data.eval_prompts or data.prompts[: config.eval.num_prompts]
    if not data.task.score_name or not all(map(data.task.can_measure, prompts)):
        raise UserError(
            f"task {data.task.name} cannot measure every held-out prompt; --what teacher compares such measures, so "
            "name a task with a measure, and data with references or tests"
        )
    rollouts, source = fleets.for_policy(config, data.task)
    scores = asyncio.run(score_responses(config, data, prompts, rollouts, source))
    result = summarize_scores(*scores, name=data.task.score_name)
    write_atomic(config.run.folder / TEACHER_FILE, json.dumps(result, indent=1).encode())
    return result


async def score_responses(
    config: PolicyJob, data: PolicyData, prompts: Sequence[Prompt], rollouts: RolloutSource, source: FeedbackSource
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the scores of policy, teacher and control on the N prompts with both critiques, [N] each.

    Raises:
        RunStopped: There are fewer than two such prompts.
    """
    sampling, sandbox = make_sampling(config, "eval", 0, num_samples=1), config.feedback.sandbox
    limit, max_tokens = asyncio.Semaphore(sandbox.max_concurrent), config.rollout.max_prompt_tokens

    async def respond(prompt: Prompt) -> Rollout:
        (rollout,) = await rollouts.sample(prompt, sampling)
        return rollout

    async def score(prompt: Prompt, rollout: Rollout) -> float:
        return (await measure(data.task, prompt, rollout, sandbox, limit))[data.task.score_name]

    async def score_teacher(prompt: Prompt, critique: str) -> float | None:
        ids = encode_teacher_prompt(data.task, prompt, critique, data.tokenizer, max_tokens) if critique else None
        if ids is None:
            return None
        # The seed depends on the prompt_id: the teacher's response needs another one than the policy's.
        teacher_prompt = replace(prompt, prompt_id=f"{prompt.prompt_id}/teacher", prompt_ids=ids)
        return await score(prompt, await respond(teacher_prompt))

    responses = await gather_all(map(respond, prompts))
    judged = await gather_all(map(partial(judge_answer, source), prompts, responses))
    prompt_ids, critiques = [p.prompt_id for p in prompts], [f.critique if f.usable else "" for f in judged]
    policy_scores = await gather_all(map(score, prompts, responses))
    own_scores, shuffled_scores = [
        await gather_all(map(score_teacher, prompts, teacher_critiques(prompt_ids, critiques, shuffled=shuffled)))
        for shuffled in (False, True)
    ]
    complete = [row for row in zip(policy_scores, own_scores, shuffled_scores, strict=True) if None not in row]
    if len(complete) < MIN_PROMPTS:
        raise RunStopped(
            f"{len(complete)} of {len(prompts)} prompts have two critiques, their own and another prompt's, that fit "
            f"into a prompt of {max_tokens} tokens, and a comparison needs {MIN_PROMPTS} such prompts; add prompts, or "
            "raise rollout.max_model_len"
        )
    policy, teacher, control = np.array(complete, float).T
    return policy, teacher, control


def summarize_scores(policy: np.ndarray, teacher: np.ndarray, control: np.ndarray, *, name: str) -> dict[str, Any]:
    """Return mean scores, differences with intervals, and `advice`, a sentence for the user. All arrays are [N]."""
    draws, figure = Draws(len(policy), seed=0), mean_of(len(policy))

    def subtract(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
        interval = compare(a[:, None], b[:, None], figure, draws)
        return {key: interval[key] for key in ("value", "low", "high")}

    less_policy, less_shuffled = subtract(teacher, policy), subtract(teacher, control)
    if less_policy["low"] <= 0:
        advice = "the teacher is not better than the policy: objective.teacher will not help"
    elif less_shuffled["low"] <= 0:
        advice = "another prompt's critique helps as much: the gain is not what the critiques say"
    else:
        advice = "the teacher follows the critiques: objective.teacher can help"
    means = {"policy": policy, "teacher": teacher, "shuffled": control}
    return {
        "measure": name,
        "prompts": len(policy),
        **{key: float(values.mean()) for key, values in means.items()},
        "teacher_less_policy": less_policy,
        "teacher_less_shuffled": less_shuffled,
        "advice": advice,
    }


def format_result(result: dict[str, Any]) -> str:
    """Return the lines that describe the result to a user."""
    lines = [f"{result['measure']} on {result['prompts']} prompts"]
    lines += [f"  {name:<22} {result[name]:.3f}" for name in ("policy", "teacher", "shuffled")]
    for name in ("teacher_less_policy", "teacher_less_shuffled"):
        interval = result[name]
        lines.append(f"  {name:<22} {interval['value']:+.3f} [{interval['low']:+.3f}, {interval['high']:+.3f}]")
    return "\n".join([*lines, result["advice"]])
