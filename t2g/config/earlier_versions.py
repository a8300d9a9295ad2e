"""What files of earlier versions mean today: configs that a run wrote, and the settings of its identity."""

from collections.abc import Mapping
from typing import Any

# A config with all of these keys was written by a run: people do not set them together.
_WRITTEN_KEYS = {"clip_eps", "kl_horizon", "rollout_correction_cap", "vf_coef"}
_WRITTEN_LOG_KEYS = {"tensorboard", "wandb_project", "num_samples"}
_TEACHER_USE = "objective.teacher.use"
_TEACHER_BOUND = "objective.teacher.bound"
# Every teacher was distilled before there was objective.teacher.use.
_TEACHER_KEYS = {_TEACHER_USE: "distill", _TEACHER_BOUND: 2.0}
_EARLIER_BOUND = 4.0  # the default while the weights of use=scale followed the sign of the advantage


def upgrade_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a config file, in which a run of an earlier version keeps its objective and its trackers.

    Before objective.local_coef, objective.lam was written with every run and read with a critic alone.
    """
    values = _upgrade_log(values)
    objective = values.get("objective")
    if not isinstance(objective, Mapping):
        return values
    objective = _upgrade_teacher(objective)
    values = {**values, "objective": objective}
    if "local_coef" in objective or not objective.keys() >= _WRITTEN_KEYS:
        return values
    upgraded = {**objective, "local_coef": 0.0}
    if objective.get("advantages") != "gae":
        upgraded["lam"] = 1.0
    return {**values, "objective": upgraded}


def _upgrade_teacher(objective: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the objective without the earlier default of the bound, which a distilled teacher does not read."""
    teacher = objective.get("teacher")
    if not isinstance(teacher, Mapping) or not objective.keys() >= _WRITTEN_KEYS:
        return objective
    if teacher.get("use") != "distill" or teacher.get("bound") != _EARLIER_BOUND:
        return objective
    unbounded = {key: value for key, value in teacher.items() if key != "bound"}
    return {**objective, "teacher": unbounded}


def _upgrade_log(values: Mapping[str, Any]) -> Mapping[str, Any]:
    log = values.get("log")
    if not isinstance(log, Mapping) or not log.keys() >= _WRITTEN_LOG_KEYS:
        return values
    upgraded = {key: value for key, value in log.items() if key not in ("tensorboard", "wandb_project")}
    trackers = ["tensorboard"] if log["tensorboard"] else []
    if log["wandb_project"]:
        trackers.append("wandb")
        upgraded["project"] = log["wandb_project"]
    return {**values, "log": {**upgraded, "trackers": trackers}}


def upgrade_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an identity, by dotted key, with those that an earlier version did not have."""
    upgraded = {**settings}
    if "objective.teacher.weight" in settings:
        upgraded = _TEACHER_KEYS | upgraded
        if upgraded[_TEACHER_USE] == "distill" and upgraded[_TEACHER_BOUND] == _EARLIER_BOUND:
            upgraded[_TEACHER_BOUND] = _TEACHER_KEYS[_TEACHER_BOUND]
    if "objective.advantages" not in settings or "objective.local_coef" in settings:
        return upgraded
    upgraded["objective.local_coef"] = 0.0
    if settings.get("objective.kl_estimator") == "k3":
        # Its steps had another loss: the run cannot continue with the same one.
        upgraded["objective.kl_estimator"] = "k3 without the ratio of the policies"
    if settings["objective.advantages"] != "gae":
        upgraded["objective.lam"] = 1.0
    return upgraded
