"""Buckets on their way past the object store: vLLM's own packing and engines, on CPUs, with gloo in place of NCCL."""

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_group import Fallible, GlooGroup, GlooSender, cpu_streams
from heads import free_port
from recorder import Recorder
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from actors.weights.intake import Intake
from actors.weights.transports import IpcSender, Meeting, NcclSender, Shared, ended_when_stalled, rebuild_arguments
from actors.weights.vllm_plugin import Announcement, IpcSharedEngine, NcclBroadcastEngine, Part

NAMES = ("a.weight", "a.bias", "b.weight")
TENSORS = [torch.arange(6).reshape(2, 3), torch.tensor([7]), torch.arange(8, 12).reshape(4, 1)]
TENSORS = [tensor.to(torch.bfloat16) for tensor in TENSORS]
SHAPES = {name: list(tensor.shape) for name, tensor in zip(NAMES, TENSORS, strict=True)}
BUCKETS = [slice(0, 2), slice(2, 3)]
MEETING = Meeting(host="h", port=1, size=2)


def engine(kind: type[Any]) -> tuple[Any, Recorder]:
    """vLLM's engine with our checks, on the CPU, which has opened version 5."""
    model = Recorder()
    config = SimpleNamespace(parallel_config=None, model_config=None)
    transfer = kind(SimpleNamespace(), config, torch.device("cpu"), model)
    open_version(transfer)
    transfer.start_weight_update()
    return transfer, model


def open_version(transfer: Any) -> None:
    announced = {"version": 5, "dtype": "bfloat16", "shapes": SHAPES}
    transfer.init_transfer_engine(transfer.parse_init_info(announced))


def over_the_wire(info: dict[str, Any]) -> dict[str, Any]:
    """As it gets from AsyncLLM into the engine core: without pickle, which vLLM refuses."""
    return MsgpackDecoder().decode(MsgpackEncoder().encode(info))


def check(model: Recorder) -> None:
    assert set(model.loaded) == set(NAMES)
    for name, tensor in zip(NAMES, TENSORS, strict=True):
        assert model.loaded[name].dtype == torch.bfloat16 and torch.equal(model.loaded[name], tensor), name


@pytest.fixture
def _cpu() -> Iterator[None]:
    with cpu_streams():
        yield


@pytest.mark.usefixtures("_cpu")
def test_a_broadcast_brings_every_engine_the_ranks_tensors() -> None:
    meeting = Meeting(host="127.0.0.1", port=free_port(), size=3)
    engines = [engine(NcclBroadcastEngine) for _ in range(2)]
    parts: list[list[Part]] = [[], []]
    told = [threading.Event(), threading.Event()]
    failed: list[BaseException] = []

    def receive(number: int) -> None:
        transfer, _ = engines[number]
        try:
            transfer.model_update_group = GlooGroup(meeting.host, meeting.port, 1 + number, meeting.size)
            transfer.packed = True
            for index in range(len(BUCKETS)):
                assert told[index].wait(10)
                transfer.receive_weights(parts[number][index])
            transfer.finish_weight_update()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    sender = GlooSender()
    sender.meet(meeting)
    group = sender._group
    for index, part in enumerate(BUCKETS):
        for bucket in sender.send(index, NAMES[part], TENSORS[part], time.monotonic()):
            assert group.num_broadcasts == index, "an engine hears of a bucket before it is broadcast"
            for number in range(2):
                parts[number].append(Part(version=5, index=bucket.index, names=list(bucket.names), way=bucket.way))
            told[index].set()
    for thread in threads:
        thread.join(20)
    assert not failed, failed
    assert group.num_broadcasts == len(BUCKETS)
    for _, model in engines:
        check(model)


class SenderTo(NcclSender):
    """Meets the next of these groups; None: nobody came."""

    def __init__(self, *groups: Fallible | None) -> None:
        self._groups = iter(groups)

    def join(self, meeting: Meeting) -> Fallible:
        group = next(self._groups)
        if group is None:
            raise RuntimeError("timed out after 30 s")
        return group


def test_the_group_of_a_round_ends_when_the_next_one_meets() -> None:
    groups = [Fallible(hangs=False) for _ in range(2)]
    sender = SenderTo(*groups)
    sender.meet(MEETING)
    sender.meet(MEETING)
    assert [group.disabled for group in groups] == [True, False]


@pytest.mark.usefixtures("_cpu")
@pytest.mark.parametrize("group", [None, Fallible(hangs=False)], ids=["nobody came", "an engine is gone"])
def test_a_rank_goes_on_without_the_engines(group: Fallible | None) -> None:
    """The other ranks are in the next gather: an exception here would leave them there."""
    sender = SenderTo(group)
    sender.meet(MEETING)
    sent = [b.index for i, part in enumerate(BUCKETS) for b in sender.send(i, NAMES[part], TENSORS[part], 0.0)]
    assert sent == [0, 1]
    if group is not None:
        assert group.disabled and group.num_broadcasts == 1, "nothing is sent in a broken group"


def test_whoever_waits_for_a_member_that_is_gone_is_released() -> None:
    group = Fallible(hangs=True)
    started = time.monotonic()
    with ended_when_stalled(group, after_s=0.1):
        group.broadcast(TENSORS[0], 0)
    assert group.disabled and 0.1 <= time.monotonic() - started < 5
    quick = Fallible(hangs=True)
    with ended_when_stalled(quick, after_s=0.1):
        pass
    time.sleep(0.2)
    assert not quick.disabled


@pytest.mark.usefixtures("_cpu")
def test_an_engine_refuses_a_broadcast_that_was_broken_off_and_takes_the_next_round() -> None:
    transfer, model = engine(NcclBroadcastEngine)
    part = Part(version=5, index=0, names=list(NAMES), way={})
    with pytest.raises(RuntimeError, match="no group"):
        transfer.receive_weights(part)
    transfer.model_update_group, transfer.packed = (broken := Fallible(hangs=True)), True
    threading.Timer(0.1, broken.destroy).start()
    with pytest.raises(RuntimeError, match="broadcast of bucket 0 of version 5 was broken off"):
        transfer.receive_weights(part)
    open_version(transfer)
    assert transfer.model_update_group is None, "a new round has a new group"
    with pytest.raises(ValueError, match="3 of 3 announced tensors never came"):
        transfer.finish_weight_update()
    assert model.loaded.keys() == set(NAMES), "what it loaded from the broken group was never committed"


def test_an_engine_is_told_of_its_group_in_vllms_words() -> None:
    transfer, _ = engine(NcclBroadcastEngine)
    told: list[dict[str, Any]] = []

    class Joining(Intake):
        async def _tell_core(self, info: dict[str, Any]) -> None:
            told.append(over_the_wire(info))

    asyncio.run(Joining().join_group("", Meeting(host="10.0.0.1", port=4000, size=3), 2))
    info = transfer.parse_init_info(told[0])
    assert (info.master_address, info.master_port, info.world_size, info.rank_offset) == ("10.0.0.1", 4000, 3, 2)
    assert info.packed
    announced = {"version": 1, "dtype": "float32", "shapes": {}}
    assert isinstance(transfer.parse_init_info(announced), Announcement)


class Memories:
    """Shared memory of a GPU that is none: the handle is a number, which `rebuild` looks up as CUDA would."""

    def __init__(self, gpu: str) -> None:
        self.gpu, self.made = gpu, []
        self.closed = 0

    def share(self, num_bytes: int) -> Shared:
        self.made.append(torch.zeros(num_bytes, dtype=torch.uint8))
        return Shared(self.made[-1], self.gpu, (0, bytes([len(self.made) - 1]), num_bytes, 0, False, b"", 0, b"", True))

    def rebuild(self, arguments: list[Any]) -> torch.Tensor:
        assert arguments[:6] == [torch.Tensor, (arguments[8],), (1,), 0, torch.storage.TypedStorage, torch.uint8]
        assert len(arguments) == 15
        return self.made[arguments[7][0]]

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
    sender.share, sender.gather = memories.share, gather  # type: ignore[method-assign]
    return sender


def test_an_engine_reads_the_memory_of_the_rank_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with a GPU each; only the second one's holds the right bytes for an engine there."""
    here, elsewhere = Memories("GPU-1"), Memories("GPU-0")
    handles: list[Any] = []
    other = ipc_sender(1, here, lambda mine: handles.append(mine) or [])
    first = ipc_sender(0, elsewhere, lambda mine: [mine, handles[-1]])
    transfer, model = ipc_engine(here, monkeypatch)
    for index, part in enumerate(BUCKETS):
        assert not list(other.send(index, NAMES[part], TENSORS[part], 0.0)), "rank 0 alone tells the engines"
        wrong = [tensor + 1 for tensor in TENSORS[part]]
        (bucket,) = first.send(index, NAMES[part], wrong, 0.0)
        assert set(bucket.way["handles"]) == {"GPU-0", "GPU-1"}
        info = {"version": 5, "index": index, "names": list(bucket.names), "way": bucket.way}
        transfer.receive_weights(transfer.parse_update_info(over_the_wire(info)))
    transfer.finish_weight_update()
    check(model)
    assert here.closed == 1
    lonely = {"handles": {"GPU-0": bucket.way["handles"]["GPU-0"]}}
    open_version(transfer)
    with pytest.raises(ValueError, match="IPC handle not found for GPU UUID GPU-1"):
        transfer.receive_weights(Part(version=5, index=0, names=list(NAMES[:2]), way=lonely))


def test_a_bucket_is_packed_while_the_one_before_is_read() -> None:
    memories = Memories("g")
    sender = ipc_sender(0, memories, lambda mine: [mine])

    def send(index: int, tensor: torch.Tensor) -> bytes:
        (bucket,) = sender.send(index, ["a"], [tensor], 0.0)
        return bucket.way["handles"]["g"][1]

    large = torch.arange(100, dtype=torch.float32)
    first, second = send(0, large), send(1, TENSORS[0])
    assert first != second and torch.equal(memories.made[0].view(torch.float32), large)
    assert send(2, TENSORS[1]) == first, "the third bucket fits into the memory of the first"
    assert send(3, large) not in (first, second), "a larger one gets larger memory"


def test_a_handle_says_all_that_torch_needs() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    given = dict(zip(names, rebuild_arguments([*"0123456", b"", True]), strict=True))
    assert (given["tensor_size"], given["storage_device"], given["storage_size_bytes"]) == (("2",), "0", "2")
    assert given["event_sync_required"] is True
