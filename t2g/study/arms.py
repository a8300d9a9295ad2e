"""The runs of a comparison as configs: a PolicyJob for each method, seed and learning rate. Pure; imports no torch.

<run>/search/<method>-<lr>-<seed>    chooses the learning rate
<run>/arms/<method>-<seed>           is compared
<run>/noise/<noise>-<method>-<seed>  is compared under noise
"""

from collections.abc import Callable
from statistics import mean
from typing import Any

from t2g.config import (
    UNTRAINED,
    CompareJob,
    FeedbackConfig,
    Method,
    ObjectiveConfig,
    PolicyJob,
    RunConfig,
    with_overrides,
)
from t2g.errors import UserError

Scores = dict[float, dict[int, float | None]]

SEARCH, ARMS, NOISE = "search", "arms", "noise"
BASELINES = ("reflection", "dpo", "ilf")  # of jobs.common.baseline_stages; all others are jobs.train_policy's
REVISED = ("reflection", "ilf")  # the policy's responses are written again, with their critique in view

# What a method changes in the job's own objective, and in its feedback; a method that is not here changes nothing.
_REWARDS: dict[Method, str] = {
    "span": "span",
    "group": "span",
    "no_critique": "span",
    "dense": "span",
    "step": "step",
    "scalar": "scalar",
    "shuffled": "shuffled",
    "grpo": "scalar",
}
_OBJECTIVE: dict[Method, dict[str, Any]] = {
    "group": {"advantages": "group"},  # span without a critic
    "grpo": {  # arXiv 2402.03300, eq. 3 and 4; KL in the reward would be blown up with it where a group's rewards tie
        "advantages": "group_normalised",
        "whiten": "none",
        "kl_estimator": "k3",
        "loss_mean": "sequence",
    },
}
_STYLE: dict[Method, dict[str, Any]] = {"no_critique": {"style.critique": False}, "dense": {"style.labels": "dense"}}


def arm_job(job: CompareJob, method: Method, seed: int, lr: float) -> PolicyJob:
    """The run that is compared."""
    return _run_of(job, method, lr, folder=ARMS, name=f"{method}-{seed}", seed=seed)


def search_job(job: CompareJob, method: Method, seed: int, lr: float) -> PolicyJob:
    """The same on a seed of the search."""
    return _run_of(job, method, lr, folder=SEARCH, name=f"{method}-{lr}-{seed}", seed=seed)


def noise_job(job: CompareJob, noise: str, method: Method, seed: int, lr: float) -> PolicyJob:
    """The run that is compared under one of `compare.noise`."""
    arm = _run_of(job, method, lr, folder=NOISE, name=f"{noise}-{method}-{seed}", seed=seed)
    return with_overrides(arm, {"feedback.noise": job.compare.noise[noise]})


def arm_feedback(job: CompareJob, method: Method) -> FeedbackConfig:
    """The job's own feedback, that of an ablation in its style and by its reward model."""
    if method not in _STYLE:
        return job.feedback
    model = getattr(job.compare.reward_models, method)
    return with_overrides(job.feedback, _STYLE[method] | ({"reward_model": model} if model else {}))


def arm_objective(method: Method, objective: ObjectiveConfig) -> ObjectiveConfig:
    changes = dict(_OBJECTIVE.get(method, {}))
    if method in _REWARDS:
        changes["rewards.placement"] = _REWARDS[method]
    return with_overrides(objective, changes)


def trained(job: CompareJob) -> list[Method]:
    return [method for method in job.compare.methods if method not in UNTRAINED]


def choose_lr(scores: Scores) -> float:
    """Of learning rate -> score by seed, the one with the best mean, the smaller of equals; UserError for none."""
    means = {lr: mean(by.values()) for lr, by in sorted(scores.items()) if None not in by.values()}
    if not means:
        raise UserError(f"no learning rate of compare.lr_grid={[*scores]} trains to the end; add smaller ones")
    return max(means, key=means.__getitem__)


def evaluated_at(job: PolicyJob) -> list[int]:
    """Samples behind each held-out evaluation of a run that steps."""
    per_step = job.rollout.prompts_per_step * job.rollout.samples_per_prompt
    steps = [s for s in range(1, job.num_steps + 1) if s % job.eval.every == 0 or s == job.num_steps]
    return [0, *(step * per_step for step in steps)]


def search_scores(job: CompareJob, method: Method, score_of: Callable[[PolicyJob], float | None]) -> Scores:
    """Learning rate -> score by seed, None for a run that could not go on; {} where there is nothing to choose."""
    config = job.compare
    if method in UNTRAINED or len(config.lr_grid) == 1:
        return {}
    return {
        lr: {seed: score_of(search_job(job, method, seed, lr)) for seed in config.search_seeds} for lr in config.lr_grid
    }


def _run_of(job: CompareJob, method: Method, lr: float, *, folder: str, name: str, seed: int) -> PolicyJob:
    changes = {
        "run": RunConfig(root=job.run.folder / folder, name=name, seed=seed),
        "stages": None,
        "feedback": arm_feedback(job, method),
        "objective": arm_objective(method, job.objective),
        "learner": with_overrides(job.learner, {"policy.lr": lr}),
    }
    return PolicyJob(**{field: getattr(job, field) for field in PolicyJob.model_fields} | changes)
