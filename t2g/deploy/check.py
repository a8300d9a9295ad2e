"""What a run needs of a cluster, and what cannot work there, before anything is asked of one."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from t2g.config import PolicyJob
from t2g.config.marks import paths
from t2g.deploy.manifests import SHARED
from t2g.deploy.memory import (
    BYTES,
    GIB,
    GPUS,
    Estimate,
    ModelShape,
    beside_bytes,
    critic_models,
    engine_fit,
    find_shape,
    host_bytes,
    learner_models,
    logits_bytes,
    rank_fit,
    store_bytes,
    store_gib,
)
from t2g.deploy.pods import ROLE_LABEL, PodGroup, most_per_pod, pod_groups, satisfies
from t2g.errors import UserError
from t2g.sandbox import available
from t2g.text.positions import uneven_heads

PARTS = ("weights", "gradients", "optimizer", "activations", "gathered", "logits", "cache", "other")
MIN_PLACEMENT_S = 600  # a new node, an image of some GB, a Ray that starts
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")

Fits = Sequence[tuple[PodGroup, Estimate]]


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
    known = [group for group in groups if group.role.gpus and group.name in shapes]
    fits = [(group, _fit(config, group, shapes[group.name], GPUS[gpu] * GIB)) for group in known]
    policy = shapes.get("learner")
    problems = list(_problems(config, shapes, fits, gpu))
    apart = [] if config.learner.sync_transport == "ipc" else _group_warnings(groups)
    warnings = [*apart, *_cluster_warnings(config, policy), *_path_warnings(config)]
    if config.task == "code" and (lacking := available(config.feedback.sandbox.require)):
        warnings.append(f"on this machine {lacking}")
    lines = [*map(_pod_line, groups), _total_line(config, groups), "", *_memory_lines(fits, gpu), *remarks, ""]
    found = [*(f"problem: {text}" for text in problems), *(f"warning: {text}" for text in warnings)]
    return problems, "\n".join([*lines, *(found or ["no problems found"])])


def _pod_line(group: PodGroup) -> str:
    """rollout: 12 engines of TP 2 -> 3 pods, at most 8; a pod has 8 GPUs, 16 CPUs and 96 GiB for them"""
    role, workers, pods = group.role, group.workers, group.pods
    size = "on CPUs"
    if role.gpus:
        size = f"of TP {role.tensor_parallel}" if group.elastic else f"of {_count(role.gpus, 'GPU')}"
    bounds = f", at least {pods.min}" if pods.min < pods.initial else ""
    bounds += f", at most {pods.max}" if pods.max > pods.initial else ""
    each = [_count(group.gpus, "GPU")] if group.gpus else []
    each = ", ".join([*each, f"{_count(group.cpus, 'CPU')} and {group.per_pod * role.memory_gib:g} GiB"])
    kind = _count(workers.initial, "engine" if group.elastic else "rank")
    return f"{group.name}: {kind} {size} -> {_count(pods.initial, 'pod')}{bounds}; a pod has {each} for them"


def _total_line(config: PolicyJob, groups: Sequence[PodGroup]) -> str:
    if config.learner.sync_transport == "ipc":
        groups = [group for group in groups if group.name != "rollout"]  # on the ranks' GPUs
    start, most = (sum(getattr(g.pods, when) * g.gpus for g in groups) for when in ("initial", "max"))
    return f"in all: {_count(start, 'GPU')}{f', at most {most}' if most > start else ''}, and a head without workers"


def _count(count: float, noun: str) -> str:
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def _shapes(config: PolicyJob) -> tuple[dict[str, ModelShape], list[str]]:
    """By the names of pod groups; and what is to be said about models whose size is not known here."""
    policy, feedback = find_shape(config.model.policy, config.model.revision), config.feedback
    if policy is None:
        return {}, [f"model.policy={config.model.policy}: its size is not known on this machine"]
    shapes = dict.fromkeys(("learner", "critic", "rollout", "reward"), policy)
    if not feedback.own_engines:
        return shapes, []
    asked = {"reward_model": (feedback.reward_model, feedback.reward_revision)}
    judge, revision = asked.get(str(feedback.model_asked), (feedback.llm.model, feedback.llm.revision))
    if shape := find_shape(str(judge), revision):
        return shapes | {"reward": shape}, []
    return shapes, [f"reward: the size of {judge} is not known on this machine; taken to be the policy's"]


def _fit(config: PolicyJob, group: PodGroup, shape: ModelShape, gpu_bytes: float) -> Estimate:
    learner, objective, rollout, workers = config.learner, config.objective, config.rollout, group.workers.initial
    if group.elastic:
        sequences = -(-rollout.prompts_per_step * rollout.samples_per_prompt // workers)
        return engine_fit(shape, group.role, sequences=sequences, gpu_bytes=gpu_bytes)
    tokens = max(learner.tokens_per_microbatch, rollout.max_model_len)  # a longer sequence has a pass of its own
    if group.name == "critic":
        return rank_fit(shape, critic_models(shape), learner, ranks=workers, tokens=tokens)
    logits = logits_bytes(shape, learner, objective, tokens=tokens)
    models = learner_models(shape, learner, objective)
    return rank_fit(shape, models, learner, ranks=workers, tokens=tokens, logits=logits)


def _memory_lines(fits: Fits, gpu: str) -> Iterator[str]:
    if not fits:
        yield "no estimate of GPU memory"
        return
    columns = [part for part in PARTS if any(part in fit.parts for _, fit in fits)]
    yield f"estimated GiB on each GPU, of {GPUS[gpu]:g} ({gpu}):"
    yield f"  {'':<8}" + "".join(f"{name:>12}" for name in [*columns, "total"])
    for group, fit in fits:
        cells = [f"{fit.parts[part] / GIB:.1f}" if part in fit.parts else "-" for part in columns]
        yield f"  {group.name:<8}" + "".join(f"{cell:>12}" for cell in [*cells, f"{fit.total / GIB:.1f}"])
    for group, fit in fits:
        if group.elastic:
            yield (
                f"{group.name}: an engine must hold {_count(fit.wanted, 'sequence')} at once; there is room for "
                f"{fit.fitting} of {group.role.max_model_len} tokens"
            )


def _problems(config: PolicyJob, shapes: Mapping[str, ModelShape], fits: Fits, gpu: str) -> Iterator[str]:
    learner, policy, rollout = config.learner, shapes.get("learner"), config.rollout
    colocate, gpu_bytes = config.cluster.colocate, GPUS[gpu] * GIB
    beside: dict[str, float] = {}
    if learner.sync_transport == "ipc" and (of_rank := [fit for group, fit in fits if group.name == "learner"]):
        beside = beside_bytes(of_rank[0], rollout, colocate=colocate, gpu_bytes=gpu_bytes)
    for group, fit in fits:
        section, room = group.section, gpu_bytes - beside.get(group.name, 0.0)
        if group.elastic and fit.fitting == 0:
            yield f"{section}: not one sequence fits beside the weights; raise {section}.gpus or lower max_model_len"
        heads = shapes[group.name].num_attention_heads, shapes[group.name].num_key_value_heads
        if group.elastic and (why := uneven_heads(*heads, group.role.tensor_parallel)):
            yield f"{section}.gpus is {group.role.gpus:g}, and the model has {why}; take a number that divides them"
        if group.name in beside and group.elastic and rollout.gpu_memory_utilization * gpu_bytes > room:
            yield (
                f"{section}.gpu_memory_utilization is {rollout.gpu_memory_utilization:g}, and the rank on the same GPU "
                f"leaves {room / gpu_bytes:.2f} of it; lower the one, or what the rank needs"
            )
        if not group.elastic and fit.total > room:
            checkpointing = "" if learner.gradient_checkpointing else "set learner.gradient_checkpointing=true, or "
            left = f" beside {beside[group.name] / GIB:.0f} of the engine there" if group.name in beside else ""
            yield (
                f"{section}: about {fit.total / GIB:.0f} GiB on a GPU of {GPUS[gpu]:g}{left}; lower "
                f"learner.tokens_per_microbatch, {checkpointing}raise {section}.workers, or set learner.offload=cpu"
            )
    need = host_bytes(policy, learner, config.objective, colocate=colocate) / GIB if policy else 0
    if need > learner.memory_gib:
        yield f"learner.memory_gib is {learner.memory_gib:g}: a rank that loads its models needs {need:.0f}"
    asleep = BYTES[rollout.dtype] * policy.numel / GIB if policy and colocate else 0
    if asleep > rollout.memory_gib:
        yield f"rollout.memory_gib is {rollout.memory_gib:g}: the weights of an engine that sleeps need {asleep:.0f}"


def _group_warnings(groups: Sequence[PodGroup]) -> Iterator[str]:
    for group in groups:
        labels, section = group.role.labels, group.section
        others = [other.name for other in groups if other is not group and satisfies(other.labels, labels)]
        if others:
            yield (
                f"{section}.labels is {labels or 'empty'}: its workers may land on pods of {', '.join(others)}; "
                f"add {section}.labels.{ROLE_LABEL}={group.name}"
            )
        most, ranks = most_per_pod(group.role.gpus), group.workers.initial
        if not group.elastic and group.per_pod == 1 < min(most, ranks):
            yield (
                f"{section}.workers is {ranks}, which no number from 2 to {most} divides: each rank gets a pod of its "
                f"own, and all speak over the network; take a multiple of {most}"
            )


def _cluster_warnings(config: PolicyJob, shape: ModelShape | None) -> Iterator[str]:
    cluster = config.cluster
    if cluster.placement_timeout_s < MIN_PLACEMENT_S:
        yield (
            f"cluster.placement_timeout_s is {cluster.placement_timeout_s:g}: pods that an autoscaler adds take "
            "minutes; 1800 gives them time"
        )
    held = shape if config.learner.keeps_buckets else None
    need, have = store_bytes(held, b=BYTES[config.rollout.dtype]) / GIB if held else 0, store_gib(config)
    if need > have:
        yield (
            f"cluster.object_store_gib is {have:g}: the policy's weights, held for late "
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
