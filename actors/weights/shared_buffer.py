"""The memory through which weights get from an actor process into its engine core."""

import contextlib
import itertools
import mmap
import os
from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes, of each tensor
PAGE = 2**21  # a huge page


class SharedBuffer:
    """Memory that the engine core maps by path. A memfd has no name: nothing is left behind when the actor is killed,
    and a container's small /dev/shm is no limit. Kept from sync to sync, since a fresh page costs more than a copy."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("t2g-weights")
        self._bytes = np.zeros(0, np.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, tensors: Sequence[np.ndarray]) -> tuple[list[int], int]:
        """Lay the tensors one after the other; returns their byte offsets and the bytes used."""
        ends = list(itertools.accumulate(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors))
        offsets = [0, *ends[:-1]]
        if ends[-1] > len(self._bytes):
            os.ftruncate(self._fd, -(-ends[-1] // PAGE) * PAGE)
            self._bytes = map_whole(self._fd)
        for offset, tensor in zip(offsets, tensors, strict=True):
            self._bytes[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(np.uint8)
        return offsets, ends[-1]


class BufferMapping:
    """Arenas as the engine core sees them, each mapped once."""

    def __init__(self) -> None:
        self._bytes: dict[str, np.ndarray] = {}

    def read(self, path: str, num_bytes: int) -> np.ndarray:
        """The first bytes of the buffer at `path`, or more; they change with its next `write`."""
        if len(self._bytes.get(path, b"")) < num_bytes:
            with open(path, "r+b") as file:
                self._bytes[path] = map_whole(file.fileno())
        return self._bytes[path]


def map_whole(fd: int) -> np.ndarray:
    """A file's bytes, shared and writable, in huge pages where the kernel has them."""
    memory = mmap.mmap(fd, 0)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
