"""The regions of a file: every byte at its place, each region complete, checksums."""

from __future__ import annotations

import random
import tempfile

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import edgemoe.storage.export.sink
from edgemoe.storage.export.sink import Sink


@given(st.lists(st.integers(0, 3 * 8192), max_size=6), st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_regions_of_any_size_have_their_bytes(sizes, seed):
    """Written in turn, in pieces of any length, every byte is at its place, whatever blocks regions share."""
    draw = random.Random(seed)
    whole = draw.randbytes(sum(sizes))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryFile() as file,
    ):
        patch.setattr(edgemoe.storage.export.sink, "_WINDOW", 8192)
        sink, done = Sink(file.fileno(), sizes), [0] * len(sizes)
        while left := [i for i in range(len(sizes)) if done[i] < sizes[i]]:
            region = draw.choice(left)
            at, count = starts[region] + done[region], draw.randint(1, sizes[region] - done[region])
            sink.write(region, memoryview(whole[at : at + count]))
            done[region] += count
        entries = sink.finish()
        file.seek(0)
        assert file.read() == whole
    parts = [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert entries == [[len(part), xxhash.xxh3_64_hexdigest(part)] for part in parts]


def test_a_region_has_no_more_and_no_fewer_bytes(tmp_path):
    """A byte too many is refused at once, a missing one at the end."""
    with (tmp_path / "file").open("wb") as file:
        sink = Sink(file.fileno(), [3, 2])
        sink.write(0, memoryview(b"abc"))
        with pytest.raises(ValueError, match="at most 3"):
            sink.write(0, memoryview(b"d"))
        with pytest.raises(ValueError, match="3, 0"):
            sink.finish()
