"""How ranks on GPUs send a bucket without Ray's object store: learner.sync_transport ipc and nccl.

ipc: every rank packs it into memory of its own GPU, from where the engine on that GPU copies it. nccl: rank 0
broadcasts it to the engines of the round, with vLLM's packed broadcast. The engines' side is vLLM's own, see
`vllm_plugin`. vLLM's trainer-side classes are not used: they drive all engines at once without a deadline.
Nothing of what was sent remains: to send again is to gather again.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from actors.weights.buckets import Bucket

STALL_S = 30.0  # for one broadcast, and for its group to meet: past it somebody is taken to be gone

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where rank 0 of the learner, which is rank 0 here too, meets the engines of one round."""

    host: str
    port: int
    size: int  # of the group: each GPU of an engine is a rank


class NcclSender:
    """Of rank 0. Never raises for an engine: it goes on gathering with the others, and whoever got nothing says so."""

    everywhere = False  # whether every rank needs the tensors of a bucket, or rank 0 alone
    _group: Any = None

    def meet(self, meeting: Meeting) -> None:
        """The group of a new round. That of the last one ends only here: an engine may still have read from it."""
        if self._group is not None:
            self._group.destroy()
            self._group = None
        try:
            self._group = self.join(meeting)
        except RuntimeError as error:
            logger.warning("not all %d engines came to the group of the weight sync: %s", meeting.size - 1, error)

    def join(self, meeting: Meeting) -> Any:
        """The engines' group, as vLLM's PyNcclCommunicator. Raises RuntimeError when they do not all come."""
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup
        from vllm.utils.nccl import unpinned_nccl_env

        group = StatelessProcessGroup.create(
            meeting.host, meeting.port, rank=0, world_size=meeting.size, store_timeout=int(STALL_S)
        )
        with unpinned_nccl_env():
            return PyNcclCommunicator(group, device=torch.accelerator.current_device_index())

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
    """Ends the group when the block takes longer: its broadcasts return, and nobody waits for a member that is gone.

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

    def meet(self, meeting: Meeting) -> None:
        raise AssertionError("memory is shared without a group")

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


def make_sender(transport: str, rank: int) -> Sender:
    return IpcSender(rank) if transport == "ipc" else NcclSender()


def _finish(tensors: Sequence[torch.Tensor]) -> None:
    """What this process's GPU has to do for them: other streams and other processes do not wait for it."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
