"""Looks at every node of a live cluster, and from node to node: tiny tasks and listeners, no model."""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.util.state import list_placement_groups

from actors.cluster.fanout import first_line
from t2g.config import ProcessConfig
from t2g.deploy.doctor import Node, PendingGroup, Unreachable
from t2g.deploy.pods import satisfies
from t2g.errors import UserError
from t2g.runs.versions import collect_versions
from t2g.sandbox import available

WAITING = ("PENDING", "RESCHEDULING")
CONNECT_S = 5.0
Listening = Mapping[str, tuple[str, int]]  # by the name of a node: host and port


def look_at_nodes(shared: Path | None, require: Sequence[str], *, timeout_s: float) -> list[Node]:
    """Every living node, with its versions, whether it sees a file that this process writes into `shared`, and whether
    a sandbox there isolates all of `require`.

    UserError when this process cannot write there. A node that does not answer in time is one with a fault.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    with ExitStack() as until_then:
        probe = None
        if shared is not None:
            try:
                shared.mkdir(parents=True, exist_ok=True)
                probe = Path(until_then.enter_context(NamedTemporaryFile(dir=shared, prefix=".doctor-")).name)
            except OSError as error:
                raise UserError(f"{shared}: a run could not write there: {error.strerror}") from None
        refs = [_on(node["NodeID"], examine, probe, require) for node in alive]
        deadline = time.monotonic() + timeout_s
        return [_node(node, ref, deadline, timeout_s) for node, ref in zip(alive, refs, strict=True)]


def pending_groups() -> list[PendingGroup]:
    """Placement groups that wait for a place, of all jobs of the cluster. Asks the dashboard."""
    groups = [group for group in list_placement_groups(detail=True, limit=10_000) if group.state in WAITING]
    return [
        PendingGroup(
            name=group.name or group.placement_group_id[:12],
            bundles=tuple(bundle["unit_resources"] for bundle in group.bundles),
            selectors=tuple(bundle.get("label_selector", {}) for bundle in group.bundles),
        )
        for group in groups
    ]


def listening_environment(given: Mapping[str, str]) -> dict[str, str]:
    """With which gloo, NCCL and vLLM listen on this node's address alone; what is `given` already stays as it is."""
    address = ray.util.get_node_ip_address()
    interfaces = psutil.net_if_addrs().items()
    name = next((name for name, found in interfaces if address in [one.address for one in found]), None)
    wanted = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name and f"={name}"}
    return {key: value for key, value in wanted.items() if value and key not in given}


def examine(path: Path | None, require: Sequence[str]) -> dict[str, Any]:
    """Fields of a `Node`."""
    return {
        "versions": collect_versions(),
        "sees_file": None if path is None else path.exists(),
        "sandbox": available(require) if require else "",
    }


class Listener:
    """A port as rank 0 of a learner opens one for the meeting of a broadcast; open as long as this lives."""

    def listen(self) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        self._socket = socket.create_server((host, 0))
        return host, self._socket.getsockname()[1]


def find_unreachable(roles: Mapping[str, ProcessConfig], *, timeout_s: float) -> list[Unreachable]:
    """Where a node that may hold a rank or an engine cannot reach one that may hold a rank. Nodes that do not answer
    are left out: `look_at_nodes` has them."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    ranks, engines = ([n for n in alive if satisfies(n["Labels"], roles[s].labels)] for s in ("learner", "rollout"))
    sources = {node["NodeID"]: node for node in [*ranks, *engines]}
    deadline = time.monotonic() + timeout_s
    listeners = [_on(node["NodeID"], Listener) for node in ranks] if len(sources) > 1 else []
    try:
        opened = [_answer(listener.listen.remote(), deadline) for listener in listeners]
        open_ = {n["NodeName"]: at for n, at in zip(ranks, opened, strict=False) if at}
        refs = {node_id: _on(node_id, reached, open_, CONNECT_S) for node_id in sources} if open_ else {}
        found = {sources[node_id]["NodeName"]: _answer(ref, deadline) or {} for node_id, ref in refs.items()}
    finally:
        for listener in listeners:
            ray.kill(listener)
    return [
        Unreachable(source=name, target=to, reason=why) for name, failed in found.items() for to, why in failed.items()
    ]


def reached(listening: Listening, timeout_s: float) -> dict[str, str]:
    """Name of each node that does not let this one in, and why."""
    refused = {}
    for name, (host, port) in listening.items():
        try:
            socket.create_connection((host, port), timeout_s).close()
        except OSError as error:
            refused[name] = f"port {port} of {host}: {error.strerror or error}"
    return refused


def _answer(ref: Any, deadline: float) -> Any:
    """None where none comes in time."""
    try:
        return ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except RayError:
        return None


def _on(node_id: str, work: Any, *args: Any) -> Any:
    """A task, or an actor, on that node."""
    here = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    once = {} if isinstance(work, type) else {"max_retries": 0}
    return ray.remote(work).options(num_cpus=0, scheduling_strategy=here, **once).remote(*args)


def _node(node: dict[str, Any], ref: Any, deadline: float, timeout_s: float) -> Node:
    found: dict[str, Any] = {"versions": {}}
    try:
        found = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
    except ray.exceptions.GetTimeoutError:
        ray.cancel(ref, force=True)
        found["fault"] = f"it did not answer within {timeout_s:g} s"
    except RayError as error:
        found["fault"] = first_line(error)
    return Node(name=node["NodeName"], labels=node["Labels"], resources=node["Resources"], **found)
