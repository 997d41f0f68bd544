"""Output for people fits 100 columns, and says its units."""

from __future__ import annotations

import pytest

from edgemoe.commands import doctor
from edgemoe.console.width import WIDTH
from edgemoe.speed.disk import PIECE

pytestmark = pytest.mark.e2e


def too_wide(text, path):
    """Lines of more than WIDTH columns that have a place to break; a path is in one piece."""
    return [line for line in text.splitlines() if len(line.replace(str(path), "")) > WIDTH]


@pytest.mark.parametrize(
    "command",
    [("inspect",), ("plan", "--parallel", 4, "--vram-limit", "9MB", "--dram-limit", "99KB", "-m")],
)
def test_descriptions_fit(run, tiny_store, command):
    """A store and a plan."""
    code, out, _ = run(*command, tiny_store)
    assert (code, too_wide(out, tiny_store)) == (0, [])
    assert "B" in out


@pytest.mark.usefixtures("one_short_name")
def test_doctor_fits(run, tmp_path, monkeypatch):
    """The machine, whatever the length of its directory."""
    monkeypatch.setattr(doctor, "PROBE", 4 * PIECE)
    place = tmp_path / ("long " * 20).strip()
    place.mkdir()
    code, out, _ = run("doctor", place)
    assert (code, too_wide(out, tmp_path)) == (0, [])
