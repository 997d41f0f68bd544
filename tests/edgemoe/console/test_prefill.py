"""The line that shows how far a prompt is."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from edgemoe.console import prefill
from edgemoe.console.prefill import prefilling


class Screen(io.StringIO):
    """A terminal's text."""

    def isatty(self):
        return True


def opened(monkeypatch):
    """Makes stderr a terminal that the line goes to at once; not in a fixture, since pytest resets stderr after it."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(prefill, "AFTER", 0.01)
    monkeypatch.setattr(prefill, "_EVERY", 0.01)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    return screen


def wait_for(screen, text):
    """Waits until a text is on the screen."""
    end = time.monotonic() + 10
    while text not in screen.getvalue():
        assert time.monotonic() < end, screen.getvalue()
        time.sleep(0.005)


def test_a_long_prompt_is_followed_and_its_line_goes(monkeypatch):
    """Counts grow as they are read; the end removes the line, and the thread with it."""
    screen = opened(monkeypatch)
    done = [100]
    with prefilling(lambda: (done[0], 1000)) as end:
        wait_for(screen, "prompt: 100 of 1,000 tokens, ")
        done[0] = 900
        wait_for(screen, "prompt: 900 of 1,000 tokens, ")
        end()
        assert screen.getvalue().endswith("\r\x1b[2K")
        length = len(screen.getvalue())
        end()
    assert len(screen.getvalue()) == length
    assert "prefill-progress" not in [thread.name for thread in threading.enumerate()]


def test_the_line_goes_when_the_prompt_is_read(monkeypatch):
    """New tokens take longer than a second without a line."""
    screen = opened(monkeypatch)
    done = [100]
    with prefilling(lambda: (done[0], 1000)):
        wait_for(screen, "100 of 1,000")
        done[0] = 1000
        wait_for(screen, "left\r\x1b[2K")
        while "prefill-progress" in [thread.name for thread in threading.enumerate()]:
            time.sleep(0.005)
    assert screen.getvalue().endswith("left\r\x1b[2K")


def test_an_error_ends_the_line(monkeypatch):
    """Ctrl-C within a prompt leaves a clean line."""
    screen = opened(monkeypatch)

    def interrupted():
        with prefilling(lambda: (1, 1000)):
            wait_for(screen, "1 of 1,000")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert screen.getvalue().endswith("\r\x1b[2K")


def test_a_short_prompt_shows_nothing(monkeypatch):
    """Within the first second there is no line, nor ever where stderr is no terminal."""
    for terminal in (True, False):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", screen := Screen() if terminal else io.StringIO())
        with prefilling(lambda: (0, 1000)):
            time.sleep(0.05)
        assert screen.getvalue() == ""
