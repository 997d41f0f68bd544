"""Progress: plain lines at a bounded rate in a pipe, a bar on a terminal."""

from __future__ import annotations

import sys

import pytest

from edgemoe.console.progress import ByteProgress, CountProgress


class Clock:
    """A clock that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_lines_come_every_five_seconds_and_at_the_end(capsys, clock):
    """Many updates make few lines; the last line is always printed; stdout stays empty."""
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


def test_an_empty_job_is_finished(capsys, clock):
    """A job of 0 bytes is at 100 %, without a division by zero."""
    with ByteProgress("copying", clock) as progress:
        progress.update(0, 0)
    assert "100 %" in capsys.readouterr().err


def test_zero_progress_has_no_estimate(capsys, clock):
    """Without a finished byte the line has no time left."""
    with ByteProgress("copying", clock) as progress:
        clock.now = 6.0
        progress.update(0, 100)
    line = capsys.readouterr().err
    assert "0 %" in line
    assert "s left" not in line


def test_a_terminal_gets_a_bar(capsys, clock, monkeypatch):
    """On a terminal a bar shows finished and total bytes, and no plain lines are printed."""
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


def test_a_job_with_nothing_left_shows_no_bar(capsys, clock, monkeypatch):
    """A job that finds its work done reports no progress, and a terminal gets nothing."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with ByteProgress("copying", clock):
        pass
    assert capsys.readouterr() == ("", "")


def test_pieces_are_counted(capsys, clock):
    """Pieces are plain numbers, with the time left at the present rate."""
    with CountProgress("windows", 9, clock) as progress:
        progress.advance()
        progress.advance()
        clock.now = 6.0
        progress.advance()
    line = capsys.readouterr().err
    assert "windows: 3 of 9 (33 %), 12 s left" in line
