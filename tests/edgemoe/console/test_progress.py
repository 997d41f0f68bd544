"""Progress: plain lines at a bounded rate where nobody watches, a bar where somebody does."""

from __future__ import annotations

import sys

import pytest

from edgemoe.console.progress import ByteProgress, CountProgress


class Clock:
    """Stands where it is put."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_come_every_five_seconds_and_at_the_end(capsys, clock):
    """Many updates a second make few lines; the last one comes whatever the time; stdout stays clean."""
    with ByteProgress("copying", clock) as progress:
        for second in range(12):
            clock.now = float(second)
            progress.update(second * 100, 1200)
        progress.update(1200, 1200)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "copying: 500 B of 1.2 KB (42 %), 7 s left",
        "copying: 1 KB of 1.2 KB (83 %), 2 s left",
        "copying: 1.2 KB of 1.2 KB (100 %), 0 s left",
    ]


def test_nothing_to_do_is_done(capsys, clock):
    """A job of no bytes is finished at once, and nothing is divided by zero."""
    with ByteProgress("copying", clock) as progress:
        progress.update(0, 0)
    assert "100 %" in capsys.readouterr().err


def test_nothing_done_yet_has_no_estimate(capsys, clock):
    """Without a byte done there is no rate to guess the rest from."""
    with ByteProgress("copying", clock) as progress:
        clock.now = 6.0
        progress.update(0, 100)
    line = capsys.readouterr().err
    assert "0 %" in line
    assert "s left" not in line


def test_a_terminal_gets_a_bar(capsys, clock, monkeypatch):
    """On a terminal the bar shows what is done of what, and no plain lines come."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ByteProgress("copying", clock) as progress:
        clock.now = 9.0
        progress.update(3_000_000, 4_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert "copying" in err
    assert "3.0/4.0 MB" in err
    assert "%)" not in err


def test_pieces_are_counted(capsys, clock):
    """What is no bytes is told as a plain number, with the time left at the pace so far."""
    with CountProgress("windows", clock) as progress:
        clock.now = 6.0
        progress.update(3, 9)
    line = capsys.readouterr().err
    assert "windows: 3 of 9 (33 %), 12 s left" in line
