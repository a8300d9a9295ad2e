"""Check a config against a cluster without contacting it: pods, GPU memory, problems and warnings."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, inf
from pathlib import Path

from t2g.config import EngineConfig, JobConfig
from t2g.config.artifacts import find_artifacts, is_made_later
from t2g.config.describe import format_count
from t2g.config.field_annotations import paths
from t2g.deploy.manifests import SHARED, mount_of
from t2g.deploy.pods import ROLE_LABEL, PodGroup, most_per_pod, pod_groups
from t2g.errors import UserError
from t2g.resources.job_memory import find_ranks, store_gib
from t2g.resources.memory import (
    BYTES,
    GIB,
    GPUS,
    Estimate,
    coresident_bytes,
    estimate_engine,
)
from t2g.resources.model_shape import ModelShape, find_shape
from t2g.resources.preflight import Findings, matches_selector
from t2g.sandbox import find_refusal
from t2g.text.model_limits import find_uneven_heads

PARTS = (
    "weights", "gradients", "optimizer", "activations", "gathered", "logits", "shared_keys", "ipc_buffers", "graphs",
    "cache", "other",
)  # fmt: skip
MIN_PLACEMENT_S = 600  # time to add a node, pull an image of some GB and start Ray
DATA_FILES = (".json", ".jsonl", ".csv", ".parquet")

Fits = Sequence[tuple[PodGroup, Estimate]]


def check_config(
    config: JobConfig, *, gpu: str = "A100-80GB", preflight_findings: Findings | None = None
) -> tuple[list[str], str]:
    """Return the problems, a sentence each, and the report: pods, GPU memory of each role, problems and warnings.

    Args:
        gpu: A name of `memory.GPUS`, or GiB.
        preflight_findings: Findings of a preflight, added to the report.

    Raises:
        UserError: The GPU is unknown, or a worker fits into no pod.
    """
    preflight_findings = preflight_findings or Findings()
    gpu_gib = gib_of(gpu)
    groups = pod_groups(config)
    shapes, remarks = _shapes(config)
    fits = []
    for group in groups:
        if group.role.gpus and group.name in shapes:
            fit = _fit(config, group, shapes[group.name], gpu_gib * GIB)
            fits.append((group, fit))
    problems = [*preflight_findings.wrong, *_problems(config, shapes, fits, gpu_gib)]
    warnings = _warnings(config, groups, shapes, fits)

    lines = [_pod_line(group) for group in groups]
    lines += [_total_line(config, groups), ""]
    lines += _memory_lines(fits, gpu, gpu_gib)
    lines += [*remarks, ""]
    findings = [f"problem: {text}" for text in problems]
    findings += [f"warning: {text}" for text in warnings]
    findings += [f"not here: {text}" for text in preflight_findings.missing]
    lines += findings or ["no problems found"]
    return problems, "\n".join(lines)


def _warnings(
    config: JobConfig, groups: Sequence[PodGroup], shapes: Mapping[str, ModelShape], fits: Fits
) -> Iterator[str]:
    yield from _room_warnings(fits)
    num_pods = sum(group.pods.max for group in _own_gpus(config, groups))
    if num_pods > 1:  # else a single machine can run it
        if not config.shares_gpus:
            yield from _group_warnings(groups)
        yield from _cluster_warnings(config, shapes.get("learner"))
        try:
            mount = mount_of(config)
        except UserError as error:
            yield str(error)
            mount = SHARED
        yield from path_warnings(config, mount)
    for group, _ in fits:
        if getattr(group.role, "dtype", "") == "float32":
            yield f"{group.section}.dtype is float32, for which GPUs have no fast attention: take bfloat16"
    sandboxes = [feedback.sandbox for feedback in config.feedback_sections.values()]
    if config.task == "code" and sandboxes:
        refusal = find_refusal(sandboxes[0].require)
        if refusal:
            yield f"on this machine {refusal}"


def gib_of(gpu: str) -> float:
    """Return the memory in GiB of a GPU given by its name or in GiB."""
    try:
        gib = GPUS.get(gpu) or float(gpu)
    except ValueError:
        gib = 0.0
    if not 1 <= gib < inf:
        raise UserError(f"--gpu: got {gpu!r}, but needs one of {', '.join(GPUS)}, or GiB as a number")
    return gib


def _pod_line(group: PodGroup) -> str:
    """Return "rollout: 12 engines of TP 2 -> 3 pods, at most 8; a pod has 8 GPUs, 16 CPUs and 96 GiB for them"."""
    role = group.role
    pods = group.pods
    bounds = ""
    if pods.min < pods.initial:
        bounds += f", at least {pods.min}"
    if pods.max > pods.initial:
        bounds += f", at most {pods.max}"
    contents = f"{format_count(group.cpus, 'CPU')} and {group.per_pod * role.memory_gib:g} GiB"
    if group.gpus:
        contents = f"{format_count(group.gpus, 'GPU')}, {contents}"
    kind = "engine" if group.elastic else "rank"
    workers = f"{format_count(group.workers.initial, kind)} {_worker_size(group)}"
    return f"{group.name}: {workers} -> {format_count(pods.initial, 'pod')}{bounds}; a pod has {contents} for them"


def _worker_size(group: PodGroup) -> str:
    role = group.role
    if not role.gpus:
        return "on CPUs"
    if group.elastic:
        return f"of TP {role.tensor_parallel}"
    return f"of {format_count(role.gpus, 'GPU')}"


def _total_line(config: JobConfig, groups: Sequence[PodGroup]) -> str:
    start = 0
    most = 0
    for group in _own_gpus(config, groups):
        start += group.pods.initial * group.gpus
        most += group.pods.max * group.gpus
    bound = f", at most {most}" if most > start else ""
    return f"in all: {format_count(start, 'GPU')}{bound}, and a head without workers"


def _own_gpus(config: JobConfig, groups: Sequence[PodGroup]) -> list[PodGroup]:
    """Return the groups without engines that run on the ranks' GPUs."""
    return [group for group in groups if not (config.shares_gpus and group.name == "rollout")]


def _shapes(config: JobConfig) -> tuple[dict[str, ModelShape], list[str]]:
    """Return shapes by pod group, and a warning for each model whose size is unknown on this machine."""
    shapes = dict[str, ModelShape]()
    remarks = []
    for model in config.models():
        shape = find_shape(model.name, model.revision)
        is_policy = model.key.endswith("policy")
        if shape is None and "reward" in shapes:
            remarks.append(f"reward: the size of {model.name} is not known on this machine; taken to be the policy's")
        elif shape is None:
            remarks.append(f"{model.key}={model.name}: its size is not known on this machine")
            return {}, remarks
        else:
            groups = ["learner", "critic", "rollout", "reward"] if is_policy else ["reward"]
            shapes |= dict.fromkeys(groups, shape)
    return shapes, remarks


def _fit(config: JobConfig, group: PodGroup, shape: ModelShape, gpu_bytes: float) -> Estimate:
    workers = group.workers.initial
    if isinstance(group.role, EngineConfig):
        sequences = group.role.max_num_seqs
        if config.responses_per_step is not None:
            sequences = ceil(config.responses_per_step / workers)
        return estimate_engine(shape, group.role, sequences=sequences, gpu_bytes=gpu_bytes)
    ranks = find_ranks(config)
    assert ranks is not None
    return ranks.estimate_gpu(shape, group.section, workers)


def _memory_lines(fits: Fits, gpu: str, gpu_gib: float) -> Iterator[str]:
    if not fits:
        yield "no estimate of GPU memory"
        return
    known_parts = set[str]().union(*(fit.parts for _, fit in fits))
    columns = [part for part in PARTS if part in known_parts]
    yield f"estimated GiB on each GPU, of {gpu_gib:g} ({gpu}):"
    yield _memory_row("", [*columns, "total"])
    for group, fit in fits:
        cells = [f"{fit.parts[part] / GIB:.1f}" if part in fit.parts else "-" for part in columns]
        total = f"{fit.total / GIB:.1f}"
        yield _memory_row(group.name, [*cells, total])
    for group, fit in fits:
        if group.elastic:
            sequences = format_count(fit.num_sequences, "sequence")
            yield (
                f"{group.name}: an engine must hold {sequences} at once; there is room for "
                f"{fit.fitting} of {group.role.max_model_len} tokens"
            )


def _memory_row(name: str, cells: Sequence[str]) -> str:
    padded = [f"{cell:>12}" for cell in cells]
    return f"  {name:<8}" + "".join(padded)


def _problems(config: JobConfig, shapes: Mapping[str, ModelShape], fits: Fits, gpu_gib: float) -> Iterator[str]:
    gpu_bytes = gpu_gib * GIB
    coresident = _coresident(config, fits, gpu_bytes)
    for group, fit in fits:
        if isinstance(group.role, EngineConfig):
            yield from _engine_problems(group, fit, shapes[group.name], gpu_bytes, coresident.get(group.name))
        else:
            yield from _rank_problems(config, group, fit, gpu_gib, coresident.get(group.name))
    rollout = _engine_on_ranks_gpus(config)
    if rollout is not None and config.cluster.gpu_sharing == "alternate" and "learner" in shapes:
        need = BYTES[rollout.dtype] * shapes["learner"].numel / GIB
        available = rollout.memory_gib
        if need > available:
            yield f"rollout.memory_gib is {available:g}: the weights of an engine that sleeps need {need:.0f}"


def _coresident(config: JobConfig, fits: Fits, gpu_bytes: float) -> dict[str, float]:
    """Return pod group -> memory of the other role on a shared GPU; empty if no GPU is shared."""
    ranks = [fit for group, fit in fits if group.name == "learner"]
    rollout = _engine_on_ranks_gpus(config)
    if not ranks or rollout is None:
        return {}
    return coresident_bytes(ranks[0], rollout, sharing=config.cluster.gpu_sharing, gpu_bytes=gpu_bytes)


def _engine_on_ranks_gpus(config: JobConfig) -> EngineConfig | None:
    """Return the engine of the policy if it shares the GPUs of the ranks."""
    if not config.shares_gpus:
        return None
    engines = [model.engine for model in config.policy_models()]
    return engines[0].config if engines and engines[0] is not None else None


def _engine_problems(
    group: PodGroup, fit: Estimate, shape: ModelShape, gpu_bytes: float, coresident: float | None
) -> Iterator[str]:
    """Yield the problems of engines. coresident: memory of the rank on the same GPU; None: there is no rank."""
    section = group.section
    role = group.role
    if fit.fitting == 0:
        more = "gpus" if coresident is None else "gpu_memory_utilization"
        yield f"{section}: no sequence fits beside the weights; raise {section}.{more} or lower max_model_len"
    why = find_uneven_heads(shape.num_attention_heads, shape.num_key_value_heads, role.tensor_parallel)
    if why:
        yield f"{section}.gpus is {role.gpus:g}, and the model has {why}; take a number that divides them"
    if coresident is None:
        return
    room = gpu_bytes - coresident
    if role.gpu_memory_utilization * gpu_bytes > room:
        room_share = max(0.0, room) / gpu_bytes
        yield (
            f"{section}.gpu_memory_utilization is {role.gpu_memory_utilization:g}, and the rank on the same "
            f"GPU leaves {room_share:.2f} of it; lower it or the rank's memory"
        )


def _rank_problems(
    config: JobConfig, group: PodGroup, fit: Estimate, gpu_gib: float, coresident: float | None
) -> Iterator[str]:
    """Yield the problem of ranks. coresident: memory of the engine on the same GPU; None: there is no engine."""
    share = 1.0
    if coresident is None and 0 < group.role.gpus < 1:
        share = group.role.gpus  # the rest belongs to engines, which take theirs at their start
    room = share * gpu_gib * GIB - (coresident or 0.0)
    if fit.total <= room:
        return
    engine = "" if coresident is None else f" beside {coresident / GIB:.0f} of the engine there"
    advice = ", or ".join(_memory_advice(config, group.section))
    part = "a GPU" if share == 1 else f"{share:g} of a GPU"
    yield f"{group.section}: about {fit.total / GIB:.0f} GiB on {part} of {gpu_gib:g}{engine}; {advice}"


def _memory_advice(config: JobConfig, section: str) -> Iterator[str]:
    """Yield the changes of the config that lower the memory of a rank, and that its other keys allow."""
    ranks = find_ranks(config)
    assert ranks is not None
    name = ranks.section
    options = ranks.options
    yield f"lower {name}.tokens_per_microbatch"
    if not options.gradient_checkpointing:
        yield f"set {name}.gradient_checkpointing=true"
    if config.shares_gpus:  # as many ranks as engines, and gpu_sharing=alternate forbids offload
        yield "train adapters (learner.lora)" if options.lora is None else "take a smaller model"
    else:
        yield f"raise {section}.workers"
        yield f"set {name}.offload=cpu"


def _room_warnings(fits: Fits) -> Iterator[str]:
    for group, fit in fits:
        if group.elastic and 0 < fit.fitting < fit.num_sequences:
            sequences = format_count(fit.num_sequences, "sequence")
            yield (
                f"{group.section}: an engine has room for {fit.fitting} of its {sequences} at "
                f"once, and the others wait; raise {group.section}.gpu_memory_utilization or lower max_model_len"
            )


def _group_warnings(groups: Sequence[PodGroup]) -> Iterator[str]:
    for group in groups:
        labels = group.role.labels
        section = group.section
        others = [other for other in groups if other is not group]
        matching = [other.name for other in others if matches_selector(other.labels, labels)]
        if matching:
            yield (
                f"{section}.labels is {labels or 'empty'}: its workers may land on pods of {', '.join(matching)}; "
                f"add {section}.labels.{ROLE_LABEL}={group.name}"
            )
        most = most_per_pod(group.role.gpus)
        ranks = group.workers.initial
        if not group.elastic and group.per_pod == 1 < min(most, ranks):
            yield (
                f"{section}.workers is {ranks}, which no number from 2 to {most} divides: each rank gets a pod of its "
                f"own, and all ranks communicate over the network; take a multiple of {most}"
            )


def _cluster_warnings(config: JobConfig, shape: ModelShape | None) -> Iterator[str]:
    cluster = config.cluster
    if cluster.placement_timeout_s < MIN_PLACEMENT_S:
        yield (
            f"cluster.placement_timeout_s is {cluster.placement_timeout_s:g}: pods that an autoscaler adds take "
            "minutes; 1800 gives them time"
        )
    ranks = find_ranks(config)
    if ranks is None or shape is None:
        return
    need = ranks.count_stored_bytes(shape) / GIB
    available = store_gib(config)
    if need > available:
        yield (
            f"cluster.object_store_gib is {available:g}: the policy's weights, held for late "
            f"engines, take {need:.0f}, and Ray writes to disk what it has no room for"
        )


def path_warnings(config: JobConfig, mount: str = SHARED) -> Iterator[str]:
    """Yield a warning for each path of the config that is not visible in pods, with the volume at `mount`."""
    artifacts = find_artifacts(config)
    for key, values in paths(config):
        for value in values:
            if key == "artifacts" or not isinstance(value, str):
                continue
            if value.startswith(f"{mount}/") or is_made_later(value, artifacts):
                continue
            if _looks_like_path(value) or Path(value).exists():  # rather than a name on the hub
                yield f"{key} is {value}: pods see {mount} and their image; put it there and give that path"


def _looks_like_path(value: str) -> bool:
    return value.startswith(("/", ".", "~")) or value.count("/") > 1 or value.endswith(DATA_FILES)
