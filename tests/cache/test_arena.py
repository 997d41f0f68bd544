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
    assert sorted(i for i in indices if i is not None) == [0, 1, 2, 3, 4]
    arrays = [np.frombuffer(arena.view(i), np.uint8) for i in range(5)]
    for i, array in enumerate(arrays):
        assert array.size == size
        assert array.ctypes.data % 4096 == 0
        assert not array.any()
        array[:] = i + 1
    assert [set(array.tolist()) for array in arrays] == [{1}, {2}, {3}, {4}, {5}]


def test_blocks_run_out_and_come_back() -> None:
    """allocate returns None exactly while all blocks are taken, and never a taken block."""
    arena = Arena(2, 4096)
    first, second = arena.allocate(), arena.allocate()
    assert first is not None
    assert {first, second} == {0, 1}
    assert (arena.allocate(), arena.available) == (None, 0)
    arena.free(first)
    assert arena.available == 1
    assert arena.allocate() == first
    arena.check_integrity()


@pytest.mark.parametrize("index", [0, 1, -1, 2])
def test_only_a_taken_block_can_be_freed(index: int) -> None:
    """A block that is free already, was never taken, or does not exist is refused; the free list stays intact."""
    arena = Arena(2, 4096)
    taken = arena.allocate()
    assert taken == 0
    arena.free(taken)
    with pytest.raises(ValueError, match=f"expected a taken block, got block {index}"):
        arena.free(index)
    arena.check_integrity()
    assert arena.available == 2


@pytest.mark.parametrize(("capacity", "size"), [(0, 4096), (-1, 4096), (1, 0), (1, 4095), (1, 6144)])
def test_impossible_arenas_are_refused(capacity: int, size: int) -> None:
    """No blocks, or blocks that would not be aligned, are an error that names both numbers."""
    with pytest.raises(ValueError, match=f"got {capacity} blocks of {size} bytes"):
        Arena(capacity, size)


def test_close_ends_the_views() -> None:
    """The blocks of a closed arena cannot be read; closing again has no effect."""
    arena = Arena(2, 4096)
    view = arena.view(0)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_memory_in_use_is_not_unmapped() -> None:
    """While an array refers to a block, close raises and the array's bytes stay."""
    arena = Arena(1, 4096)
    array = np.frombuffer(arena.view(0), np.uint8)
    array[:] = 7
    with pytest.raises(BufferError):
        arena.close()
    assert set(array.tolist()) == {7}
