"""cache.arena: aligned blocks that do not overlap, each either free or taken."""

from __future__ import annotations

import numpy as np
import pytest
from present_pages import PAGEMAP, present_pages

from edgemoe.cache.arena import Arena


@pytest.mark.parametrize("size", [4096, 12288])
def test_blocks_are_aligned_and_separate(size: int) -> None:
    """Every block starts on a 4096-byte boundary, is zero at first, has its size, and overlaps no other."""
    arena = Arena(5, size)
    indices = [arena.unused.pop() for _ in range(5)]
    assert sorted(indices) == [0, 1, 2, 3, 4]
    arrays = [np.frombuffer(arena.views[i], np.uint8) for i in range(5)]
    for i, array in enumerate(arrays):
        assert array.size == size
        assert array.ctypes.data % 4096 == 0
        assert not array.any()
        array[:] = i + 1
    assert [set(array.tolist()) for array in arrays] == [{1}, {2}, {3}, {4}, {5}]


def test_blocks_run_out_and_come_back() -> None:
    """A taken block is not free, and the block freed last is taken first."""
    arena = Arena(2, 4096)
    first, second = arena.unused.pop(), arena.unused.pop()
    assert {first, second} == {0, 1}
    assert arena.available == 0
    arena.free(second)
    arena.free(first)
    assert arena.available == 2
    assert (arena.unused.pop(), arena.unused.pop()) == (first, second)


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


@pytest.mark.skipif(not PAGEMAP.exists(), reason="the system does not list pages")
@pytest.mark.parametrize("locked", [False, True])
def test_blocks_that_leave_take_no_memory(locked: bool) -> None:
    """Neither locked pages nor parts of huge ones stay; blocks that come back are in memory, zero and separate."""
    arena = Arena(700, 8192, locked=locked)  # 5.7 MB: two huge pages and more
    address = np.frombuffer(arena.views[0], np.uint8).ctypes.data
    for index in range(700):
        arena.views[index][:] = bytes([index % 251]) * 8192
    for blocks in (699, 300, 1, 0, 450, 700):
        before = arena.capacity
        arena.set_capacity(blocks)
        arena.back(blocks * 8192)
        assert arena.capacity == arena.available == blocks
        assert present_pages(address, 700 * 8192) == 2 * blocks
        if blocks < before:
            found = [view[0] if view[0] == view[-1] else None for view in arena.views[:blocks]]
            assert found == [index % 251 for index in range(blocks)]
        else:
            assert not any(map(any, arena.views[before:blocks:50]))
        assert sorted(arena.unused.pop() for _ in range(blocks)) == list(range(blocks))
        for index in range(blocks):
            arena.free(index)


def test_a_taken_block_behind_the_capacity_is_not_to_be_had_again() -> None:
    """A block that is freed after it left stays out; one in front of it comes back."""
    arena = Arena(3, 4096)
    taken = [arena.unused.pop() for _ in range(3)]
    arena.set_capacity(1)
    for index in taken:
        arena.free(index)
    assert (arena.available, arena.unused.pop()) == (1, 0)
