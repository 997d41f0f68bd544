"""cache.arena: aligned blocks that do not overlap, each either free or taken."""

from __future__ import annotations

import numpy as np
import pytest

from cache.arena import Arena


@pytest.mark.parametrize("size", [4096, 12288])
def test_blocks_are_aligned_and_separate(size: int) -> None:
    """Every block starts on a 4096-byte boundary, is zero at first, has its size, and overlaps no other."""
    arena = Arena(5, size)
    indices = [arena.allocate() for _ in range(5)]
    assert sorted(indices) == [0, 1, 2, 3, 4]
    arrays = [np.frombuffer(arena.views[i], np.uint8) for i in range(5)]
    for i, array in enumerate(arrays):
        assert array.size == size
        assert array.ctypes.data % 4096 == 0
        assert not array.any()
        array[:] = i + 1
    assert [set(array.tolist()) for array in arrays] == [{1}, {2}, {3}, {4}, {5}]


def test_blocks_run_out_and_come_back() -> None:
    """allocate never returns a taken block, and the block freed last comes back first."""
    arena = Arena(2, 4096)
    first, second = arena.allocate(), arena.allocate()
    assert {first, second} == {0, 1}
    assert arena.available == 0
    arena.free(second)
    arena.free(first)
    assert arena.available == 2
    assert (arena.allocate(), arena.allocate()) == (first, second)


def test_close_ends_the_views() -> None:
    """The blocks of a closed arena cannot be read; closing again has no effect."""
    arena = Arena(2, 4096)
    view = arena.views[0]
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_memory_in_use_is_not_unmapped() -> None:
    """While an array refers to a block, close raises and the array's bytes stay."""
    arena = Arena(1, 4096)
    array = np.frombuffer(arena.views[0], np.uint8)
    array[:] = 7
    with pytest.raises(BufferError):
        arena.close()
    assert set(array.tolist()) == {7}
