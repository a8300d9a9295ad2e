"""The driver's side of a group of ranks: their places, one call to all of them, their end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.cluster import placement
from actors.cluster.fanout import collect
from t2g.config import RoleConfig


def rank_environment(role: RoleConfig, *, uses_cuda_ipc: bool = False) -> dict[str, str]:
    """Of a rank's process on a GPU: freed memory of one size serves another, for rows are of all lengths.

    uses_cuda_ipc: an engine maps its memory, which such memory does not let it do everywhere.
    """
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if role.gpus and not uses_cuda_ipc else {}


class Ranks:
    """Processes that make every call together, in one reserved place. `section` of the config describes them."""

    def __init__(
        self,
        actor: Any,
        *args: Any,
        section: str,
        role: RoleConfig,
        who: str,
        placement_timeout_s: float,
        environment: Mapping[str, str],
    ) -> None:
        """Start actor(*args, role, rank) for each rank. UserError, naming section, when there is no place."""
        self.who = who
        self.workers: list[Any] = []
        self._place: PlacementGroup | None
        (self._place,) = placement.reserve({section: role}, timeout_s=placement_timeout_s)
        try:
            for rank, bundle in enumerate(
                placement.order_bundles_by_gpu(self._place, role, timeout_s=placement_timeout_s)
            ):
                options = placement.actor_options(role, self._place, environment, bundle=bundle)
                self.workers.append(actor.options(**options).remote(*args, role, rank))
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.workers)

    def collect(self, refs: Sequence["ray.ObjectRef[Any]"], call: str, deadline: float) -> list[Any]:
        """Results in order of rank; errors as `fanout.collect`. deadline: of time.monotonic."""
        return collect(refs, who=self.who, call=call, timeout_s=max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill the ranks and give their place back. Safe to call twice."""
        while self.workers:
            ray.kill(self.workers.pop(), no_restart=True)
        if self._place is not None:
            remove_placement_group(self._place)
            self._place = None
