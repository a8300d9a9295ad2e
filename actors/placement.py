"""Where actors may run: joins or starts the Ray cluster, checks that the roles fit, reserves one place per worker.

Nothing waits for ever: what does not fit is a UserError that says what is needed and what there is.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from t2g.config import ClusterConfig, RoleConfig
from t2g.errors import UserError

GIB = 2**30
READY_POLL_S = 0.5
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What a machine or a cluster has free."""

    cpus: float
    gpus: float
    memory_gib: float


def connect(config: ClusterConfig, roles: Mapping[str, RoleConfig]) -> None:
    """Join the cluster of `config.address`, else of the surrounding `ray job`, else start one on this machine.

    `roles` maps a role's config section (such as "rollout") to its resources, for every role of the job. Raises
    UserError when a new local cluster cannot hold them; a cluster that was joined may still grow, and only `reserve`
    can tell.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address in (None, "local"):
        shortfall = describe_shortfall(roles, this_machine(config.object_store_gib))
        if shortfall:
            raise UserError(f"this machine is too small: {shortfall}")
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            object_store_memory=int(config.object_store_gib * GIB),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise UserError(f"cluster.address: no Ray cluster answers at {address}") from error


def this_machine(object_store_gib: float) -> Supply:
    """Cores, GPUs, and the memory that is free once the object store is full."""
    free = psutil.virtual_memory().available
    if CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()) != "max":
        free = min(free, int(limit))
    import torch

    return Supply(cpus=os.cpu_count() or 1, gpus=torch.cuda.device_count(), memory_gib=free / GIB - object_store_gib)


def describe_shortfall(roles: Mapping[str, RoleConfig], supply: Supply) -> str | None:
    """One sentence about the first resource of which the roles together need more than there is, None if they fit.

    2 rollout workers of 1.5 GiB and one learner of 3 GiB on 4 GiB:
    "6 GiB of memory needed (rollout 2 x 1.5, learner 1 x 3), 4 free; lower workers or memory_gib"
    """
    resources = (("cpus", "CPUs", supply.cpus), ("gpus", "GPUs", supply.gpus))
    for field, unit, have in (*resources, ("memory_gib", "GiB of memory", supply.memory_gib)):
        need = sum(role.workers * getattr(role, field) for role in roles.values())
        if need > have + 1e-6:
            parts = ", ".join(f"{name} {r.workers} x {getattr(r, field):g}" for name, r in roles.items())
            return f"{need:g} {unit} needed ({parts}), {have:.3g} free; lower workers or {field}"
    return None


def reserve(role: str, config: RoleConfig, *, timeout_s: float) -> list[PlacementGroup]:
    """One placement group per worker, all ready. Raises UserError, and keeps none, when `timeout_s` is over.

    One group each: a worker comes and goes without the others, and a pending group is what an autoscaler reacts to.
    """
    bundle = {"CPU": config.cpus, "GPU": config.gpus, "memory": int(config.memory_gib * GIB)}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    selector = [config.labels] if config.labels else None
    groups = [placement_group([bundle], bundle_label_selector=selector) for _ in range(config.workers)]
    _, waiting = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=timeout_s)
    if not waiting:
        return groups
    for group in groups:
        remove_placement_group(group)
    raise UserError(
        f"no place for {len(waiting)} of {config.workers} {role} workers within {timeout_s:g} s: each needs "
        f"{config.cpus:g} CPUs, {config.gpus:g} GPUs and {config.memory_gib:g} GiB{_on(config.labels)}; "
        f"free in the cluster: {_free()}"
    )


def _on(labels: Mapping[str, str]) -> str:
    return f" on a node with labels {dict(labels)}" if labels else ""


def _free() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs, {free.get('memory', 0) / GIB:.1f} GiB"


def actor_options(config: RoleConfig, group: PlacementGroup) -> dict[str, Any]:
    """Ray options of a worker in its reserved place."""
    environment = {"OMP_NUM_THREADS": str(config.threads)}
    if not config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # num_gpus=0 alone no longer hides the GPUs of others
    return {
        "num_cpus": config.cpus,
        "num_gpus": config.gpus,
        "memory": int(config.memory_gib * GIB),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        "runtime_env": {"env_vars": environment},
    }
