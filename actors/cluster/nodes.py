"""Checks of every node of a live cluster and of the connections between nodes, by small tasks without a model."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.util.state import list_placement_groups

from actors.cluster.fanout import first_line
from actors.cluster.shortage import NAME_END, WAITING
from t2g.config import EngineConfig, ProcessConfig, RoleConfig
from t2g.deploy.diagnosis import Node, PendingGroup, Unreachable
from t2g.errors import UserError
from t2g.resources.preflight import matches_selector
from t2g.runs.versions import collect_versions
from t2g.sandbox import find_refusal

SHARED_MEMORY = "/dev/shm"
CONNECT_S = 5.0
Listening = Mapping[str, tuple[str, int]]  # by the name of a node: host and port


def inspect_nodes(shared: Path | None, require: Sequence[str], *, timeout_s: float) -> list[Node]:
    """Return every living node with the results of its checks.

    Args:
        shared: Folder that every node should see: this process writes a file there.
        require: What the sandbox of a node must isolate.
        timeout_s: A node that does not answer within this time has a fault.

    Raises:
        UserError: This process cannot write to `shared`.
    """
    alive = _list_alive()
    with ExitStack() as stack:
        probe = None
        if shared is not None:
            try:
                shared.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(NamedTemporaryFile(dir=shared, prefix=".doctor-"))
            except OSError as error:
                raise UserError(f"{shared}: a run could not write there: {error.strerror}") from None
            probe = Path(file.name)
        refs = [_submit_to_node(node["NodeID"], inspect_node, probe, require) for node in alive]
        deadline = time.monotonic() + timeout_s
        nodes: list[Node] = []
        for node, ref in zip(alive, refs, strict=True):
            inspected = _make_node(node, ref, deadline, timeout_s)
            if not inspected.fault:
                clock_error_s = _measure_clock(node["NodeID"])
                inspected = replace(inspected, clock_error_s=clock_error_s)
            nodes.append(inspected)
        return nodes


def _list_alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def pending_groups() -> list[PendingGroup]:
    """Return the pending placement groups of all jobs of the cluster. Needs the dashboard."""
    pending: list[PendingGroup] = []
    for group in list_placement_groups(detail=True, limit=10_000):
        if group.state not in WAITING:
            continue
        name = group.name.partition(NAME_END)[0] or group.placement_group_id[:12]
        bundles = tuple(bundle["unit_resources"] for bundle in group.bundles)
        selectors = tuple(bundle.get("label_selector", {}) for bundle in group.bundles)
        pending.append(PendingGroup(name=name, bundles=bundles, selectors=selectors))
    return pending


def inspect_node(path: Path | None, require: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a `Node`, on that node."""
    return {
        "versions": collect_versions(),
        "sees_file": None if path is None else path.exists(),
        "sandbox": find_refusal(require) if require else "",
        "shared_bytes": _shared_bytes(),
    }


def _shared_bytes() -> int | None:
    try:
        volume = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return volume.f_blocks * volume.f_frsize


def read_clock() -> float:
    """Return the time of the node, in s since the epoch."""
    return time.time()


def _measure_clock(node_id: str) -> float:
    """Return `bound_clock_error` of a node that has answered before; 0 if it does not answer within CONNECT_S."""
    deadline = time.monotonic() + CONNECT_S  # its own: another node may have used up the deadline of all
    requested = time.time()
    answer = _answer(_submit_to_node(node_id, read_clock), deadline)
    return 0.0 if answer is None else bound_clock_error(requested, answer, time.time())


def bound_clock_error(requested: float, answer: float, received: float) -> float:
    """Return the least error of a clock that was read between two times of this one, in s; above 0: it is ahead.

    >>> bound_clock_error(100.0, 108.0, 101.0), bound_clock_error(100.0, 100.5, 101.0)
    (7.0, 0.0)
    """
    if answer > received:
        return answer - received
    return min(0.0, answer - requested)


class Listener:
    """A port like that of a learner's rendezvous; it is open while this actor lives."""

    def listen(self) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        self._socket = socket.create_server((host, 0))
        return host, self._socket.getsockname()[1]


def _select_nodes(nodes: Sequence[Mapping[str, Any]], roles: Sequence[ProcessConfig]) -> list[Mapping[str, Any]]:
    """Return the nodes on which a process of one of the roles may run."""

    def has_role(node: Mapping[str, Any]) -> bool:
        return any(matches_selector(node["Labels"], role.labels) for role in roles)

    return [node for node in nodes if has_role(node)]


def find_unreachable(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> list[Unreachable]:
    """Return the failing connections from a node of ranks or engines to a node of ranks.

    Nodes that do not answer are left out: `inspect_nodes` reports them.
    """
    alive = _list_alive()
    ranks = _select_nodes(alive, [role for role in roles.values() if isinstance(role, RoleConfig)])
    engines = _select_nodes(alive, [role for role in roles.values() if isinstance(role, EngineConfig)])
    names = {node["NodeID"]: node["NodeName"] for node in [*ranks, *engines]}
    deadline = time.monotonic() + timeout_s
    if not ranks or len(names) <= 1:
        return []

    listeners = [_submit_to_node(node["NodeID"], Listener) for node in ranks]
    try:
        listening: dict[str, tuple[str, int]] = {}
        for node, listener in zip(ranks, listeners, strict=True):
            address = _answer(listener.listen.remote(), deadline)
            if address:
                listening[node["NodeName"]] = address
        if not listening:
            return []

        refs = {id_: _submit_to_node(id_, find_failed_connections, listening, CONNECT_S) for id_ in names}
        failures = {names[node_id]: _answer(ref, deadline) or {} for node_id, ref in refs.items()}
    finally:
        for listener in listeners:
            ray.kill(listener)

    unreachable: list[Unreachable] = []
    for source, failed in failures.items():
        unreachable += [Unreachable(source=source, target=target, reason=reason) for target, reason in failed.items()]
    return unreachable


def find_failed_connections(listening: Listening, timeout_s: float) -> dict[str, str]:
    """Return the nodes that refuse a connection from this node: name -> reason."""
    refused = {}
    for name, (host, port) in listening.items():
        try:
            socket.create_connection((host, port), timeout_s).close()
        except OSError as error:
            refused[name] = f"port {port} of {host}: {error.strerror or error}"
    return refused


def _answer(ref: Any, deadline: float) -> Any:
    """Return the result, None if the call fails or times out."""
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except RayError:
        return None


def _submit_to_node(node_id: str, work: Any, *args: Any) -> Any:
    """Start a task or an actor on a node."""
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    options: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": strategy}
    if not isinstance(work, type):
        options["max_retries"] = 0
    return ray.remote(work).options(**options).remote(*args)


def _make_node(node: dict[str, Any], ref: Any, deadline: float, timeout_s: float) -> Node:
    fields: dict[str, Any] = {"versions": {}}
    try:
        fields = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(ref, force=True)
        fields["fault"] = f"it did not answer within {timeout_s:g} s"
    except RayError as error:
        fields["fault"] = first_line(error)
    return Node(name=node["NodeName"], labels=node["Labels"], resources=node["Resources"], **fields)
