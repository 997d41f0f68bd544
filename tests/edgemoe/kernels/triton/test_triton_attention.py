"""Attention of one row to a stored KV, of any sizes, sinks and windows, against float32: on a GPU, or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from stored_rows import Stored, close, numbers

from edgemoe.kernels.triton.attention import StoredRowAttention
from edgemoe.kernels.triton.kv_rows import RowForm

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)


CASES = {
    "one head each": (StoredRowAttention(3, 3, 16, 16, 0.3, 0, None, 1), 300),
    "a remainder of 16": (StoredRowAttention(4, 2, 80, 80, 0.1, 0, None, 0), 70),
    "a remainder of 32": (StoredRowAttention(4, 2, 96, 96, 0.1, 0, None, 0), 5),
    "smaller values, a window": (StoredRowAttention(8, 1, 192, 128, 0.07, 50, None, 0), 130),
    "larger values": (StoredRowAttention(4, 1, 24, 80, 0.2, 0, None, 0), 65),
    "256": (StoredRowAttention(2, 1, 256, 256, 0.06, 0, None, 0), 40),
    "576": (StoredRowAttention(2, 1, 576, 512, 0.04, 0, None, 0), 40),
    "64 heads share one": (StoredRowAttention(64, 1, 32, 32, 0.2, 0, None, 0), 90),
    "the first token": (StoredRowAttention(6, 3, 64, 48, 0.2, 7, None, 0), 0),
}
"""Name -> shape and tokens before the row."""


@pytest.mark.parametrize("name", CASES)
def test_stored_rows_match_float32(name):
    """The row is written at the sequence's place, and all rows within the window are attended to; sinks for some."""
    shape, past = CASES[name]
    if past % 4 != 1:
        shape = replace(shape, sinks=numbers(shape.heads, seed=9))
    stored = Stored(shape, past)
    keys, values = (
        numbers(shape.kv_heads, shape.dim, seed=3),
        numbers(shape.kv_heads, shape.value_dim, seed=4),
    )
    before = [part.clone() for part in stored.parts]
    shape.store(keys, values, stored.state)
    for part, old, new in zip(stored.parts, before, (keys, values), strict=True):
        old[shape.layer, :, past] = new
        assert torch.equal(part, old)
    queries = numbers(shape.heads, shape.dim, seed=5)
    assert close(stored.attend(queries), stored.want(queries), 0.006)


def test_a_sink_takes_its_share():
    """One token and a sink with an equal score: half of the value."""
    shape = StoredRowAttention(1, 1, 16, 16, 1.0, 0, torch.zeros(1, device=DEVICE), 0)
    stored = Stored(shape, 0)
    value = numbers(1, 16)
    shape.store(torch.zeros_like(value), value, stored.state)
    assert torch.equal(stored.attend(torch.zeros_like(value)), value / 2)


def test_tiles_hold_each_row_once():
    """Two tiles where they are smaller than the next power of two."""
    sizes = {
        8: (16, 0),
        16: (16, 0),
        24: (32, 0),
        80: (64, 16),
        192: (128, 64),
        576: (512, 64),
        120: (128, 0),
    }
    assert {size: RowForm(size).tiles for size in sizes} == sizes
