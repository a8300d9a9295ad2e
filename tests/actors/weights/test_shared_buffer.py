"""Memory that another process maps by its path."""

import os

import numpy as np

from actors.weights.shared_buffer import ALIGNMENT, PAGE, BufferMapping, SharedBuffer


def test_the_arena_is_read_back_by_its_path_and_is_used_again() -> None:
    buffer = SharedBuffer()
    first = (np.arange(5, dtype=np.float32), np.arange(6, dtype=np.uint16).reshape(2, 3))
    offsets, num_bytes = buffer.write(first)
    assert offsets == [0, ALIGNMENT] and num_bytes == 2 * ALIGNMENT
    maps = BufferMapping()
    seen = maps.read(buffer.path, num_bytes)
    np.testing.assert_array_equal(seen[:20].view(np.float32), first[0])
    np.testing.assert_array_equal(seen[64:76].view(np.uint16).reshape(2, 3), first[1])
    _, smaller = buffer.write((np.full(3, 7, np.float32),))
    assert smaller == ALIGNMENT
    assert seen[:12].view(np.float32).tolist() == [7, 7, 7]
    big = np.arange(PAGE // 4 + 1, dtype=np.float32)
    _, larger = buffer.write((big,))
    assert larger == PAGE + ALIGNMENT
    assert os.path.getsize(buffer.path) == 2 * PAGE
    assert maps.read(buffer.path, 8) is seen, "mapped once, and again only when it has grown"
    np.testing.assert_array_equal(maps.read(buffer.path, larger)[: big.nbytes].view(np.float32), big)
