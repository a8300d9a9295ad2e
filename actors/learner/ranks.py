"""The driver's side of a group of ranks: their placement group, a call to all of them, their end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster import placement
from actors.cluster.fanout import collect
from t2g.config import RoleConfig


def rank_environment(role: RoleConfig, *, uses_cuda_ipc: bool = False) -> dict[str, str]:
    """Return the environment of a rank: on a GPU, expandable segments, since rows have many lengths.

    With uses_cuda_ipc an engine maps the rank's memory, which expandable segments do not always allow.
    """
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if role.gpus and not uses_cuda_ipc else {}


class Ranks:
    """Processes that make every call together, in one placement group."""

    def __init__(
        self,
        actor: Any,
        *args: Any,
        section: str,
        role: RoleConfig,
        actor_name: str,
        placement_timeout_s: float,
        environment: Mapping[str, str],
    ) -> None:
        """Start actor(*args, role, rank) for each rank.

        Raises:
            UserError: The ranks do not fit; the message names the config section.
        """
        self.actor_name = actor_name
        self.workers: list[Any] = []
        self._placement_group: PlacementGroup | None
        (self._placement_group,) = placement.reserve({section: role}, timeout_s=placement_timeout_s)
        try:
            for rank, bundle in enumerate(
                placement.order_bundles_by_gpu(self._placement_group, role, timeout_s=placement_timeout_s)
            ):
                options = placement.actor_options(role, self._placement_group, environment, bundle=bundle)
                self.workers.append(actor.options(**options).remote(*args, role, rank))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.workers)

    def collect(self, refs: Sequence["ray.ObjectRef[Any]"], call: str, deadline: float) -> list[Any]:
        """Return the results in order of rank; errors as `fanout.collect`. deadline: of time.monotonic."""
        return collect(refs, actor_name=self.actor_name, call=call, timeout_s=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill the ranks and remove their placement group. Safe to call twice."""
        while self.workers:
            ray.kill(self.workers.pop(), no_restart=True)
        if self._placement_group is not None:
            remove_placement_group(self._placement_group)
            self._placement_group = None
