"""Defaults that follow from other sections of a job. Each job sets them with `resolve`, before its own checks.

    task=code, feedback.source=llm, rollout.samples_per_prompt=1
    -> learner.sync_transport=store, objective.rewards.poor=[0, -1, -1], objective.advantages=gae

A value that the user set stays, and a derived value does not count as set: `with_overrides` derives it again. A default
that follows from keys of its own section is a `default_factory` of its field; it reads the values derived here.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from t2g.config.common import Config, GpuSharing, Section, set_derived, with_overrides
from t2g.config.feedback import SourceConfig
from t2g.config.learning import Advantages, Placement, TeacherConfig, Transport
from t2g.config.validation_errors import list_fields

CODE_POOR = (0.0, -1.0, -1.0)


@dataclass(frozen=True, kw_only=True)
class DerivedDefault:
    """A default that follows from other sections."""

    key: str  # dotted: section and field
    follows: tuple[str, ...]  # the keys whose values are the arguments of `derive`
    derive: Callable[..., Any]  # returns None where the schema's default holds


def choose_transport(sharing: GpuSharing, engine_gpus: float, rank_gpus: float, sync_verify: str) -> Transport:
    """Return the fastest transport that the GPUs allow; store alone can hash every tensor."""
    if sharing != "none":
        return "ipc"
    has_whole_gpus = min(engine_gpus, rank_gpus) >= 1
    if has_whole_gpus and sync_verify == "probe":
        return "nccl"
    return "store"


def choose_poor_rewards(task: str, feedback: SourceConfig) -> tuple[float, float, float] | None:
    """Return the rewards of the task code if a model gives the feedback, else None.

    A model gives severities; 1 means "works, could be improved", for which the paper's release pays nothing.
    Functions and people may omit the severity, which then counts as 1.
    """
    return CODE_POOR if task == "code" and feedback.models else None


def choose_advantages(
    teacher: TeacherConfig | None, samples_per_prompt: int, critic_warmup_steps: int, critic_ranks: object, values: str
) -> Advantages | None:
    """Return gae where there is a critic, or where a prompt's single sample has no group to compare with.

    Values by sentence or span ask for a comparison: with a single sample they are refused.
    """
    if critic_ranks or critic_warmup_steps:
        return "gae"
    trains_rewards = teacher is None or not teacher.replaces_rewards
    if trains_rewards and samples_per_prompt == 1 and values == "position":
        return "gae"
    return None


def choose_turn_gamma(source: str, placement: Placement) -> float | None:
    """Return 0 where each turn is paid for its own critique: a wrong one would earn its repair's praise.

    Other placements may pay all turns within the last one.
    """
    pays_each_turn = source == "next_message" and placement in ("span", "step")
    return 0.0 if pays_each_turn else None


ADVANTAGES_FOLLOW = (
    "objective.teacher",
    "rollout.samples_per_prompt",
    "learner.critic_warmup_steps",
    "learner.critic_ranks",
    "objective.values",
)
# In the order in which they are set.
DERIVED_DEFAULTS = (
    DerivedDefault(
        key="learner.sync_transport",
        follows=("cluster.gpu_sharing", "rollout.gpus", "learner.gpus", "learner.sync_verify"),
        derive=choose_transport,
    ),
    DerivedDefault(key="objective.rewards.poor", follows=("task", "feedback"), derive=choose_poor_rewards),
    DerivedDefault(
        key="objective.advantages",
        follows=ADVANTAGES_FOLLOW,
        derive=choose_advantages,
    ),
    DerivedDefault(
        key="objective.turn_gamma", follows=("feedback.source", "objective.rewards.placement"), derive=choose_turn_gamma
    ),
)  # fmt: skip


def resolve(job: Section) -> None:
    """Set DERIVED_DEFAULTS in a job, each where the job has all of its keys and the user did not set it."""
    known_keys = list_fields(type(job)).keys()
    sections = dict(job)
    changes: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for default in DERIVED_DEFAULTS:
        has_keys = known_keys >= {default.key, *default.follows}
        if not has_keys or _is_set(job, default.key):
            continue
        arguments = [attrgetter(key)(job) for key in default.follows]
        value = default.derive(*arguments)
        if value is not None:
            name, _, key = default.key.partition(".")
            changes[name][key] = value
            set_derived(job, name, _with_derived(sections[name], changes[name]))


def _is_set(job: Section, key: str) -> bool:
    section, _, name = key.rpartition(".")
    return name in attrgetter(section)(job).model_fields_set


def _with_derived(section: Config, changes: dict[str, Any]) -> Config:
    """Return `with_overrides` with values that do not count as set."""
    return _with_marks_of(section, with_overrides(section, changes))


def _with_marks_of(original: Config, changed: Config) -> Config:
    """Return `changed` with the fields that count as set in `original`, inner sections included."""
    values: dict[str, Any] = {}
    for name, value in changed:
        values[name] = value
        before = getattr(original, name)
        if isinstance(value, Section) and isinstance(before, Section):
            values[name] = _with_marks_of(before, value)
    return type(changed).model_construct(original.model_fields_set, **values)
