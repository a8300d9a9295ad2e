"""The memory through which weights get from an actor process into its engine core."""

import itertools
import os
from collections.abc import Sequence

import numpy as np
import xxhash

ALIGNMENT = 64  # bytes, of each tensor


class Arena:
    """Memory that the engine core maps by path. A memfd has no name: nothing is left behind when the actor is killed,
    and a container's small /dev/shm is no limit. Kept from sync to sync, since fresh pages cost half the rate."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("t2g-weights")
        self._bytes: np.ndarray = np.zeros(0, np.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, tensors: Sequence[np.ndarray]) -> tuple[list[int], int]:
        """Lay the tensors one after the other; returns their byte offsets and the bytes used."""
        ends = list(itertools.accumulate(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors))
        offsets = [0, *ends[:-1]]
        if ends[-1] > len(self._bytes):
            os.ftruncate(self._fd, ends[-1])
            self._bytes = np.memmap(self.path, np.uint8, "r+", shape=(ends[-1],))
        for offset, tensor in zip(offsets, tensors, strict=True):
            self._bytes[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(np.uint8)
        return offsets, ends[-1]

    def xxh3(self, num_bytes: int) -> str:
        return xxhash.xxh3_64_hexdigest(self._bytes[:num_bytes])
