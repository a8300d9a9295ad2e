"""Shared memory between an actor process and its engine core, for weights."""

import contextlib
import itertools
import mmap
import os
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes, of each tensor
PAGE = 2**21  # a huge page


class SharedBuffer:
    """Memory that the engine core maps by path.

    A memfd has no name: no file stays when the actor is killed, and the small /dev/shm of a container is no limit. The
    buffer is reused in each sync, since a fresh page costs more than a copy.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("t2g-weights")
        self._bytes = np.zeros(0, np.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, tensors: Sequence[np.ndarray]) -> tuple[list[int], int]:
        """Write the tensors one after the other; return their byte offsets and the bytes used."""
        ends = list(itertools.accumulate(_round_up(tensor.nbytes, ALIGNMENT) for tensor in tensors))
        offsets = [0, *ends[:-1]]
        num_bytes = ends[-1]
        if num_bytes > len(self._bytes):
            os.ftruncate(self._fd, _round_up(num_bytes, PAGE))
            self._bytes = map_file(self._fd)
        for offset, tensor in zip(offsets, tensors, strict=True):
            end = offset + tensor.nbytes
            self._bytes[offset:end] = tensor.reshape(-1).view(np.uint8)
        return offsets, num_bytes


class BufferMapping:
    """The buffers that the engine core has mapped, each once."""

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}

    def read(self, path: str, num_bytes: int) -> np.ndarray:
        """Return at least the first `num_bytes` bytes of the buffer at `path`; its next `write` changes them."""
        if len(self._bytes.get(path, b"")) < num_bytes:
            with open(path, "r+b") as file:
                self._bytes[path] = map_file(file.fileno())
        return self._bytes[path]


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def map_file(fd: int) -> np.ndarray:
    """Map a file, shared and writable, in huge pages if the kernel supports them."""
    memory = mmap.mmap(fd, 0)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
