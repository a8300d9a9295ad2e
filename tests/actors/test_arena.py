"""Memory that another process maps by its path."""

import os

import numpy as np
import xxhash

from actors.arena import ALIGNMENT, Arena


def test_the_arena_is_read_back_by_its_path_and_is_used_again() -> None:
    arena = Arena()
    first = (np.arange(5, dtype=np.float32), np.arange(6, dtype=np.uint16).reshape(2, 3))
    offsets, num_bytes = arena.write(first)
    assert offsets == [0, ALIGNMENT] and num_bytes == 2 * ALIGNMENT
    seen = np.memmap(arena.path, np.uint8, "r", shape=(num_bytes,))
    np.testing.assert_array_equal(seen[:20].view(np.float32), first[0])
    np.testing.assert_array_equal(seen[64:76].view(np.uint16).reshape(2, 3), first[1])
    assert arena.xxh3(num_bytes) == xxhash.xxh3_64_hexdigest(seen.tobytes())
    _, smaller = arena.write((np.full(3, 7, np.float32),))
    assert smaller == ALIGNMENT and seen[:12].view(np.float32).tolist() == [7, 7, 7]
    _, larger = arena.write((np.zeros(1000, np.float32),))
    assert larger == 4032 and os.path.getsize(arena.path) == 4032
