"""Placement groups that outlive their processes: the ranks of a learner get theirs again after a restart.

Ray reschedules the bundles of a lost node, before the placement groups of others.
"""

import socket
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from actors.cluster import placement
from t2g.config import RoleConfig

POLL_S = 0.5
CONNECT_S = 2.0  # to a node's raylet: Ray counts a lost node as alive for 15 s and more


class KeptPlacements:
    """The placement groups of the sections of a learner, until `close`."""

    def __init__(self) -> None:
        self._groups: dict[str, PlacementGroup] = {}

    def take(self, section: str, role: RoleConfig, *, timeout_s: float) -> PlacementGroup:
        """Return the placement group of a section, once each of its bundles is on a node that answers.

        The first call reserves it.

        Raises:
            UserError: It is not ready within timeout_s.
        """
        group = self._groups.get(section)
        if group is None:
            (group,) = placement.reserve({section: role}, timeout_s=timeout_s)
            self._groups[section] = group
            return group

        deadline = time.monotonic() + timeout_s
        while not is_intact(group):
            if time.monotonic() > deadline:
                raise placement.make_shortage_error({section: role}, [section], timeout_s=timeout_s)
            time.sleep(POLL_S)
        return group

    def close(self) -> None:
        """Remove the placement groups; their processes must have ended. Safe to call twice."""
        while self._groups:
            _, group = self._groups.popitem()
            remove_placement_group(group)


def is_intact(group: PlacementGroup) -> bool:
    """Return whether all bundles are placed, on nodes that answer."""
    table = placement_group_table(group)
    if table["state"] != "CREATED":
        return False
    homes = set(table["bundles_to_node_id"].values())
    nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] in homes]
    return len(nodes) == len(homes) and all(map(_answers, nodes))


def _answers(node: Mapping[str, Any]) -> bool:
    """Return whether the node's raylet accepts a connection."""
    address = (node["NodeManagerAddress"], node["NodeManagerPort"])
    try:
        socket.create_connection(address, timeout=CONNECT_S).close()
    except OSError:
        return False
    return True
