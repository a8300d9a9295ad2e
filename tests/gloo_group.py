"""A gloo group on CPUs where vLLM's packed broadcast expects one of NCCL on GPUs."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from actors.engines.rollout import RolloutWorker
from actors.vllm_compat import transports

TIMEOUT = timedelta(seconds=20)


class GlooGroup:
    """What is used of vLLM's PyNcclCommunicator."""

    def __init__(self, store: TCPStore, rank: int, size: int, device: Any = None) -> None:
        self._group = ProcessGroupGloo(PrefixStore("weights", store), rank, size, TIMEOUT)
        self._store = store
        self.disabled = False
        self.num_broadcasts = 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if not self.disabled:
            self.num_broadcasts += 1
            self._group.broadcast(tensor, src).wait()

    def destroy(self) -> None:
        self.disabled = True


class Stream:
    """A CPU has none: everything is done when it returns."""

    device = torch.device("cpu")

    def synchronize(self) -> None: ...


@contextmanager
def cpu_streams() -> Iterator[None]:
    """vLLM's packed broadcast asks for CUDA streams, in both of its ends; here they are ours."""
    from vllm.distributed.weight_transfer import packed_tensor

    streams, index, communicator = (
        packed_tensor._get_streams, torch.accelerator.current_device_index, transports.communicator
    )  # fmt: skip
    gloo_for_good()
    try:
        yield
    finally:
        packed_tensor._get_streams = streams
        torch.accelerator.current_device_index = index
        transports.communicator = communicator


def gloo_for_good() -> None:
    """In this process, perhaps an engine core, the members of a group meet in gloo."""
    from vllm.distributed.weight_transfer import packed_tensor

    packed_tensor._get_streams = lambda device, num_buffers: (Stream(),) * num_buffers
    torch.accelerator.current_device_index = lambda: 0
    transports.communicator = GlooGroup


class GlooWorker(RolloutWorker):
    """A real engine on a CPU that receives its weights as on GPUs, but for the library that moves the bytes."""

    async def start(self) -> int:
        assert os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1", "the core is sent a function"
        folder = str(Path(__file__).parent)

        def prepare(worker: Any) -> None:
            import sys

            sys.path.append(folder)
            import gloo_group

            gloo_group.gloo_for_good()

        vocabulary = await super().start()
        await self._llm.collective_rpc(prepare)
        return vocabulary

    def stop(self) -> None:
        """Where it lives in the test's own process, which would end with the engine."""
        self._watch.cancel()
        self._llm.shutdown()


class Fallible(GlooGroup):
    """A group of nobody, whose broadcast raises or waits until it is destroyed."""

    def __init__(self, *, hangs: bool) -> None:
        self.disabled = False
        self.hangs = hangs
        self.num_broadcasts = 0
        self._released = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        if self.disabled:
            return
        self.num_broadcasts += 1
        if not self.hangs:
            raise RuntimeError("NCCL error: remote process exited")
        assert self._released.wait(10)

    def destroy(self) -> None:
        self.disabled = True
        self._released.set()
