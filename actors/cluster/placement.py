"""Where actors may run: joins or starts the Ray cluster, checks that the roles fit, reserves their places.

Nothing waits for ever: what does not fit is a UserError that says what is needed and what there is.
"""

import gc
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.utils import estimate_available_memory, get_num_cpus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.fanout import collect
from t2g.config import ClusterConfig, ProcessConfig, RoleConfig
from t2g.deploy.pods import satisfies
from t2g.deploy.preflight import shortfall
from t2g.errors import UserError

logger = logging.getLogger(__name__)

GIB = 2**30
LAST_LOOK_S = 0.1  # at a place, once the deadline is over: another one may have taken all the time


def resources(address: str | None) -> Mapping[str, float]:
    """What there is for actors, as Ray names it: on the cluster of `connect`, or on this machine. CPU is that of its
    largest node, since no process has threads on two."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        return {"CPU": _cores(), "GPU": torch.cuda.device_count(), "memory": estimate_available_memory()}
    _join(address, ClusterConfig())
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return ray.cluster_resources() | {"CPU": max(node.get("CPU", 0) for node in nodes)}
    finally:
        ray.shutdown()


def _cores() -> int:
    """Of this machine or container, for this process: Ray knows a container's quota, but no affinity."""
    return max(1, min(len(os.sched_getaffinity(0)), int(get_num_cpus(override_docker_cpu_warning=True))))


def connect(config: ClusterConfig, roles: Mapping[str, ProcessConfig]) -> None:
    """Join the cluster of `config.address`, else of the surrounding `ray job`, else start one on this machine.

    `roles` maps a role's config section (such as "rollout") to its resources, for every role of the job. Raises
    UserError, before any model is loaded, when this machine or a cluster without an autoscaler can never hold them all,
    and when a cluster that was joined does not within `placement_timeout_s`.
    """
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        _start(config)
    else:
        _join(address, config)
    gpus = ray.cluster_resources().get("GPU", 0)
    if gpus and roles and not any(role.gpus for role in roles.values()):
        section = next(iter(roles))
        logger.warning("%g GPUs are there, and this job runs on CPUs: %s.gpus=auto takes them", gpus, section)
    try:
        check_capacity(roles, None if address == "local" else address)
        if address != "local":
            check_placement(roles, timeout_s=config.placement_timeout_s)
    except BaseException:
        ray.shutdown()
        raise
    # Tens of thousands of requests that wait are live objects: at Python's own pace its collector goes through all of
    # them again and again, and takes two thirds of the driver's time.
    gc.set_threshold(100_000, 20, 20)


def _start(config: ClusterConfig) -> None:
    """A cluster with the cores, GPUs and free memory of this machine or container, less the object store."""
    ray.init(
        address="local",
        num_cpus=_cores(),
        object_store_memory=int((config.object_store_gib or 1) * GIB),
        include_dashboard=False,
        _system_config={"worker_niceness": 0},  # Ray's own 15 starves engines and ranks beside whatever else runs
        **_quiet(config),
    )


def _quiet(config: ClusterConfig) -> dict[str, Any]:
    """How this process joins; what it starts has `config.env`, to which `actor_options` add."""
    environment = {"runtime_env": {"env_vars": config.env}} if config.env else {}
    return {"log_to_driver": False, "logging_level": logging.ERROR, **environment}


def _join(address: str, config: ClusterConfig) -> None:
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"cluster.address or RAY_ADDRESS is {address}, where jobs are submitted; a driver needs the cluster's own "
            "address (HOST:6379), or to be started by `ray job submit`"
        )
    try:
        ray.init(address=address, **_quiet(config))
    except ConnectionError as error:
        raise UserError(f"cluster.address: no Ray cluster answers at {address}") from error
    except (ValueError, RuntimeError) as error:  # another version of Ray or Python, or no address at all
        reason = " ".join(str(error).split())
        raise UserError(f"cluster.address: the Ray cluster at {address} cannot be joined: {reason}") from error


def check_capacity(roles: Mapping[str, ProcessConfig], address: str | None) -> None:
    """UserError for roles that this machine, or the cluster of that address, can never hold: by its books, whoever has
    the resources now."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    misfit = shortfall(roles, ray.cluster_resources()) or describe_misfit(roles, alive)
    if misfit and not (address and may_grow()):
        where = f"the cluster at {address}, to which no autoscaler adds nodes," if address else "this machine"
        raise UserError(f"{where} is too small: {misfit}")


def describe_misfit(roles: Mapping[str, ProcessConfig], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """One sentence about the first role of which no node can hold a worker. nodes: as `ray.nodes` has them."""
    for section, role in roles.items():
        fitting = (node["Resources"] for node in nodes if satisfies(node["Labels"], role.labels))
        if not any(all(have.get(name, 0) >= need for name, need in bundle(role).items()) for have in fitting):
            return f"{section}: no node has {wish(role)}; lower what a worker needs"
    return None


def may_grow() -> bool:
    """Whether an autoscaler may add nodes to the cluster, as far as it is known. Ray 2.60 gives nodes that were started
    by hand types of their own, node_<id>; its first autoscaler tells types in a report, its second one of each node.
    """
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    types = {node.ray_node_type_name for node in (*status.active_nodes, *status.idle_nodes)}
    if not is_autoscaler_v2(fetch_from_server=True):
        report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}").get("autoscaler_report")
        types |= set(report["active_nodes"]) if report else {"not known"}
    return not types <= {f"node_{node['NodeID']}" for node in ray.nodes()}


def check_placement(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> None:
    """All workers of all roles get their places at the same time, and give them back.

    Raises UserError when `timeout_s` is over: else the last role would hear of it after the others have loaded their
    models.
    """
    for group in reserve(roles, timeout_s=timeout_s):
        remove_placement_group(group)


def ask(config: ProcessConfig) -> PlacementGroup:
    """A place for one engine, or for all ranks of a role on as few nodes as there can be; it may come later or never:
    what waits is what an autoscaler reacts to."""
    size = _size(config)
    selectors = [config.labels] * size if config.labels else None
    return placement_group([bundle(config)] * size, strategy="PACK", bundle_label_selector=selectors)


def _size(config: ProcessConfig) -> int:
    """Workers of one place: ranks come and go together, engines alone."""
    return config.workers if isinstance(config, RoleConfig) else 1


def bundle(config: ProcessConfig) -> dict[str, float]:
    bundle = {"CPU": config.cpus, "GPU": config.gpus, "memory": int(config.memory_gib * GIB)}
    return {name: amount for name, amount in bundle.items() if amount}


def is_ready(place: PlacementGroup) -> bool:
    """Whether the place is there. Does not wait."""
    return bool(placement_group_table(place)["state"] == "CREATED")


def reserve(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> list[PlacementGroup]:
    """The places of all workers, see `ask`, all ready. Raises UserError, and keeps none, when `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    groups = [(name, ask(role)) for name, role in roles.items() for _ in range(role.num_processes // _size(role))]
    # `wait` asks the cluster; `ready` would start a process in each place to ask.
    waiting = [name for name, group in groups if not group.wait(max(LAST_LOOK_S, deadline - time.monotonic()))]
    if not waiting:
        return [group for _, group in groups]
    have, left = _amounts(ray.cluster_resources()), _amounts(ray.available_resources())
    for _, group in groups:
        remove_placement_group(group)
    missing = "; ".join(
        f"{waiting.count(name) * _size(role)} of {role.num_processes} {name} workers: each needs {wish(role)}"
        for name, role in roles.items()
        if name in waiting
    )
    raise UserError(
        f"no place within {timeout_s:g} s for {missing}; the cluster has {have}, of which {left} are left beside the "
        "others; lower workers, cpus, gpus or memory_gib"
    )


def order_bundles_by_gpu(place: PlacementGroup, config: ProcessConfig, *, timeout_s: float) -> list[int]:
    """Bundles of a ready place by node, and there by GPU: ranks that follow each other are neighbours.

    Which GPU is whose only a process in the bundle knows. Raises LearnerLost where one does not say within timeout_s.
    """
    nodes: Mapping[int, str] = placement_group_table(place)["bundles_to_node_id"]
    gpus: Sequence[Any] = [0] * len(nodes)
    if config.gpus and len(nodes) > 1:
        # A function of a module would import that first, for seconds.
        look = ray.remote(lambda: [int(gpu) for gpu in ray.get_gpu_ids()])
        requests = [
            look.options(**actor_options(config, place, bundle=i), max_retries=0).remote() for i in sorted(nodes)
        ]
        gpus = collect(requests, who="place", call="the look at its GPU", timeout_s=timeout_s)
    return sorted(nodes, key=lambda bundle: (nodes[bundle], gpus[bundle]))


def wish(config: ProcessConfig) -> str:
    """Return the requirements of a place as text."""
    labels = f" on a node with labels {dict(config.labels)}" if config.labels else ""
    return f"{config.cpus:g} CPUs, {config.gpus:g} GPUs and {config.memory_gib:g} GiB{labels}"


def _amounts(resources: Mapping[str, float]) -> str:
    memory_gib = resources.get("memory", 0) / GIB
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs and {memory_gib:.1f} GiB"


def process_environment(config: ProcessConfig) -> dict[str, str]:
    """num_gpus=0 alone no longer hides the GPUs of others."""
    return {"OMP_NUM_THREADS": str(config.threads), **({} if config.gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def actor_options(
    config: ProcessConfig, group: PlacementGroup, environment: Mapping[str, str] | None = None, *, bundle: int = 0
) -> dict[str, Any]:
    """Ray options of a worker in a bundle of its reserved place; environment: more variables of its process."""
    return {
        "num_cpus": config.cpus,
        "num_gpus": config.gpus,
        "memory": int(config.memory_gib * GIB),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        "runtime_env": {"env_vars": process_environment(config) | {**(environment or {})}},
    }
