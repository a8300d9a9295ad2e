"""Where actors may run: joins or starts the Ray cluster, checks that the roles fit, reserves one place per worker.

Nothing waits for ever: what does not fit is a UserError that says what is needed and what there is.
"""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from t2g.config import ClusterConfig, ProcessConfig
from t2g.deploy.preflight import shortfall
from t2g.errors import UserError

logger = logging.getLogger(__name__)

GIB = 2**30
LAST_LOOK_S = 0.1  # at a place, once the deadline is over: another one may have taken all the time


def resources(address: str | None) -> Mapping[str, float]:
    """What there is for actors, as Ray names it: on the cluster of `connect`, or on this machine."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        cpus, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().available
        return {"CPU": cpus, "GPU": torch.cuda.device_count(), "memory": memory}
    _join(address, ClusterConfig())
    try:
        return ray.cluster_resources()
    finally:
        ray.shutdown()


def connect(config: ClusterConfig, roles: Mapping[str, ProcessConfig]) -> None:
    """Join the cluster of `config.address`, else of the surrounding `ray job`, else start one on this machine.

    `roles` maps a role's config section (such as "rollout") to its resources, for every role of the job. Raises
    UserError when a new local cluster cannot hold them all at once, or one that was joined does not within
    `placement_timeout_s`: before any model is loaded.
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
        if address != "local":
            check_places(roles, timeout_s=config.placement_timeout_s)
        elif lacking := shortfall(roles, ray.cluster_resources()):
            raise UserError(f"this machine is too small: {lacking}")
    except BaseException:
        ray.shutdown()
        raise


def _start(config: ClusterConfig) -> None:
    """A cluster with the cores, GPUs and free memory of this machine or container, less the object store."""
    cpus = len(os.sched_getaffinity(0))
    ray.init(
        address="local",
        num_cpus=cpus if cpus < (os.cpu_count() or 1) else None,  # Ray knows a container's limits, but no affinity
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
        raise UserError(f"cluster.address: the Ray cluster at {address} cannot be joined: {reason:.300}") from error


def check_places(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> None:
    """Every worker of every role gets a place at the same time, and all are given back.

    Raises UserError when `timeout_s` is over: else the last role would hear of it after the others have loaded their
    models.
    """
    for group in reserve(roles, timeout_s=timeout_s):
        remove_placement_group(group)


def ask(config: ProcessConfig) -> PlacementGroup:
    """A place for one worker, which may come later or never: what waits is what an autoscaler reacts to."""
    bundle = {"CPU": config.cpus, "GPU": config.gpus, "memory": int(config.memory_gib * GIB)}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    return placement_group([bundle], bundle_label_selector=[config.labels] if config.labels else None)


def is_ready(place: PlacementGroup) -> bool:
    """Whether the place is there. Does not wait."""
    return bool(placement_group_table(place)["state"] == "CREATED")


def reserve(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> list[PlacementGroup]:
    """One placement group per worker, all ready. Raises UserError, and keeps none, when `timeout_s` is over.

    One group each: a worker comes and goes without the others.
    """
    deadline = time.monotonic() + timeout_s
    asked = [(name, ask(role)) for name, role in roles.items() for _ in range(role.num_processes)]
    # `wait` asks the cluster; `ready` would start a process in each place to ask.
    waiting = [name for name, group in asked if not group.wait(max(LAST_LOOK_S, deadline - time.monotonic()))]
    if not waiting:
        return [group for _, group in asked]
    have, left = _amounts(ray.cluster_resources()), _amounts(ray.available_resources())
    for _, group in asked:
        remove_placement_group(group)
    missing = "; ".join(
        f"{waiting.count(name)} of {roles[name].num_processes} {name} workers: each needs {wish(roles[name])}"
        for name in dict.fromkeys(waiting)
    )
    raise UserError(
        f"no place within {timeout_s:g} s for {missing}; the cluster has {have}, of which {left} are left beside the "
        f"others, and no node has more than {_most_gpus():g} GPUs; lower workers, cpus, gpus or memory_gib"
    )


def by_node(places: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Ready places of one worker each; those of a node stand together: ranks that follow each other are neighbours."""
    return sorted(places, key=lambda place: placement_group_table(place)["bundles_to_node_id"][0])


def wish(config: ProcessConfig) -> str:
    """What a place must have, in words."""
    labels = f" on a node with labels {dict(config.labels)}" if config.labels else ""
    return f"{config.cpus:g} CPUs, {config.gpus:g} GPUs and {config.memory_gib:g} GiB{labels}"


def _most_gpus() -> float:
    """Of one node: a worker's are all on one."""
    return max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])


def _amounts(resources: Mapping[str, float]) -> str:
    memory_gib = resources.get("memory", 0) / GIB
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs and {memory_gib:.1f} GiB"


def actor_options(
    config: ProcessConfig, group: PlacementGroup, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Ray options of a worker in its reserved place; environment: more variables of its process."""
    environment = {"OMP_NUM_THREADS": str(config.threads), **(environment or {})}
    if not config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # num_gpus=0 alone no longer hides the GPUs of others
    return {
        "num_cpus": config.cpus,
        "num_gpus": config.gpus,
        "memory": int(config.memory_gib * GIB),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        "runtime_env": {"env_vars": environment},
    }
