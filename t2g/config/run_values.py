"""Configs of jobs that take the folder of a run: `t2g evaluate RUN`, `t2g serve RUN`.

The values come from the run's own config.yaml. Overrides of the command line apply to them as to those of a file.
"""

import logging
from pathlib import Path
from typing import Any, Literal

from t2g.config import loading
from t2g.config.feedback import EngineConfig
from t2g.config.jobs import MODEL, PolicyJob, RewardJob
from t2g.errors import UserError

EVALUATION = "evaluation"  # folders in that of the run
SERVER = "server"
POLICY = "policy"  # folders of trained models: of PPO; of supervised training
Kind = Literal["policy", "reward"]

logger = logging.getLogger(__name__)


def read_run(folder: Path) -> dict[str, Any]:
    """Return the values of the run's config. Raises UserError if the folder has none."""
    file = folder / loading.FILE_NAME
    if not file.is_file():
        raise UserError(f"{folder}: it has no {loading.FILE_NAME}; name the folder of a run, such as runs/my-run")
    values, _ = loading.read_yaml(file)
    return values


def find_run_kind(folder: Path) -> Kind:
    """Return what the run has trained. Raises UserError for a run that trained neither a policy nor a reward model."""
    sections = read_run(folder).keys()
    if {"learner", "rollout", "feedback"} <= sections and "compare" not in sections:
        return "policy"
    if {"sft", "eval_data"} <= sections:
        return "reward"
    raise UserError(f"{folder}: it is no run of t2g train or t2g reward; for other models give --config")


def evaluation_values(folder: Path) -> dict[str, Any]:
    """Return the values of an evaluation in the run's folder `evaluation`, for `find_run_kind`.

    A policy is compared with its base on the run's held-out prompts, sampled as in the run's evaluations, and scored by
    the run's feedback source. A reward model is measured on the run's held-out records.
    """
    folder = folder.absolute()
    if find_run_kind(folder) == "policy":
        return _policy_values(folder)
    return _reward_values(folder)


def serving_values(folder: Path) -> dict[str, Any]:
    """Return the values of jobs.serve for the run's policy, on engines as those of the run."""
    values = read_run(folder)
    folder = folder.absolute()
    rollout = values.get("rollout", {})
    engine = {key: value for key, value in rollout.items() if key in EngineConfig.model_fields}
    model = str(find_model(folder, POLICY, MODEL))
    return {"run": {"root": str(folder), "name": SERVER}, "model": {"policy": model}, "engine": engine}


def find_model(folder: Path, *names: str) -> Path:
    """Return the trained model of a run, the first of `names` in its folder.

    Raises:
        UserError: There is none. The message names the best checkpoint, if the run has one.
    """
    for name in names:
        model = folder / name
        if (model / "config.json").is_file():
            return model
    best = folder / "checkpoints" / "best"
    more = (
        f"; {best} is its best policy so far, which a config of your own (--config) can name" if best.is_dir() else ""
    )
    raise UserError(f"{folder}: it has no {names[0]} yet; finish the run by its own command{more}")


def _policy_values(folder: Path) -> dict[str, Any]:
    run = loading.load(PolicyJob, folder / loading.FILE_NAME)
    if run.environment is not None:
        raise UserError(f"{folder}: environment={run.environment} replies to the policy; an evaluation has no turns")
    if run.eval_data is None:
        logger.warning(
            "the run has no eval_data: its policy is measured on the prompts of its training; data.path=FILE takes "
            "others"
        )
    data = (run.eval_data or run.data).model_dump(mode="json")
    limits = [limit for limit in (data["limit"], run.eval.num_prompts) if limit]
    data["limit"] = min(limits)
    if data["too_long"] == "skip":
        data["too_long"] = "truncate"

    base = run.model.model_dump(mode="json")
    trained = {"policy": str(find_model(folder, POLICY)), "thinking_tags": run.model.thinking_tags}
    cluster = run.cluster.model_dump(mode="json", exclude={"gpu_sharing"})  # the ranks are not there
    rollout = run.rollout.model_dump(mode="json")
    rollout["samples_per_prompt"] = run.eval.samples_per_prompt
    sandbox = run.feedback.sandbox.model_dump(mode="json")
    feedback = run.feedback.model_dump(mode="json", exclude={"noise"})
    rewards = run.objective.rewards.model_dump(mode="json")
    return {
        "run": {"root": str(folder), "name": EVALUATION, "seed": run.run.seed},
        "cluster": cluster,
        "task": run.task,
        "policies": {"base": base, "policy": trained},
        "data": data,
        "rollout": rollout,
        "sandbox": sandbox,
        "feedback": feedback,
        "rewards": rewards,
    }


def _reward_values(folder: Path) -> dict[str, Any]:
    run = loading.load(RewardJob, folder / loading.FILE_NAME)
    model = str(find_model(folder, MODEL))
    cluster = run.cluster.model_dump(mode="json")
    engine = run.engine.model_dump(mode="json")
    data = run.eval_data.model_dump(mode="json")
    data["limit"] = run.eval_data.limit or run.eval_records
    return {
        "run": {"root": str(folder), "name": EVALUATION, "seed": run.run.seed},
        "cluster": cluster,
        "task": run.task,
        "feedback": {"source": "reward_model", "reward_model": model, "engine": engine},
        "data": data,
        "criterion": run.criterion,
    }
