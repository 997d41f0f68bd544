"""cache.arena: blocks that are aligned, separate, and each somebody's or free."""

from __future__ import annotations

import numpy as np
import pytest

from cache.arena import Arena


@pytest.mark.parametrize("size", [4096, 12288])
def test_blocks_are_aligned_and_separate(size: int) -> None:
    """Every block starts on a 4096-byte boundary, is zero at first, has its size, and overlaps no other."""
    arena = Arena(5, size)
    indices = [arena.allocate() for _ in range(5)]
    assert sorted(i for i in indices if i is not None) == [0, 1, 2, 3, 4]
    arrays = [np.frombuffer(arena.view(i), np.uint8) for i in range(5)]
    for i, array in enumerate(arrays):
        assert array.size == size
        assert array.ctypes.data % 4096 == 0
        assert not array.any()
        array[:] = i + 1
    assert [set(array.tolist()) for array in arrays] == [{1}, {2}, {3}, {4}, {5}]


def test_blocks_run_out_and_come_back() -> None:
    """allocate says None exactly while all are taken, and never hands out a taken block."""
    arena = Arena(2, 4096)
    first, second = arena.allocate(), arena.allocate()
    assert first is not None
    assert {first, second} == {0, 1}
    assert (arena.allocate(), arena.available) == (None, 0)
    arena.free(first)
    assert arena.available == 1
    assert arena.allocate() == first
    arena.check_integrity()


def test_peak_remembers_the_most() -> None:
    """peak is the most blocks taken at once, and does not fall when they are freed."""
    arena = Arena(4, 4096)
    taken = [arena.allocate() for _ in range(3)]
    for index in taken:
        assert index is not None
        arena.free(index)
    arena.allocate()
    assert (arena.peak, arena.available) == (3, 3)


@pytest.mark.parametrize("index", [0, 1, -1, 2])
def test_only_what_is_taken_can_be_freed(index: int) -> None:
    """A block freed twice, never taken, or not there at all is refused, and the free list stays whole."""
    arena = Arena(2, 4096)
    taken = arena.allocate()
    assert taken == 0
    arena.free(taken)
    with pytest.raises(ValueError, match="not taken"):
        arena.free(index)
    arena.check_integrity()
    assert arena.available == 2


@pytest.mark.parametrize(("capacity", "size"), [(0, 4096), (-1, 4096), (1, 0), (1, 4095), (1, 6144)])
def test_impossible_arenas_are_refused(capacity: int, size: int) -> None:
    """No blocks, or blocks that would not be aligned, are an error."""
    with pytest.raises(ValueError, match="blocks of"):
        Arena(capacity, size)


def test_close_ends_the_views() -> None:
    """A closed arena's blocks cannot be looked at any more; closing again does nothing."""
    arena = Arena(2, 4096)
    view = arena.view(0)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_memory_in_use_is_not_unmapped() -> None:
    """While an array looks at a block, close refuses instead of pulling the memory away."""
    arena = Arena(1, 4096)
    array = np.frombuffer(arena.view(0), np.uint8)
    array[:] = 7
    with pytest.raises(BufferError):
        arena.close()
    assert set(array.tolist()) == {7}
