"""What is said before a big checkpoint is converted."""

from __future__ import annotations

import shutil
import sys

import pytest

from edgemoe import first_use
from edgemoe.cli import main


@pytest.fixture
def small_is_big(monkeypatch, tmp_path):
    """Every checkpoint is big, and the cache is empty."""
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_first_use_is_announced_and_the_second_is_not(
    small_is_big, monkeypatch, capsys, checkpoint, tmp_path
):
    """Before the conversion's own lines: what, where, how much disk, how long."""
    monkeypatch.setattr(sys, "argv", ["edgemoe", "plan", "--model", str(checkpoint)])
    assert main() == 0
    said, time, *rest = capsys.readouterr().err.splitlines()
    assert "tiny is used for the first time: its 387 KB of weights" in said
    assert f"in {tmp_path / 'cache' / 'edgemoe' / 'stores'} (" in said
    assert "about 0 min (assumed: 50 MB/s)" in time
    assert any("converting" in line for line in rest)
    assert main() == 0
    assert capsys.readouterr().err == ""


def test_what_is_small_or_converted_already_needs_no_words(monkeypatch, checkpoint, tiny_store, tmp_path):
    """Nor does what is no checkpoint at all: whoever opens it says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert first_use.conversion_ahead(checkpoint) is None
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    assert first_use.conversion_ahead(tiny_store) is None
    assert first_use.conversion_ahead(tmp_path) is None


@pytest.mark.parametrize(
    ("packed", "store", "minutes"), [(False, "34.2 GB", "19 min"), (True, "62.7 GB", "19 min")]
)
def test_the_figures(monkeypatch, tmp_path, packed, store, minutes):
    """57 GB in bf16 or packed: the store's size, the free disk of a directory still to be made, the time."""
    usage = shutil.disk_usage(tmp_path)._replace(free=123_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else None)
    first, second = first_use.announcement("big", 57_000_000_000, tmp_path / "a" / "b", packed=packed)
    assert "57 GB of weights" in first
    assert f"about {store} in" in first
    assert f"{minutes} " in second
    assert "(123 GB free)" in first
