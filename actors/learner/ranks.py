"""The driver's side of a group of ranks: their start, a call to all of them, their end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from actors.cluster import placement
from actors.cluster.fanout import collect, first_line, is_short_of_memory
from actors.cluster.kept_placements import KeptPlacements
from t2g.config import RoleConfig
from t2g.errors import LearnerLost, RunStopped

OWN_PAGES_BYTES = 8 * 2**20  # attention weights and logits; the system zeroes such pages at each allocation
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # glibc asks for huge pages; before 2.35 it ignores this
CACHED_PRIMITIVES = 64  # oneDNN has one for each operation and shape, and by default keeps 1,024
FREE_HEAP_BYTES = 256 * 2**20  # memory of freed smaller arrays stays, for the next microbatch


def rank_environment(role: RoleConfig, *, uses_cuda_ipc: bool = False) -> dict[str, str]:
    """Return the environment of a rank.

    On a GPU, expandable segments, since rows have many lengths. With uses_cuda_ipc an engine maps the rank's memory,
    which expandable segments do not always allow. On a CPU, the largest arrays have pages of their own, which are
    returned when they are freed: otherwise glibc keeps holes between others. If smaller arrays had them too, an update
    would take up to twice as long. The system zeroes huge pages (2 MiB) faster than small ones. oneDNN keeps few
    primitives: most microbatches have new shapes, so that with its default a rank in bfloat16 would grow with each
    update.
    """
    if not role.gpus:
        return {
            "MALLOC_MMAP_THRESHOLD_": str(OWN_PAGES_BYTES),
            "MALLOC_TRIM_THRESHOLD_": str(FREE_HEAP_BYTES),
            "GLIBC_TUNABLES": HUGE_PAGES,
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(CACHED_PRIMITIVES),
        }
    if uses_cuda_ipc:
        return {}
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Ranks:
    """Processes that make every call together, in one placement group."""

    def __init__(
        self,
        actor: Any,
        *args: Any,
        section: str,
        role: RoleConfig,
        actor_name: str,
        placements: KeptPlacements | None,
        placement_timeout_s: float,
        environment: Mapping[str, str],
        memory_advice: str = "",
        limit_s: float | None = None,
    ) -> None:
        """Start actor(*args, role, rank) for each rank.

        Args:
            placements: Keeps the placement group after `close`; if None, it is removed.
            memory_advice: What lowers the memory of a rank, for the error of one that was short of it.
            limit_s: The configured limit of a call, for messages.

        Raises:
            UserError: The ranks do not fit; the message names the config section.
        """
        self.actor_name = actor_name
        self._memory_advice = memory_advice
        self._limit_s = limit_s
        self.workers: list[Any] = []
        self._own_placements = KeptPlacements()
        try:
            placements = placements or self._own_placements
            placement_group = placements.take(section, role, timeout_s=placement_timeout_s)
            bundles = placement.order_bundles_by_gpu(placement_group, role, timeout_s=placement_timeout_s)
            for rank, bundle in enumerate(bundles):
                options = placement.actor_options(role, placement_group, environment, bundle=bundle)
                worker = actor.options(**options).remote(*args, role, rank)
                self.workers.append(worker)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.workers)

    def put(self, rank: int, value: Any) -> "ray.ObjectRef[Any]":
        """Store an argument of a rank's call. Raises RunStopped if the object store or its disk is full."""
        try:
            return ray.put(value)
        except RayError as error:
            raise RunStopped(
                f"the batch of {self.actor_name} {rank} cannot be stored: {first_line(error)}; raise "
                "cluster.object_store_gib, or free the disk of Ray's temporary folder"
            ) from error

    def collect(self, refs: Sequence["ray.ObjectRef[Any]"], call: str, deadline: float) -> list[Any]:
        """Return the results in order of rank; errors as `fanout.collect`. deadline: of time.monotonic."""
        timeout_s = max(0.0, deadline - time.monotonic())
        try:
            return collect(refs, actor_name=self.actor_name, call=call, timeout_s=timeout_s, limit_s=self._limit_s)
        except (LearnerLost, RunStopped) as error:
            if not self._memory_advice or not is_short_of_memory(error):
                raise
            raise type(error)(f"{error}; if it was short of memory, {self._memory_advice}") from error.__cause__

    def close(self) -> None:
        """Kill the ranks, and remove their placement group unless it is kept. Safe to call twice."""
        while self.workers:
            ray.kill(self.workers.pop(), no_restart=True)
        self._own_placements.close()
