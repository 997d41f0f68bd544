"""tools/timing/start_up.py: every command is answered, and its times are real processes' times."""

from __future__ import annotations

import sys

import pytest

from tools.timing import start_up

pytestmark = pytest.mark.e2e


def test_the_least_run_counts_but_for_the_first():
    runs = iter([(0.5, 9.0), (3.0, 1.0), (2.0, 4.0), (1.0, 1.0)])
    assert start_up.least(lambda: next(runs), 2) == (2.0, 4.0)


def test_every_command_has_its_times(monkeypatch, capsys):
    """A line each, with the wall and processor time of one run; the demo is converted first."""
    times = dict(zip(start_up.COMMANDS, range(1, 10), strict=True))
    measured = []

    def measure(name, home):
        measured.append(name)
        return times[name], times[name] / 4

    monkeypatch.setattr(sys, "argv", ["start_up", "--runs", "1"])
    monkeypatch.setattr(start_up, "measure", measure)
    assert start_up.main() == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "wall s" in head
    found = {line[:22].strip(): [*map(float, line[22:].split())] for line in lines}
    assert found == {name: [wall, wall / 4] for name, wall in times.items()}
    assert measured == ["chat, to its prompt", *(name for name in times for _ in range(2))]


@pytest.mark.folders
def test_times_are_those_of_real_processes(demo_cache):
    """A chat, which imports torch, takes longer than a listing."""
    order = ("models", "chat, to its prompt")
    used = [start_up.measure(name, str(demo_cache))[1] for name in order]
    assert used == sorted(used)
    assert used[0] > 0


@pytest.mark.folders
def test_a_name_is_completed(monkeypatch, tmp_path):
    """The timed completion is a real one: the shell gets the name."""
    shown = []
    spawn = start_up.pexpect.spawn

    def kept(*arguments, **keywords):
        shown.append(process := spawn(*arguments, **keywords))
        return process

    monkeypatch.setattr(start_up.pexpect, "spawn", kept)
    for name in ("a name by Tab", "an option by Tab"):
        start_up.measure(name, str(tmp_path))
    texts = [process.before.decode().split() for process in shown]
    assert texts == [["demo"], ["--dram-limit", "--device", "--draft"]]
