"""Buckets on their way past the object store: vLLM's own packing and engines, on CPUs, with gloo in place of NCCL."""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_group import Fallible, cpu_streams
from heads import free_port
from recorder import Recorder
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.vllm_compat import transports
from actors.vllm_compat.plugin import BucketInfo, IpcSharedEngine, NcclBroadcastEngine, WeightManifest
from actors.vllm_compat.transports import (
    IpcSender,
    NcclSender,
    SharedMemory,
    abort_when_stalled,
    join_group,
    rebuild_arguments,
)
from actors.weights.buckets import Rendezvous
from actors.weights.weight_receiver import WeightReceiver

NAMES = ("a.weight", "a.bias", "b.weight")
TENSORS = [torch.arange(6).reshape(2, 3), torch.tensor([7]), torch.arange(8, 12).reshape(4, 1)]
TENSORS = [tensor.to(torch.bfloat16) for tensor in TENSORS]
SHAPES = {name: list(tensor.shape) for name, tensor in zip(NAMES, TENSORS, strict=True)}
BUCKETS = [slice(0, 2), slice(2, 3)]
CPU = torch.device("cpu")


def engine(kind: type[Any]) -> tuple[Any, Recorder]:
    """vLLM's engine with our checks, on the CPU, which has opened version 5."""
    model = Recorder()
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0), model_config=None)
    transfer = kind(SimpleNamespace(), config, torch.device("cpu"), model)
    open_version(transfer)
    transfer.start_weight_update()
    return transfer, model


def open_version(transfer: Any) -> None:
    manifest = {"version": 5, "dtype": "bfloat16", "shapes": SHAPES}
    transfer.init_transfer_engine(transfer.parse_init_info(manifest))


def over_the_wire(info: dict[str, Any]) -> dict[str, Any]:
    """As it gets from AsyncLLM into the engine core: without pickle, which vLLM refuses."""
    return MsgpackDecoder().decode(MsgpackEncoder().encode(info))


def check(model: Recorder) -> None:
    assert set(model.loaded) == set(NAMES)
    for name, tensor in zip(NAMES, TENSORS, strict=True):
        assert model.loaded[name].dtype == torch.bfloat16, name
        assert torch.equal(model.loaded[name], tensor), name


@pytest.fixture
def _cpu() -> Iterator[None]:
    with cpu_streams():
        yield


def rendezvous_of(*members: str, host: str = "127.0.0.1") -> Rendezvous:
    port = free_port()
    return Rendezvous(id=str(port), host=host, port=port, members=("the learner", *members))


def invite(transfer: Any, rendezvous: Rendezvous, rank: int) -> None:
    """As `Intake.join_group` tells the core."""
    reports = over_the_wire({"rendezvous": asdict(rendezvous), "rank_offset": rank})
    transfer.init_transfer_engine(transfer.parse_init_info(reports))


@pytest.mark.usefixtures("_cpu")
def test_broadcasts_bring_every_engine_the_ranks_tensors_version_after_version_in_one_group() -> None:
    rendezvous = rendezvous_of("w0", "w1")
    versions = range(2)
    engines = [engine(NcclBroadcastEngine) for _ in range(2)]
    reports: list[queue.SimpleQueue[BucketInfo]] = [queue.SimpleQueue() for _ in engines]

    def receive(number: int) -> Any:
        transfer, model = engines[number]
        invite(transfer, rendezvous, 1 + number)
        group = transfer.model_update_group
        for version in versions:
            if version:
                open_version(transfer)
                transfer.start_weight_update()
                model.loaded.clear()
            for _ in BUCKETS:
                transfer.receive_weights(reports[number].get(timeout=10))
            transfer.finish_weight_update()
            check(model)
        assert transfer.model_update_group is group
        assert group.num_broadcasts == len(versions) * len(BUCKETS)

    sender = NcclSender()
    with ThreadPoolExecutor() as pool:
        receiving = [pool.submit(receive, number) for number in range(2)]
        for version in versions:
            sender.join_group(rendezvous, CPU)
            for index, part in enumerate(BUCKETS):
                for bucket in sender.send(index, NAMES[part], TENSORS[part], time.monotonic()):
                    sent = version * len(BUCKETS) + index
                    assert sender._group.num_broadcasts == sent, "an engine hears of a bucket before it is broadcast"
                    for inbox in reports:
                        inbox.put(
                            BucketInfo(
                                version=5,
                                index=bucket.index,
                                names=list(bucket.names),
                                transport_meta=bucket.transport_meta,
                            )
                        )
        for done in receiving:
            done.result(20)


@pytest.mark.usefixtures("_cpu")
def test_a_participant_missing_from_the_rendezvous_is_named_and_the_others_wait_no_longer() -> None:
    rendezvous = rendezvous_of("w0", "w1", "w1")
    started = time.monotonic()
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(join_group, rendezvous, rank, CPU, 3) for rank in (0, 1)]
        for here in waiting:
            with pytest.raises(RuntimeError, match=r"^w1 did not join the rendezvous within 3 s$"):
                here.result(10)
    with pytest.raises(RuntimeError, match=r"^the learner did not open the rendezvous within 3 s$"):
        join_group(rendezvous_of("w0"), 1, CPU, 3)
    assert time.monotonic() - started < 20


def test_a_start_of_nccl_that_hangs_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """All have come, and still no connection: a firewall, a wrong interface."""
    never = threading.Event()
    monkeypatch.setattr(transports, "communicator", lambda *arguments: never.wait(20))
    with pytest.raises(RuntimeError, match=r"^1 members joined the rendezvous, and NCCL did not connect .* 1 s"):
        join_group(rendezvous_of(), 0, CPU, connect_s=1)
    never.set()

    def refused(*arguments: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(transports, "communicator", refused)
    with pytest.raises(RuntimeError, match="joined the rendezvous, and NCCL error: unhandled"):
        join_group(rendezvous_of(), 0, CPU, 3)


def sender_to(*groups: Fallible | None, monkeypatch: pytest.MonkeyPatch) -> NcclSender:
    """Meets the next of these groups; None: nobody came."""
    coming = iter(groups)

    def joined(*arguments: Any) -> Fallible:
        group = next(coming)
        if group is None:
            raise RuntimeError("w0 did not join")
        return group

    monkeypatch.setattr(transports, "join_group", joined)
    return NcclSender()


def test_a_group_serves_one_rendezvous_and_ends_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Fallible(hangs=False) for _ in range(3)]
    rendezvous = rendezvous_of("w0")
    sender = sender_to(*groups, monkeypatch=monkeypatch)
    for _ in range(2):
        sender.join_group(rendezvous, CPU)
        assert sender._group is groups[0]
        assert not groups[0].disabled
    sender.join_group(rendezvous_of("w0", "w1"), CPU)
    assert sender._group is groups[1]
    assert [group.disabled for group in groups] == [True, False, False]


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize("group", [None, Fallible(hangs=False)], ids=["nobody came", "an engine is gone"])
def test_a_rank_goes_on_without_the_engines(group: Fallible | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks are in the next gather: an exception here would leave them there."""
    sender = sender_to(group, monkeypatch=monkeypatch)
    sender.join_group(rendezvous_of("w0"), CPU)
    sent = [b.index for i, part in enumerate(BUCKETS) for b in sender.send(i, NAMES[part], TENSORS[part], 0.0)]
    assert sent == [0, 1]
    if group is not None:
        assert group.disabled and group.num_broadcasts == 1, "nothing is sent in a broken group"


def test_requests_waiting_for_a_removed_member_are_released() -> None:
    group = Fallible(hangs=True)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the broadcast was aborted"), abort_when_stalled(group, after_s=0.1):
        group.broadcast(TENSORS[0], 0)
    assert group.disabled and 0.1 <= time.monotonic() - started < 5
    quick = Fallible(hangs=True)
    with abort_when_stalled(quick, after_s=0.1):
        pass
    time.sleep(0.2)
    assert not quick.disabled


@pytest.mark.usefixtures("_cpu")
def test_an_engine_refuses_a_broadcast_that_was_broken_off_and_takes_the_next_round() -> None:
    transfer, model = engine(NcclBroadcastEngine)
    part = BucketInfo(version=5, index=0, names=list(NAMES), transport_meta={})
    with pytest.raises(RuntimeError, match="no group"):
        transfer.receive_weights(part)
    transfer.model_update_group = broken = Fallible(hangs=True)
    threading.Timer(0.1, broken.destroy).start()
    with pytest.raises(RuntimeError, match="bucket 0 of version 5: the broadcast was aborted"):
        transfer.receive_weights(part)
    open_version(transfer)
    with pytest.raises(ValueError, match="3 of 3 tensors of the manifest are missing"):
        transfer.finish_weight_update()
    assert model.loaded.keys() == set(NAMES), "what it loaded from the broken group was never committed"


def test_an_engine_gets_its_group_with_the_manifests() -> None:
    transfer, _ = engine(NcclBroadcastEngine)
    reports: list[dict[str, Any]] = []

    class Joining(WeightReceiver):
        async def _init_core_transfer(self, info: dict[str, Any]) -> None:
            reports.append(over_the_wire(info))

    rendezvous = rendezvous_of("w0", "w1", host="10.0.0.1")
    asyncio.run(Joining().join_group("", rendezvous, 2))
    info = transfer.parse_init_info(reports[0])
    assert info.rank_offset == 2
    assert tuple(info.rendezvous["members"]) == rendezvous.members
    assert (info.rendezvous["host"], info.rendezvous["port"]) == ("10.0.0.1", rendezvous.port)
    manifest = {"version": 1, "dtype": "float32", "shapes": {}}
    assert isinstance(transfer.parse_init_info(manifest), WeightManifest)


class Memories:
    """SharedMemory memory of a GPU that is none: the handle is a number, which `rebuild` looks up as CUDA would."""

    def __init__(self, gpu: str) -> None:
        self.gpu = gpu
        self.buffers = []
        self.closed = 0

    def share(self, num_bytes: int) -> SharedMemory:
        self.buffers.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return SharedMemory(
            self.buffers[-1], self.gpu, (0, bytes([len(self.buffers) - 1]), num_bytes, 0, False, b"", 0, b"", True)
        )

    def rebuild(self, arguments: list[Any]) -> torch.Tensor:
        assert arguments[:6] == [torch.Tensor, (arguments[8],), (1,), 0, torch.storage.TypedStorage, torch.uint8]
        assert len(arguments) == 15
        return self.buffers[arguments[7][0]]

    def close(self) -> None:
        self.closed += 1


def ipc_engine(memories: Memories, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=memories.gpu))
    transfer, model = engine(IpcSharedEngine)
    transfer._packed_importer = memories
    return transfer, model


def ipc_sender(rank: int, memories: Memories, gather: Callable[[Any], list[Any]]) -> IpcSender:
    """gather: of every rank what it gives."""
    sender = IpcSender(rank)
    sender.share = memories.share  # type: ignore[method-assign]
    sender.gather = gather  # type: ignore[method-assign]
    return sender


def test_an_engine_reads_the_memory_of_the_rank_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with a GPU each; only the second one's holds the right bytes for an engine there."""
    here = Memories("GPU-1")
    elsewhere = Memories("GPU-0")
    handles: list[Any] = []
    other = ipc_sender(1, here, lambda mine: handles.append(mine) or [])
    first = ipc_sender(0, elsewhere, lambda mine: [mine, handles[-1]])
    transfer, model = ipc_engine(here, monkeypatch)
    for index, part in enumerate(BUCKETS):
        assert not list(other.send(index, NAMES[part], TENSORS[part], 0.0)), "rank 0 alone tells the engines"
        wrong = [tensor + 1 for tensor in TENSORS[part]]
        (bucket,) = first.send(index, NAMES[part], wrong, 0.0)
        assert set(bucket.transport_meta["handles"]) == {"GPU-0", "GPU-1"}
        info = {"version": 5, "index": index, "names": list(bucket.names), "transport_meta": bucket.transport_meta}
        transfer.receive_weights(transfer.parse_update_info(over_the_wire(info)))
    transfer.finish_weight_update()
    check(model)
    assert here.closed == 1
    lonely = {"handles": {"GPU-0": bucket.transport_meta["handles"]["GPU-0"]}}
    open_version(transfer)
    with pytest.raises(ValueError, match="IPC handle not found for GPU UUID GPU-1"):
        transfer.receive_weights(BucketInfo(version=5, index=0, names=list(NAMES[:2]), transport_meta=lonely))


def test_a_bucket_is_packed_while_the_one_before_is_read() -> None:
    memories = Memories("g")
    sender = ipc_sender(0, memories, lambda mine: [mine])

    def send(index: int, tensor: torch.Tensor) -> bytes:
        (bucket,) = sender.send(index, ["a"], [tensor], 0.0)
        return bucket.transport_meta["handles"]["g"][1]

    large = torch.arange(100, dtype=torch.float32)
    first = send(0, large)
    second = send(1, TENSORS[0])
    assert first != second
    assert torch.equal(memories.buffers[0].view(torch.float32), large)
    assert send(2, TENSORS[1]) == first, "the third bucket fits into the memory of the first"
    assert send(3, large) not in (first, second), "a larger one gets larger memory"


def test_a_handle_says_all_that_torch_needs() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    arguments = dict(zip(names, rebuild_arguments([*"0123456", b"", True]), strict=True))
    assert (arguments["tensor_size"], arguments["storage_device"], arguments["storage_size_bytes"]) == (
        ("2",),
        "0",
        "2",
    )
    assert arguments["event_sync_required"] is True
