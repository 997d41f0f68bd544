"""Pages of tensors in RAM (Linux 6.1): huge ones for dense weights, small ones for what is filled little by little.

Decode reads all dense weights per token, faster than from 4 KiB pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import torch

_HUGE = 1 << 21
"""Bytes of the smallest huge page; on a machine whose smallest one is larger the advice has no effect."""

_PAGE = 4096

_MADV_NOHUGEPAGE, _MADV_COLLAPSE = 15, 25


def in_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Collapses the whole huge pages of the tensors' storages in place, as far as the system supports it."""
    _advise(tensors, _HUGE, _MADV_COLLAPSE)


def in_small_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Makes the tensors' storages take memory by pages of 4 KiB, where a system takes huge ones by itself."""
    _advise(tensors, _PAGE, _MADV_NOHUGEPAGE)


def _advise(tensors: Iterable[torch.Tensor], page: int, advice: int) -> None:
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None:
        return
    for start, size in {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors}:
        first, end = -(-start // page) * page, (start + size) // page * page
        if first < end:
            advise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
