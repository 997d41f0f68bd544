"""Attention of one row to a stored KV, of any sizes, sinks and windows, against float32: on a GPU, or interpreted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from stored_rows import Stored, close, numbers

from edgemoe.kernels.triton import attention
from edgemoe.kernels.triton.attention import StoredRowAttention
from edgemoe.kernels.triton.kv_rows import RowForm
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.rows import encode, rotate

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(attention, "SPLITS", 4)  # the interpreter's time goes by programs


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


CODED = {
    "8 bits": (StoredRowAttention(4, 2, 48, 40, 0.2, 0, None, 1, KVFormat("q8_0", "q8_0")), 70),
    "4 bits": (StoredRowAttention(4, 2, 64, 64, 0.2, 0, None, 0, KVFormat("q4_0", "q4_0")), 20),
    "4 bits, not turned": (
        StoredRowAttention(2, 2, 20, 20, 0.2, 9, None, 0, KVFormat("q4_0", "q4_0", False)),
        20,
    ),
    "keys of 8 bits": (StoredRowAttention(4, 1, 32, 72, 0.2, 0, None, 1, KVFormat("q8_0", "bf16")), 5),
    "values of 4 bits": (StoredRowAttention(4, 1, 80, 32, 0.2, 0, None, 0, KVFormat("bf16", "q4_0")), 5),
}


@pytest.mark.parametrize("name", CODED)
def test_coded_rows_match_the_reference(name):
    """The kernels write exactly the bytes of kv.rows, and attention decodes them."""
    shape, past = CODED[name]
    stored = Stored(shape, past)
    keys, values = (
        numbers(shape.kv_heads, shape.dim, seed=3),
        numbers(shape.kv_heads, shape.value_dim, seed=4),
    )
    before = [part.clone() for part in stored.parts]
    shape.store(keys, values, stored.state)
    before[0][shape.layer, :, past] = encode(shape.form.keys, rotate(keys.cpu(), shape.keys.turned)).to(
        DEVICE
    )
    before[1][shape.layer, :, past] = encode(shape.form.values, values.cpu()).to(DEVICE)
    assert all(map(torch.equal, stored.parts, before))
    queries = numbers(shape.heads, shape.dim, seed=5)
    assert close(stored.attend(queries), stored.want(queries), 0.01)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_unusual_numbers_have_the_bytes_of_the_reference(kind):
    """Blocks of zeros, of one sign, of ties, with a subnormal scale, of the largest ones, with NaN or infinities."""
    shape = StoredRowAttention(1, 1, 512, 512, 1.0, 0, None, 0, KVFormat(kind, kind, False))
    x = numbers(512, seed=8).float().view(16, 32)
    x[0], x[1], x[2] = 0, -0.0, x[2].abs()
    x[3], x[4] = -x[3].abs(), torch.arange(32, device=DEVICE) / 2 - 8
    x[5], x[6], x[7] = x[5].clamp(1) * 2.0**-121, x[6] * 3e38, torch.arange(32, device=DEVICE) * 127 / 62
    x[8, 3], x[9, 0], x[10, 31] = torch.nan, torch.inf, -torch.inf
    x[11], x[12] = 1, -1
    row = x.flatten().bfloat16()
    stored = Stored(shape, 2)
    shape.store(row[None], row[None], stored.state)
    want = encode(kind, row.cpu())
    for part in stored.parts:
        assert part[0, 0, 2].tolist() == want.tolist()
