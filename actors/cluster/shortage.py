"""Describe what a cluster has left: the free resources of each node, and the placement groups that wait."""

from collections.abc import Mapping, Sequence
from typing import Any

from t2g.resources.memory import GIB

WAITING = ("PENDING", "RESCHEDULING")  # states of placement groups
NAME_END = " #"  # between the role of a placement group and what makes its name unique
MAX_LISTED = 8  # nodes, and groups that wait
Amounts = Mapping[str, float]  # by Ray's names; memory in bytes


def describe_free(nodes: Sequence[Mapping[str, Any]], available: Mapping[str, Amounts]) -> str:
    """Describe the free resources of each living node, the freest first.

    Args:
        nodes: Result of `ray.nodes`.
        available: Free resources by the id of a node.
    """
    rows: list[tuple[float, str]] = []
    for node in nodes:
        if not node["Alive"]:
            continue
        free = available.get(node["NodeID"], {})
        row = f"{node['NodeName']} has {_describe_share(free, node['Resources'])}"
        rows.append((free.get("CPU", 0), row))
    rows.sort(key=lambda row: -row[0])
    return _join_rows([text for _, text in rows])


def describe_waiting(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describe the placement groups without a node for each bundle, and what they wait for. groups: Ray's table."""
    rows: list[str] = []
    for group in groups:
        if group["state"] not in WAITING:
            continue
        bundles = group["bundles"]
        node_ids = group["bundles_to_node_id"]
        unplaced = [bundle for index, bundle in bundles.items() if not _is_placed(node_ids.get(index, ""))]
        if not unplaced:
            continue
        name = group["name"].partition(NAME_END)[0] or "another job"
        rows.append(f"{name} for {len(unplaced)} of {len(bundles)} x {describe_amounts(unplaced[0])}")
    return _join_rows(rows)


def describe_amounts(resources: Amounts) -> str:
    """Return CPUs, GPUs and memory as text."""
    memory_gib = resources.get("memory", 0) / GIB
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs and {memory_gib:.1f} GiB"


def _describe_share(free: Amounts, total: Amounts) -> str:
    free_gib = free.get("memory", 0) / GIB
    total_gib = total.get("memory", 0) / GIB
    cpus = f"{free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs"
    gpus = f"{free.get('GPU', 0):g} of {total.get('GPU', 0):g} GPUs"
    return f"{cpus}, {gpus} and {free_gib:.1f} of {total_gib:.1f} GiB"


def _is_placed(node_id: str) -> bool:
    """Return whether a node has a bundle: without one Ray gives no id, or one of f only."""
    return bool(node_id.strip("f"))


def _join_rows(rows: Sequence[str]) -> str:
    """Join the first rows; "nothing" without any."""
    listed = list(rows[:MAX_LISTED])
    if len(rows) > MAX_LISTED:
        listed.append(f"and {len(rows) - MAX_LISTED} others")
    return "; ".join(listed) or "nothing"
