"""Huge pages for tensors in RAM (Linux 6.1): decode reads all dense weights per token, faster than from 4 KiB pages."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

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
