"""The pure functions of a teacher: the critique that it reads, and its metrics."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

import numpy as np

from t2g import metrics as m
from t2g.algo.teacher_weights import clip_of_gap
from t2g.config import ObjectiveConfig
from t2g.loop.step_advantages import find_trained_tokens
from t2g.types import ScoredRollout, TeacherStats, TokenStats


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
        if critique:
            by_prompt[prompt_id].append(critique)

    prompts = [*by_prompt]
    critiques_of_others = dict[str, Iterator[str]]()
    for index, prompt_id in enumerate(prompts):
        following = prompts[index + 1 :] + prompts[:index]
        candidates = filter(None, map(by_prompt.get, following))
        critiques_of_others[prompt_id] = cycle(next(candidates, [""]))
    return [next(critiques_of_others[prompt_id]) for prompt_id in prompt_ids]


def split_teacher_gap(gap: np.ndarray, span_values: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gaps of a response's good tokens, of its poor ones, and of the first token of each run of poor ones.

    Args:
        gap: Teacher's log-probability less the policy's of each sampled token, [R].
        span_values: See `ScoredRollout.span_values`.
    """
    is_poor = span_values < 0
    follows_poor = np.append(False, is_poor[:-1])
    return {
        "good": gap[span_values > 0],
        "poor": gap[is_poor],
        "poor_first": gap[is_poor & ~follows_poor],
    }


def teacher_contrast(means: Mapping[str, float]) -> dict[str, float]:
    """Return `contrast`, the mean gap of good tokens, at most 0, less that of first poor tokens; {} without the latter.

    Below 0 the teacher does not tell poor tokens from good ones: it makes the poor ones likelier, or the good ones
    less likely than the poor ones.

    >>> teacher_contrast({"good": -1.25, "poor_first": -0.25}), teacher_contrast({"good": 0.5, "poor_first": -0.25})
    ({'contrast': -1.0}, {'contrast': 0.25})
    """
    if "poor_first" not in means:
        return {}
    good = min(0.0, means.get("good", 0.0))
    return {"contrast": good - means["poor_first"]}


def teacher_metrics(
    scored: Sequence[ScoredRollout],
    teacher: Sequence[TeacherStats | None],
    stats: Sequence[TokenStats],
    objective: ObjectiveConfig,
) -> dict[str, float]:
    """Return the share of the step with a teacher, the means of `split_teacher_gap`, and `teacher_contrast`.

    With a teacher that scales, also the share of trained tokens at whose gap its weights are clipped.
    """
    gaps_of_trained: list[np.ndarray] = []
    gaps_by_kind: dict[str, list[np.ndarray]] = {}
    for response, token_stats, teacher_stats in zip(scored, stats, teacher, strict=True):
        if teacher_stats is None:
            continue
        gap = teacher_stats.logprobs - token_stats.old_logprobs
        gaps_of_trained.append(gap[find_trained_tokens(response, objective)])
        for kind, gaps in split_teacher_gap(gap, response.span_values).items():
            gaps_by_kind.setdefault(kind, []).append(gaps)

    means: dict[str, float] = {}
    for kind, rows in gaps_by_kind.items():
        gaps = np.concatenate(rows)
        if gaps.size:
            means[kind] = float(gaps.mean())

    metrics = {m.TEACHER_GAP + kind: mean for kind, mean in means.items()}
    contrast = teacher_contrast(means)
    if contrast:
        metrics[m.TEACHER_CONTRAST] = contrast["contrast"]
    metrics[m.TEACHER_SHARE] = len(gaps_of_trained) / len(teacher)
    rule = objective.teacher
    sizes = np.abs(np.concatenate(gaps_of_trained)) if gaps_of_trained else np.zeros(0)
    if rule.use == "scale" and sizes.size:
        is_clipped = sizes > clip_of_gap(rule.bound)
        metrics[m.TEACHER_CLIPPED] = float(is_clipped.mean())
    return metrics
