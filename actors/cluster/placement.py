"""Placement of actors: join or start the Ray cluster, check that the roles fit, reserve their placement groups.

Every wait has a timeout. A role that does not fit is a UserError with its requirements and the cluster's resources.
"""

import gc
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psutil
import ray
import torch
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.state import available_resources_per_node
from ray._private.utils import estimate_available_memory, get_num_cpus
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.experimental.internal_kv import _internal_kv_get
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.cluster.fanout import collect
from actors.cluster.shortage import NAME_END, describe_free, describe_waiting
from t2g.config import ClusterConfig, ProcessConfig
from t2g.errors import UserError
from t2g.resources.memory import GIB
from t2g.resources.preflight import matches_selector, shortfall

logger = logging.getLogger(__name__)

SLOW_START = "timed out during startup"  # in Ray's error when a node is not registered within 30 s
LONG_PATH = "AF_UNIX path length"  # in Ray's error when a socket's path exceeds 107 bytes
END_S = 10.0  # for processes of a start that failed
LAST_LOOK_S = 0.1  # for each group after the deadline: the wait for an earlier one may have taken all the time


def resources(address: str | None) -> Mapping[str, float]:
    """Return the resources for actors, by Ray's names, of the cluster of `connect` or of this machine.

    CPU is that of the largest node, since a process cannot have threads on two.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        return {"CPU": _cores(), "GPU": torch.cuda.device_count(), "memory": estimate_available_memory()}
    _join(address, ClusterConfig())
    try:
        cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        return ray.cluster_resources() | {"CPU": max(cores)}
    finally:
        ray.shutdown()


def _cores() -> int:
    """Return the cores for this process. Ray's own count ignores its CPU affinity."""
    allowed = len(os.sched_getaffinity(0))
    counted = int(get_num_cpus(override_docker_cpu_warning=True))
    return max(1, min(allowed, counted))


def connect(config: ClusterConfig, roles: Mapping[str, ProcessConfig]) -> None:
    """Join the cluster of `config.address`, else of the surrounding `ray job`, else start one on this machine.

    Args:
        roles: The resources of every role of the job, by config section such as "rollout".

    Raises:
        UserError: The roles exceed this machine or a cluster without an autoscaler, or do not fit into a joined cluster
            within `placement_timeout_s`. It is raised before any model is loaded.
    """
    address = config.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        _start(config)
    else:
        _join(address, config)
    gpus = ray.cluster_resources().get("GPU", 0)
    if gpus and roles and not any(role.gpus for role in roles.values()):
        first_section = next(iter(roles))
        remedy = f"set {first_section}.gpus" if torch.version.cuda else "install the GPU packages: `make gpu`"
        logger.warning("Ray has %g GPUs, and this job runs on CPUs: %s", gpus, remedy)
    try:
        check_capacity(roles, None if address == "local" else address)
        if address != "local":
            check_placement(roles, timeout_s=config.placement_timeout_s)
    except BaseException:
        ray.shutdown()
        raise
    # Tens of thousands of waiting requests are live objects: with Python's default thresholds its garbage collector
    # would take two thirds of the driver's time.
    gc.set_threshold(100_000, 20, 20)


def _start(config: ClusterConfig) -> None:
    """Start a cluster, once more if Ray's own limit for its start was exceeded, as on a loaded machine.

    Raises:
        UserError: It did not start twice, or the folder of temporary files cannot hold Ray's sockets.
    """
    check_temporary_folder()
    try:
        _init_local(config)
        return
    except TimeoutError as error:
        logger.warning("%s; it is started once more", error)
    try:
        _init_local(config)
    except TimeoutError as error:
        load = os.getloadavg()[0]
        raise UserError(
            f"{error} for the second time, with a load of {load:.0f} on {_cores()} cores; start the command again when "
            "the machine has less to do"
        ) from error


def check_temporary_folder() -> None:
    """Check that Ray can make its sockets in the folder of temporary files: it encodes their paths as ASCII."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        folder = os.environ.get(name)
        if folder is not None and not folder.isascii():
            raise UserError(f"{name}={folder}: Ray's sockets need a path of ASCII characters; set {name} to one")


def _init_local(config: ClusterConfig) -> None:
    """Start a cluster with the cores, GPUs and free memory of this machine or container, less the object store.

    Raises:
        TimeoutError: Ray's processes did not start in time; they are ended.
        UserError: The folder of temporary files has too long a path.
    """
    this_process = psutil.Process()
    before = set(this_process.children(recursive=True))
    try:
        _init_ray(config)
    except Exception as error:  # Ray has no type of its own for these errors
        message = str(error)
        if LONG_PATH in message:
            name = "RAY_TMPDIR" if os.environ.get("RAY_TMPDIR") else "TMPDIR"
            folder = os.environ.get(name)
            raise UserError(f"{name}={folder}: its path is too long for Ray's sockets; set a shorter one") from error
        if SLOW_START not in message:
            raise
        after = set(this_process.children(recursive=True))
        end_processes(after - before)
        raise TimeoutError("Ray did not start within 30 s") from error


def end_processes(processes: set[psutil.Process]) -> None:
    """Kill processes and wait for their end."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=END_S)


def _init_ray(config: ClusterConfig) -> None:
    ray.init(
        address="local",
        num_cpus=_cores(),
        object_store_memory=int((config.object_store_gib or 1) * GIB),
        include_dashboard=False,
        _system_config={"worker_niceness": 0},  # Ray's own 15 starves engines and ranks beside whatever else runs
        **_init_options(config),
    )


def _init_options(config: ClusterConfig) -> dict[str, Any]:
    """Return the options of `ray.init`. Actors inherit `config.env`, to which `actor_options` adds.

    Raises:
        UserError: A notebook has connected Ray: the end of the job would disconnect it.
    """
    if ray.is_initialized():
        raise UserError("Ray is connected in this Python process, and a job connects it itself: call ray.shutdown()")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.env:
        options["runtime_env"] = {"env_vars": config.env}
    return options


def _join(address: str, config: ClusterConfig) -> None:
    if address.startswith(("http://", "https://")):
        raise UserError(
            f"cluster.address or RAY_ADDRESS is {address}, where jobs are submitted; a driver needs the cluster's own "
            "address (HOST:6379), or to be started by `ray job submit`"
        )
    try:
        ray.init(address=address, **_init_options(config))
    except ConnectionError as error:
        raise UserError(f"cluster.address or RAY_ADDRESS: no Ray cluster answers at {address}") from error
    except (ValueError, RuntimeError) as error:  # another version of Ray or Python, or no address at all
        reason = " ".join(str(error).split())
        raise UserError(
            f"cluster.address or RAY_ADDRESS: the cluster at {address} cannot be joined: {reason}"
        ) from error


def check_capacity(roles: Mapping[str, ProcessConfig], address: str | None) -> None:
    """Raise UserError for roles that exceed the total resources of this machine, or of the cluster at `address`."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    misfit = shortfall(roles, ray.cluster_resources()) or describe_misfit(roles, alive)
    if misfit and not (address and may_grow()):
        where = f"the cluster at {address}, to which no autoscaler adds nodes," if address else "this machine"
        raise UserError(f"{where} is too small: {misfit}")


def describe_misfit(roles: Mapping[str, ProcessConfig], nodes: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the first role whose worker fits on no node, None if all fit. nodes: of `ray.nodes`."""
    for section, role in roles.items():
        needs = bundle(role)
        allowed = (node["Resources"] for node in nodes if matches_selector(node["Labels"], role.labels))
        if not any(_has_room(node_resources, needs) for node_resources in allowed):
            return f"{section}: no node has {describe_requirements(role)}; lower what a worker needs"
    return None


def _has_room(node_resources: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return all(node_resources.get(name, 0) >= amount for name, amount in needs.items())


def may_grow() -> bool:
    """Return whether an autoscaler may add nodes to the cluster.

    Ray 2.60 gives manually started nodes the type node_<id>. Its first autoscaler has the types in a report, its second
    one in the status of each node.
    """
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = (*status.active_nodes, *status.idle_nodes)
    types = {node.ray_node_type_name for node in nodes}
    if not is_autoscaler_v2(fetch_from_server=True):
        autoscaling = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}")
        report = autoscaling.get("autoscaler_report")
        types |= set(report["active_nodes"]) if report else {"not known"}
    types_of_manual_nodes = {f"node_{node['NodeID']}" for node in ray.nodes()}
    return not types <= types_of_manual_nodes


def check_placement(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> None:
    """Reserve the placement groups of all workers of all roles at the same time, then remove them.

    Raises:
        UserError: They do not fit within `timeout_s`. Otherwise the last role would fail after the others have loaded
            their models.
    """
    for group in reserve(roles, timeout_s=timeout_s):
        remove_placement_group(group)


def request_placement(config: ProcessConfig, section: str) -> PlacementGroup:
    """Request a placement group for one engine, or for all ranks of a section on as few nodes as possible.

    It becomes ready later or never. An autoscaler reacts to pending placement groups.
    """
    size = config.group_size
    selectors = [config.labels] * size if config.labels else None
    name = f"{section}{NAME_END}{uuid4().hex}"  # Ray refuses a name that exists
    return placement_group([bundle(config)] * size, strategy="PACK", bundle_label_selector=selectors, name=name)


def bundle(config: ProcessConfig) -> dict[str, float]:
    memory = int(config.memory_gib * GIB)
    bundle = {"CPU": config.cpus, "GPU": config.gpus, "memory": memory}
    return {name: amount for name, amount in bundle.items() if amount}


def is_ready(group: PlacementGroup) -> bool:
    """Return whether the placement group is ready, without waiting."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def reserve(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> list[PlacementGroup]:
    """Return the placement groups of all workers, see `request_placement`, once all are ready.

    Raises:
        UserError: They are not ready within `timeout_s`; none is kept.
    """
    deadline = time.monotonic() + timeout_s
    groups: list[tuple[str, PlacementGroup]] = []
    for name, role in roles.items():
        num_groups = role.num_processes // role.group_size
        groups += [(name, request_placement(role, name)) for _ in range(num_groups)]

    waiting: list[str] = []  # the section of each placement group that is not ready
    for name, group in groups:
        remaining_s = max(LAST_LOOK_S, deadline - time.monotonic())
        if not group.wait(remaining_s):  # it queries the cluster; `ready` would start a process in the group
            waiting.append(name)
    if not waiting:
        return [group for _, group in groups]

    try:
        raise make_shortage_error(roles, waiting, timeout_s=timeout_s)
    finally:  # also where the cluster does not say what is free
        for _, group in groups:
            remove_placement_group(group)


def make_shortage_error(roles: Mapping[str, ProcessConfig], waiting: Sequence[str], *, timeout_s: float) -> UserError:
    """Return the error of placement groups that are not ready: what is free on each node, and what waits for what.

    Args:
        waiting: The section of each such placement group.
    """
    missing: list[str] = []
    for name, role in roles.items():
        if name not in waiting:
            continue
        num_workers = waiting.count(name) * role.group_size
        needs = describe_requirements(role)
        missing.append(f"{num_workers} of {role.num_processes} {name} workers: each needs {needs}")
    free = describe_free(ray.nodes(), available_resources_per_node())
    groups = list(placement_group_table().values())
    return UserError(
        f"no place within {timeout_s:g} s for {'; '.join(missing)}. Free: {free}. Waiting: {describe_waiting(groups)}. "
        "Lower workers, cpus, gpus or memory_gib, or raise cluster.placement_timeout_s where nodes are being added"
    )


def order_bundles_by_gpu(group: PlacementGroup, config: ProcessConfig, *, timeout_s: float) -> list[int]:
    """Return the bundles of a ready placement group ordered by node and GPU, so that successive ranks are neighbors.

    Only a process in a bundle can see its GPU.

    Raises:
        LearnerLost: A bundle does not answer within timeout_s.
    """
    nodes: Mapping[int, str] = placement_group_table(group)["bundles_to_node_id"]
    gpus: Sequence[list[str]] = [[]] * len(nodes)
    if config.gpus and len(nodes) > 1:
        # A function of a module would import that first, for seconds.
        query = ray.remote(lambda: [str(gpu) for gpu in ray.get_gpu_ids()])
        requests: list[Any] = []
        for index in sorted(nodes):
            options = actor_options(config, group, bundle=index)
            requests.append(query.options(**options, max_retries=0).remote())
        gpus = collect(requests, actor_name="placement group bundle", call="the query of its GPU", timeout_s=timeout_s)
    return sorted(nodes, key=lambda bundle: (nodes[bundle], [_gpu_order(gpu) for gpu in gpus[bundle]]))


def _gpu_order(gpu: str) -> tuple[int, str]:
    """Return a sort key of a GPU's name. Where CUDA_VISIBLE_DEVICES has UUIDs or MIG names, Ray gives these.

    >>> sorted(["10", "9", "MIG-b", "MIG-a"], key=_gpu_order)
    ['9', '10', 'MIG-a', 'MIG-b']
    """
    return len(gpu), gpu


def describe_requirements(config: ProcessConfig) -> str:
    """Return the requirements of a worker as text."""
    labels = f" on a node with labels {dict(config.labels)}" if config.labels else ""
    return f"{config.cpus:g} CPUs, {config.gpus:g} GPUs and {config.memory_gib:g} GiB{labels}"


def process_environment(config: ProcessConfig) -> dict[str, str]:
    """Return the environment of a worker. num_gpus=0 alone no longer hides the GPUs of other processes."""
    environment = {"OMP_NUM_THREADS": str(config.threads)}
    if not config.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def listening_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which gloo, NCCL and vLLM listen on this node's address only.

    Variables that `environment` already has are left out.
    """
    address = ray.util.get_node_ip_address()
    variables = {"VLLM_HOST_IP": address}
    interface = _find_interface(address)
    if interface:
        variables["GLOO_SOCKET_IFNAME"] = interface
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"
    return {name: value for name, value in variables.items() if value and name not in environment}


def _find_interface(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(known.address == address for known in addresses):
            return name
    return None


def actor_options(
    config: ProcessConfig, group: PlacementGroup, environment: Mapping[str, str] | None = None, *, bundle: int = 0
) -> dict[str, Any]:
    """Return Ray's options of a worker in a bundle of its placement group; `environment` adds variables."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    variables = process_environment(config)
    variables.update(environment or {})
    return {
        "num_cpus": config.cpus,
        "num_gpus": config.gpus,
        "memory": int(config.memory_gib * GIB),
        "scheduling_strategy": strategy,
        "runtime_env": {"env_vars": variables},
    }
