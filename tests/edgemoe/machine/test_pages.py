"""Pages of tensors, by the operating system's count: huge ones, and ones that take memory when they are written."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from present_pages import PAGEMAP, present_pages

from edgemoe.machine.pages import in_huge_pages, return_pages, sparse_tensor

SMAPS = Path("/proc/self/smaps")
LARGE = 16 << 20
HUGE = 2 << 20


def huge_bytes(tensor: torch.Tensor) -> int:
    """Bytes in huge pages of the mappings that a tensor lies in."""
    start, total, counts = tensor.data_ptr(), 0, False
    for line in SMAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            counts = int(found[1], 16) < start + tensor.nbytes and int(found[2], 16) > start
        elif counts and (found := re.match(r"AnonHugePages:\s+(\d+) kB", line)):
            total += int(found[1]) * 1024
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="the system does not count huge pages")
def test_large_tensors_move_into_huge_pages():
    """A large tensor moves as far as the system has such pages. A view and a small tensor are accepted."""
    large, small = torch.arange(LARGE // 4, dtype=torch.int32), torch.arange(100)
    before = huge_bytes(large)
    in_huge_pages([large, large[7:], small])
    if huge_bytes(large) == before:
        pytest.skip("the system grants no huge pages")
    assert huge_bytes(large) - before >= HUGE
    assert torch.equal(large, torch.arange(LARGE // 4, dtype=torch.int32))
    assert torch.equal(small, torch.arange(100))


def test_whole_huge_pages_are_collapsed_once(monkeypatch):
    """Every whole huge page of a tensor, and no byte next to them, however many views of it there are."""
    tensor, seen = torch.empty(LARGE, dtype=torch.uint8), []

    def madvise(address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
        seen.append((address.value, size.value, advice))
        return 0

    monkeypatch.setattr("edgemoe.machine.pages.ctypes.CDLL", lambda _: SimpleNamespace(madvise=madvise))
    in_huge_pages([tensor, tensor[5:], torch.empty(100)])
    [(start, size, advice)] = seen
    assert start % HUGE == size % HUGE == 0
    assert 0 <= start - tensor.data_ptr() < HUGE
    assert 0 <= tensor.data_ptr() + LARGE - (start + size) < HUGE
    assert advice == 25  # MADV_COLLAPSE of linux/mman.h


def test_small_tensors_are_accepted():
    """No tensor, an empty one, and one smaller than a huge page are no error."""
    in_huge_pages([])
    in_huge_pages([torch.empty(0), torch.ones(1000)])


def pages_of(tensor: torch.Tensor) -> int:
    """Pages of a tensor's storage that are in memory."""
    storage = tensor.untyped_storage()
    return present_pages(storage.data_ptr(), storage.nbytes())


@pytest.mark.skipif(not PAGEMAP.exists(), reason="the system does not list pages")
def test_a_sparse_tensor_takes_the_pages_that_are_written():
    """Also where tensors of its size were written and freed before, between others that stay."""
    size = (64, mmap.PAGESIZE)  # 256 KiB: malloc would take it from its heap
    earlier = [sparse_tensor(size, torch.uint8).fill_(1) for _ in range(40)]
    assert all(pages_of(each) == 64 for each in earlier)
    del earlier[::2]
    made = [sparse_tensor(size, torch.uint8) for _ in range(20)]
    assert [pages_of(each) for each in made] == [0] * 20
    made[0][3:5] = 7
    assert pages_of(made[0]) == 2
    assert made[0].sum() == 2 * mmap.PAGESIZE * 7
    assert sparse_tensor((2, 3), torch.bfloat16).shape == (2, 3)


@pytest.mark.skipif(not PAGEMAP.exists(), reason="the system does not list pages")
@pytest.mark.parametrize(
    ("first", "pages"), [(0, 3), (1, 3), (mmap.PAGESIZE - 8, 3), (mmap.PAGESIZE, 2), (3 * mmap.PAGESIZE, 0)]
)
def test_pages_are_returned_behind_the_bytes_that_stay(first, pages):
    """Of the middle row of three, whose ends share pages with its neighbours; no byte that stays changes."""
    row = 4 * mmap.PAGESIZE
    made = sparse_tensor((3, row + 8), torch.uint8).fill_(7)
    assert pages_of(made) == 13
    return_pages(made[1], first)
    assert pages_of(made) == 13 - pages  # the row begins 8 bytes after a page's start and ends 16 after one
    assert (made[0] == 7).all()
    assert (made[1, :first] == 7).all()
    assert (made[2] == 7).all()
    assert int((made[1] == 0).sum()) == pages * mmap.PAGESIZE


def test_a_system_without_huge_pages_gives_sparse_tensors_too(monkeypatch):
    """The advice is refused with EINVAL there."""

    class Refusing(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr("edgemoe.machine.pages.mmap.mmap", Refusing)
    assert sparse_tensor((4,), torch.int32).tolist() == [0] * 4
