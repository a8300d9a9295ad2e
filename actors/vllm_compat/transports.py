"""Senders of buckets from ranks on GPUs without Ray's object store: learner.sync_transport ipc and nccl.

ipc: every rank packs the bucket into memory of its own GPU, and the engine on that GPU copies it. nccl: rank 0
broadcasts the bucket to the engines of the round with vLLM's packed broadcast. The group is reused while its members
stay the same. The engines' side is vLLM's own, see `plugin`. vLLM's trainer-side classes are not used: they drive all
engines at once without a deadline. Sent buckets are not stored: sending again needs gathering again.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.distributed import TCPStore

from actors.weights.buckets import Bucket, Rendezvous

STALL_S = 30.0  # timeout of one broadcast, and until all members of its group are there
CONNECT_S = 120.0  # timeout of NCCL's init, whose first operation takes 30 s and more on some NVSwitch nodes
JOIN_POLL_S = 0.05

logger = logging.getLogger(__name__)


def join_group(
    rendezvous: Rendezvous,
    rank: int,
    device: torch.device,
    deadline_s: float = STALL_S,
    connect_s: float = CONNECT_S,
) -> Any:
    """Return the group, as vLLM's PyNcclCommunicator, once all members have joined.

    Raises:
        RuntimeError: Members did not join within deadline_s, and the message names them; or NCCL did not connect within
            connect_s, or cannot.
    """
    until = time.monotonic() + deadline_s
    try:
        store = TCPStore(
            rendezvous.host, rendezvous.port, len(rendezvous.members), is_master=rank == 0,
            timeout=timedelta(seconds=deadline_s), wait_for_workers=False,
        )  # fmt: skip
        store.set(f"here/{rank}", "")
    except RuntimeError as error:
        what = f"did not open the rendezvous within {deadline_s:g} s"
        if rank == 0:
            what = f"cannot open the rendezvous at {rendezvous.host}:{rendezvous.port}: {str(error).splitlines()[0]}"
        raise RuntimeError(f"{rendezvous.members[0]} {what}") from error
    while absent := _find_absent(rendezvous, store):
        if time.monotonic() > until:
            names = ", ".join(dict.fromkeys(absent))
            raise RuntimeError(f"{names} did not join the rendezvous within {deadline_s:g} s")
        time.sleep(JOIN_POLL_S)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def connect() -> None:
        try:
            results.put(communicator(store, rank, len(rendezvous.members), device))
        except RuntimeError as error:  # raised below, in the caller's thread
            results.put(error)

    threading.Thread(target=connect, name="t2g-join", daemon=True).start()  # NCCL's init has no timeout
    try:
        group = results.get(timeout=connect_s)
    except queue.Empty:
        group = (
            f"NCCL did not connect them within {connect_s:g} s (NCCL_SOCKET_IFNAME in their environment, a firewall)"
        )
    if isinstance(group, str | RuntimeError):
        raise RuntimeError(f"{len(rendezvous.members)} members joined the rendezvous, and {group}")
    return group


def _find_absent(rendezvous: Rendezvous, store: TCPStore) -> list[str]:
    """Return the members that have not joined, each GPU of an engine by its name."""
    return [member for rank, member in enumerate(rendezvous.members) if not store.check([f"here/{rank}"])]


def communicator(store: TCPStore, rank: int, size: int, device: torch.device) -> Any:
    """Connect to the group. The caller's thread is new, and its current device would be the first one."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup
    from vllm.utils.nccl import unpinned_nccl_env

    torch.accelerator.set_device_index(device)
    with unpinned_nccl_env():
        group = StatelessProcessGroup(rank=rank, world_size=size, store=store)
        return PyNcclCommunicator(group, device=device)


def import_communicator() -> None:
    """Import vLLM's communicator early: from a cold disk that takes longer than engines wait at the rendezvous."""
    import_module("vllm.distributed.device_communicators.pynccl")


class NcclSender:
    """Broadcast from rank 0. A failure of an engine raises nothing here: the engine reports it itself."""

    on_all_ranks = False  # whether every rank needs the tensors of a bucket, or only rank 0
    _group: Any = None
    _rendezvous: Rendezvous | None = None

    def join_group(self, rendezvous: Rendezvous, device: torch.device) -> None:
        """Join the group of a round, or keep the current group if it is the same and intact."""
        if rendezvous == self._rendezvous and self._group is not None and not self._group.disabled:
            return
        if self._group is not None:  # not before: an engine may still have read from it
            self._group.destroy()
        self._group = None
        self._rendezvous = rendezvous
        try:
            self._group = join_group(rendezvous, 0, device)
        except RuntimeError as error:
            logger.warning("weights cannot be broadcast: %s", error)

    def send(
        self, index: int, names: Sequence[str], tensors: Sequence[torch.Tensor], started: float
    ) -> Iterator[Bucket]:
        """Yield the bucket's description on rank 0, then broadcast its bytes.

        Args:
            started: See `actors.weights.buckets.make_bucket`.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        gather_s = time.monotonic() - started
        meta = {"dtypes": [format_dtype(tensor) for tensor in tensors]}
        yield Bucket(index=index, names=tuple(names), gather_s=gather_s, transport_meta=meta)
        if self._group is None or self._group.disabled:
            return
        _synchronize(tensors)  # the broadcast has streams of its own
        try:
            with abort_when_stalled(self._group):
                pairs = iter(zip(names, tensors, strict=True))
                packed_nccl_broadcast_producer(pairs, self._group, 0, lambda pair: pair[1])
        except RuntimeError as error:
            logger.warning("bucket %d of a weight sync was not broadcast: %s", index, error)
            self._group.destroy()


@contextmanager
def abort_when_stalled(group: Any, after_s: float = STALL_S) -> Iterator[None]:
    """Destroy the group if the block takes longer than `after_s`: no member then waits for a failed one.

    Args:
        group: vLLM's PyNcclCommunicator; it is `disabled` from then on.

    Raises:
        RuntimeError: The group was destroyed: what the block received is not complete.
    """
    timer = threading.Timer(after_s, group.destroy)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # an abort releases the block before `destroy` returns, within 5 s
    if group.disabled:
        raise RuntimeError("the broadcast was aborted")


@dataclass(frozen=True)
class SharedMemory:
    """GPU memory of this process that another process may map."""

    memory: torch.Tensor  # [N] uint8
    gpu: str  # UUID of the GPU
    handle: tuple[Any, ...]  # numbers and bytes: the arguments of torch's rebuild_cuda_tensor from `storage_device` on


def rebuild_arguments(handle: Sequence[Any]) -> tuple[Any, ...]:
    """Return all arguments of torch's rebuild_cuda_tensor for a `SharedMemory`. A handle contains no pickle."""
    return (torch.Tensor, (handle[2],), (1,), 0, torch.storage.TypedStorage, torch.uint8, *handle)


class IpcSender:
    """Alternates between two shared memories: a bucket is packed while the engines copy the previous one.

    The memories are allocated once and reused: memory that a removed engine has mapped could not be freed.
    """

    on_all_ranks = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shared: dict[int, SharedMemory] = {}

    def send(
        self, index: int, names: Sequence[str], tensors: Sequence[torch.Tensor], started: float
    ) -> Iterator[Bucket]:
        """Pack the bucket into shared memory; yield its description with the handles of all GPUs on rank 0."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        slot = index % 2
        if slot not in self._shared or len(self._shared[slot].memory) < num_bytes:
            self._shared[slot] = self.share(num_bytes)
        shared = self._shared[slot]
        as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        torch.cat(as_bytes, out=shared.memory[:num_bytes])
        _synchronize([shared.memory])
        handles = dict(self.gather((shared.gpu, shared.handle)))
        if self._rank == 0:
            gather_s = time.monotonic() - started
            meta = {"handles": handles, "dtypes": [format_dtype(tensor) for tensor in tensors]}
            yield Bucket(index=index, names=tuple(names), gather_s=gather_s, transport_meta=meta)

    def share(self, num_bytes: int) -> SharedMemory:
        from torch.multiprocessing.reductions import reduce_tensor

        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        _, arguments = reduce_tensor(memory)
        gpu = str(torch.cuda.get_device_properties(memory.device).uuid)
        return SharedMemory(memory, gpu, tuple(arguments[6:]))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, value)
        return gathered


Sender = NcclSender | IpcSender


def format_dtype(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's type, as torch and a manifest have it.

    >>> format_dtype(torch.zeros(1, dtype=torch.bfloat16))
    'bfloat16'
    """
    return str(tensor.dtype).removeprefix("torch.")


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for this process's GPU: other streams and processes do not wait for it."""
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
