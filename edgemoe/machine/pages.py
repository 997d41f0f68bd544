"""Pages of tensors in RAM (Linux 6.1): huge ones for dense weights, small ones for what is filled little by little.

Decode reads all dense weights per token, faster than from 4 KiB pages.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

_HUGE = 1 << 21
"""Bytes of the smallest huge page; on a machine whose smallest one is larger the advice has no effect."""

_MADV_COLLAPSE = 25


def in_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Collapses the whole huge pages of the tensors' storages in place, as far as the system supports it."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    for start, size in {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}:
        first, end = -(-start // _HUGE) * _HUGE, (start + size) // _HUGE * _HUGE
        if first < end:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)


def return_pages(tensor: torch.Tensor, first: int, end: int | None = None) -> None:
    """Returns the memory of a part of a tensor of sparse_tensor to the system; the part reads as zeros from then on.

    Args:
        tensor: contiguous, perhaps a part of one; a page that it shares with others, or with bytes that stay, stays.
        first: bytes before the part, which stay.
        end: the first byte after the part; None: the part ends with the tensor.
    """
    start, last = tensor.data_ptr(), tensor.nbytes if end is None else end
    low = -(-(start + first) // mmap.PAGESIZE) * mmap.PAGESIZE
    high = (start + last) // mmap.PAGESIZE * mmap.PAGESIZE
    advise = _madvise()
    if advise is not None and low < high:
        advise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), mmap.MADV_DONTNEED)


@cache
def _madvise() -> Any:
    """The system's function; None: it has none."""
    return getattr(ctypes.CDLL(None), "madvise", None)


def sparse_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor of zeros whose pages take memory when they are written, and give it back with the tensor.

    malloc would reuse pages that are resident, and keep pages of a freed tensor; a huge page would take the memory of
    512 small ones.

    Args:
        shape: the shape of the tensor, with at least one element.
        dtype: the dtype of its elements.

    Raises:
        OSError: the system has no address space, or no map, left.
    """
    pages = mmap.mmap(
        -1, dtype.itemsize * torch.Size(shape).numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    with suppress(AttributeError, OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
