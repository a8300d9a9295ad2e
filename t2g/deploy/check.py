"""What a run needs of a cluster, and what cannot work there, before anything is asked of one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from t2g.config import EngineConfig, PolicyJob
from t2g.config.marks import paths
from t2g.deploy.manifests import SHARED
from t2g.deploy.memory import (
    BYTES,
    GIB,
    GPUS,
    EngineFit,
    ModelShape,
    critic_bytes,
    engine_fit,
    find_shape,
    host_bytes,
    learner_bytes,
    store_bytes,
)
from t2g.deploy.pods import ROLE_LABEL, PodGroup, most_per_pod, pod_groups, satisfies
from t2g.errors import UserError

PARTS = ("weights", "gradients", "optimizer", "activations", "gathered", "logits", "cache", "other")
MIN_PLACEMENT_S = 600  # a new node, an image of some GB, a Ray that starts
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One GPU of a role."""

    group: PodGroup
    parts: dict[str, float]  # of PARTS, bytes
    fit: EngineFit | None = None  # of an engine

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def check_config(config: PolicyJob, *, gpu: str = "A100-80GB") -> tuple[list[str], str]:
    """What cannot work, a sentence each; and all in words: pods, memory by role on that GPU, those problems, and
    warnings of what goes wrong on several nodes or on pods only.

    Looks up the models' sizes on this machine, and asks nobody. UserError for a GPU without a number in `memory.GPUS`,
    and for a worker that fits into no pod.
    """
    if gpu not in GPUS:
        raise UserError(f"--gpu: got {gpu!r}, but needs one of {', '.join(GPUS)}")
    groups = pod_groups(config)
    shapes, remarks = _shapes(config)
    estimates = _estimates(config, groups, shapes, GPUS[gpu] * GIB)
    problems = [*_gpu_problems(config, estimates, gpu), *_host_problems(config, shapes.get("learner"))]
    warnings = [
        *_label_warnings(groups),
        *_gang_warnings(groups),
        *_cluster_warnings(config, shapes.get("learner")),
        *_path_warnings(config),
    ]
    lines = [*(_pod_line(group) for group in groups), _total_line(groups), ""]
    lines += [*_memory_lines(estimates, gpu), *remarks, ""]
    lines += [*(f"problem: {text}" for text in problems), *(f"warning: {text}" for text in warnings)]
    return problems, "\n".join(lines if problems or warnings else [*lines, "no problems found"])


def _pod_line(group: PodGroup) -> str:
    """rollout: 12 engines of TP 2 -> 3 pods, at most 8; a pod has 8 GPUs, 16 CPUs and 96 GiB for them"""
    role, workers, pods = group.role, group.workers, group.pods
    size = "on CPUs"
    if role.gpus:
        size = f"of TP {role.tensor_parallel}" if isinstance(role, EngineConfig) else f"of {_count(role.gpus, 'GPU')}"
    bounds = f", at least {pods.min}" if pods.min < pods.initial else ""
    bounds += f", at most {pods.max}" if pods.max > pods.initial else ""
    each = [_count(group.gpus, "GPU")] if group.gpus else []
    each = ", ".join([*each, f"{_count(group.cpus, 'CPU')} and {group.per_pod * role.memory_gib:g} GiB"])
    kind = _count(workers.initial, "engine" if group.elastic else "rank")
    return f"{group.name}: {kind} {size} -> {_count(pods.initial, 'pod')}{bounds}; a pod has {each} for them"


def _total_line(groups: Sequence[PodGroup]) -> str:
    start, most = (sum(getattr(g.pods, when) * g.gpus for g in groups) for when in ("initial", "max"))
    return f"in all: {_count(start, 'GPU')}{f', at most {most}' if most > start else ''}, and a head without workers"


def _count(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def _shapes(config: PolicyJob) -> tuple[dict[str, ModelShape], list[str]]:
    """By the names of pod groups; and what is to be said about models whose size is not known here."""
    policy = find_shape(config.model.policy, config.model.revision)
    if policy is None:
        return {}, [f"model.policy={config.model.policy}: its size is not known on this machine"]
    shapes, remarks = dict.fromkeys(("learner", "critic", "rollout", "reward"), policy), list[str]()
    feedback = config.feedback
    if feedback.own_engines:
        judge, revision = feedback.reward_model, feedback.reward_revision
        if feedback.model_asked == "llm":
            judge, revision = feedback.llm.model, feedback.llm.revision
        shape = find_shape(str(judge), revision)
        if shape is None:
            remarks.append(f"reward: the size of {judge} is not known on this machine; taken to be the policy's")
        shapes["reward"] = shape or policy
    return shapes, remarks


def _estimates(
    config: PolicyJob, groups: Sequence[PodGroup], shapes: dict[str, ModelShape], gpu_bytes: float
) -> list[Estimate]:
    tokens = max(config.learner.tokens_per_microbatch, config.rollout.max_model_len)  # a longer one has its own pass
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    found = []
    for group in groups:
        shape = shapes.get(group.name)
        if shape is None or not group.role.gpus:
            continue
        if isinstance(group.role, EngineConfig):
            sequences = -(-samples // group.workers.initial)
            fit = engine_fit(shape, group.role, sequences=sequences, gpu_bytes=gpu_bytes)
            found.append(Estimate(group=group, parts=fit.parts, fit=fit))
        elif group.name == "critic":
            parts = critic_bytes(shape, config.learner, ranks=group.workers.initial, tokens=tokens)
            found.append(Estimate(group=group, parts=parts))
        else:
            parts = learner_bytes(shape, config.learner, config.objective, tokens=tokens)
            found.append(Estimate(group=group, parts=parts))
    return found


def _memory_lines(estimates: Sequence[Estimate], gpu: str) -> list[str]:
    if not estimates:
        return ["no estimate of GPU memory"]
    columns = [part for part in PARTS if any(part in estimate.parts for estimate in estimates)]
    lines = [
        f"estimated GiB on each GPU, of {GPUS[gpu]:g} ({gpu}):",
        f"  {'':<8}" + "".join(f"{name:>12}" for name in [*columns, "total"]),
    ]
    for estimate in estimates:
        sizes = [estimate.parts.get(part) for part in columns]
        cells = "".join(f"{'-' if size is None else f'{size / GIB:.1f}':>12}" for size in [*sizes, estimate.total])
        lines.append(f"  {estimate.group.name:<8}{cells}")
    for estimate in estimates:
        if estimate.fit is not None:
            role = estimate.group.role
            lines.append(
                f"{estimate.group.name}: an engine must hold {_count(estimate.fit.wanted, 'sequence')} at once; "
                f"there is room for {estimate.fit.fitting} of {role.max_model_len} tokens"
            )
    return lines


def _label_warnings(groups: Sequence[PodGroup]) -> Iterator[str]:
    for group in groups:
        labels = group.role.labels
        others = [other.name for other in groups if other is not group and satisfies(other.labels, labels)]
        if others:
            yield (
                f"{group.section}.labels is {labels or 'empty'}: its workers may land on pods of {', '.join(others)}; "
                f"add {group.section}.labels.{ROLE_LABEL}={group.name}"
            )


def _gang_warnings(groups: Sequence[PodGroup]) -> Iterator[str]:
    for group in groups:
        most = most_per_pod(group.role.gpus)
        if not group.elastic and group.per_pod == 1 < min(most, group.workers.initial):
            yield (
                f"{group.section}.workers is {group.workers.initial}, which no number from 2 to {most} divides: each "
                f"rank gets a pod of its own, and all speak over the network; take a multiple of {most}"
            )


def _cluster_warnings(config: PolicyJob, shape: ModelShape | None) -> Iterator[str]:
    cluster = config.cluster
    if cluster.placement_timeout_s < MIN_PLACEMENT_S:
        yield (
            f"cluster.placement_timeout_s is {cluster.placement_timeout_s:g}: pods that an autoscaler adds take "
            "minutes; 1800 gives them time"
        )
    need = store_bytes(shape, b=BYTES[config.rollout.dtype]) / GIB if shape else 0
    if need > cluster.object_store_gib:
        yield (
            f"cluster.object_store_gib is {cluster.object_store_gib:g}: the policy's weights, held for late "
            f"engines, take {need:.0f}, and Ray writes to disk what it has no room for"
        )


def _path_warnings(config: PolicyJob) -> Iterator[str]:
    passed_on = {"stages"} | ({"feedback.llm.model"} if config.feedback.llm.url else set())
    for key, value in paths(config):
        if isinstance(value, str) and key not in passed_on and not value.startswith(("${", SHARED)) and _is_path(value):
            yield f"{key} is {value}: pods see {SHARED} and their image; put it there and give that path"


def _is_path(value: str) -> bool:
    """Rather than a name on the hub."""
    looks = value.startswith(("/", ".", "~")) or value.count("/") > 1 or value.endswith(DATA_FILES)
    return looks or Path(value).exists()


def _gpu_problems(config: PolicyJob, estimates: Sequence[Estimate], gpu: str) -> Iterator[str]:
    for estimate in estimates:
        section = estimate.group.section
        if estimate.fit is not None and estimate.fit.fitting == 0:
            yield f"{section}: not one sequence fits beside the weights; raise {section}.gpus or lower max_model_len"
        if estimate.fit is None and estimate.total > GPUS[gpu] * GIB:
            ways = [f"raise {section}.workers", "set learner.offload=cpu"]
            if not config.learner.gradient_checkpointing:
                ways.insert(0, "set learner.gradient_checkpointing=true")
            yield (
                f"{section}: about {estimate.total / GIB:.0f} GiB on a GPU of {GPUS[gpu]:g}; lower "
                f"learner.tokens_per_microbatch, {', or '.join(ways)}"
            )


def _host_problems(config: PolicyJob, shape: ModelShape | None) -> Iterator[str]:
    need = host_bytes(shape, config.learner, config.objective) / GIB if shape else 0
    if need > config.learner.memory_gib:
        yield f"learner.memory_gib is {config.learner.memory_gib:g}: a rank that loads its models needs {need:.0f}"
