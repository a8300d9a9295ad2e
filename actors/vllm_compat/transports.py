"""How ranks on GPUs send a bucket without Ray's object store: learner.sync_transport ipc and nccl.

ipc: every rank packs it into memory of its own GPU, from where the engine on that GPU copies it. nccl: rank 0
broadcasts it to the engines of the round, with vLLM's packed broadcast, in a group that is kept as long as its members
are the same. The engines' side is vLLM's own, see `plugin`. vLLM's trainer-side classes are not used: they drive
all engines at once without a deadline. Nothing of what was sent remains: to send again is to gather again.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from actors.weights.buckets import Bucket, Rendezvous

STALL_S = 30.0  # for one broadcast, and for its group to meet: past it somebody is taken to be gone
JOIN_POLL_S = 0.05

logger = logging.getLogger(__name__)


def join(rendezvous: Rendezvous, rank: int, device: torch.device, deadline_s: float = STALL_S) -> Any:
    """The group, as vLLM's PyNcclCommunicator, once all have come.

    Raises RuntimeError, which says who has not come within deadline_s, or that they came and NCCL found no way.
    """
    until = time.monotonic() + deadline_s
    try:
        store = TCPStore(
            rendezvous.host, rendezvous.port, len(rendezvous.members), is_master=rank == 0,
            timeout=timedelta(seconds=deadline_s), wait_for_workers=False,
        )  # fmt: skip
        store.set(f"here/{rank}", "")
    except RuntimeError as error:
        raise RuntimeError(f"{rendezvous.members[0]} did not open the rendezvous within {deadline_s:g} s") from error
    while absent := [member for i, member in enumerate(rendezvous.members) if not store.check([f"here/{i}"])]:
        if time.monotonic() > until:
            names = ", ".join(dict.fromkeys(absent))
            raise RuntimeError(f"{names} did not come to the rendezvous within {deadline_s:g} s")
        time.sleep(JOIN_POLL_S)
    made: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            made.put(communicator(store, rank, len(rendezvous.members), device))
        except RuntimeError as error:  # raised below, where somebody hears of it
            made.put(error)

    threading.Thread(target=connect, name="t2g-join", daemon=True).start()  # NCCL's own start waits for ever
    try:
        group = made.get(timeout=deadline_s)
    except queue.Empty:
        group = (
            f"NCCL did not connect them within {deadline_s:g} s (NCCL_SOCKET_IFNAME in their environment, a firewall)"
        )
    if isinstance(group, str | RuntimeError):
        raise RuntimeError(f"{len(rendezvous.members)} members came to the rendezvous, and {group}")
    return group


def communicator(store: TCPStore, rank: int, size: int, device: torch.device) -> Any:
    """In a thread of its own, whose current device would be the first one."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.nccl import unpinned_nccl_env

    torch.accelerator.set_device_index(device)
    with unpinned_nccl_env():
        return PyNcclCommunicator(StatelessProcessGroup(rank=rank, world_size=size, store=store), device=device)


class NcclSender:
    """Broadcast from rank 0. Never raises for an engine: an engine that received nothing reports it itself."""

    everywhere = False  # whether every rank needs the tensors of a bucket, or rank 0 alone
    _group: Any = None
    _rendezvous: Rendezvous | None = None

    def meet(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """The group of a round: that of the one before where its members still are together."""
        if rendezvous == self._rendezvous and self._group is not None and not self._group.disabled:
            return
        if self._group is not None:  # not sooner: an engine may still have read from it
            self._group.destroy()
        self._group, self._rendezvous = None, rendezvous
        try:
            self._group = join(rendezvous, 0, device)
        except RuntimeError as error:
            logger.warning("weights cannot be broadcast: %s", error)

    def send(
        self, index: int, names: Sequence[str], tensors: Sequence[torch.Tensor], started: float
    ) -> Iterator[Bucket]:
        """Yields, on rank 0, what the engines must hear of it. started: see `actors.weights.buckets.make_bucket`."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        yield Bucket(index=index, names=tuple(names), gather_s=time.monotonic() - started)
        if self._group is None or self._group.disabled:
            return
        _finish(tensors)  # the broadcast has streams of its own
        try:
            with ended_when_stalled(self._group):
                pairs = iter(zip(names, tensors, strict=True))
                packed_nccl_broadcast_producer(pairs, self._group, 0, lambda pair: pair[1])
        except RuntimeError as error:
            logger.warning("bucket %d of a weight sync was not broadcast: %s", index, error)
            self._group.destroy()


@contextmanager
def ended_when_stalled(group: Any, after_s: float = STALL_S) -> Iterator[None]:
    """Ends the group when the block takes longer: its broadcasts return, and no member waits for a failed one.

    group: as vLLM's PyNcclCommunicator, `disabled` from then on.
    """
    timer = threading.Timer(after_s, group.destroy)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True)
class Shared:
    """Memory of this process's GPU that another process may map."""

    memory: torch.Tensor  # [N] uint8
    gpu: str  # its UUID
    handle: tuple[Any, ...]  # of numbers and bytes: what torch's rebuild_cuda_tensor takes from `storage_device` on


def rebuild_arguments(handle: Sequence[Any]) -> tuple[Any, ...]:
    """All that torch's rebuild_cuda_tensor takes, for the memory of a `Shared`. No pickle comes with a handle."""
    return (torch.Tensor, (handle[2],), (1,), 0, torch.storage.TypedStorage, torch.uint8, *handle)


class IpcSender:
    """Two memories in turn: a bucket is packed while the engines copy the one before.

    They are shared once and kept: what an engine that is gone never gave back could not be freed again.
    """

    everywhere = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: dict[int, Shared] = {}

    def send(
        self, index: int, names: Sequence[str], tensors: Sequence[torch.Tensor], started: float
    ) -> Iterator[Bucket]:
        """As that of `NcclSender`."""
        num_bytes, turn = sum(tensor.nbytes for tensor in tensors), index % 2
        if turn not in self._shared or len(self._shared[turn].memory) < num_bytes:
            self._shared[turn] = self.share(num_bytes)
        shared = self._shared[turn]
        torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors], out=shared.memory[:num_bytes])
        _finish([shared.memory])
        handles = dict(self.gather((shared.gpu, shared.handle)))
        if self._rank == 0:
            gather_s = time.monotonic() - started
            yield Bucket(index=index, names=tuple(names), gather_s=gather_s, way={"handles": handles})

    def share(self, num_bytes: int) -> Shared:
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        _, arguments = reduce_tensor(memory)
        return Shared(memory, str(torch.cuda.get_device_properties(memory.device).uuid), tuple(arguments[6:]))

    def gather(self, own: Any) -> list[Any]:
        """What every rank gives, in order of rank."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, own)
        return gathered


Sender = NcclSender | IpcSender  # of one rank, for the whole run


def _finish(tensors: Sequence[torch.Tensor]) -> None:
    """What this process's GPU has to do for them: other streams and other processes do not wait for it."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
