"""tools/timing/start_up.py: every command is answered, and its times are those of real processes."""

from __future__ import annotations

import sys

import pytest

from tools.timing import start_up

pytestmark = pytest.mark.e2e


def test_the_least_run_counts_but_for_the_first():
    runs = iter([(0.5, 9.0), (3.0, 1.0), (2.0, 4.0), (1.0, 1.0)])
    assert start_up.least(lambda: next(runs), 2) == (2.0, 4.0)


def test_every_command_has_its_times(monkeypatch, capsys):
    """A line each; torch takes longer than a listing, and a plan and a chat, which import it, longer than torch."""
    monkeypatch.setattr(sys, "argv", ["start_up", "--runs", "1"])
    monkeypatch.setattr(
        start_up, "least", lambda once, runs: once()
    )  # without the run that fills the page cache
    assert start_up.main() == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "wall s" in head
    used = {line[:22].strip(): float(line.split()[-1]) for line in lines}
    assert list(used) == list(start_up.COMMANDS)
    assert used["models"] < used["import torch"] < used["plan"] < used["chat, to its prompt"]


def test_a_name_is_completed(monkeypatch, tmp_path):
    """What is timed as a completion is one: the shell gets the name."""
    shown = []
    spawn = start_up.pexpect.spawn

    def kept(*arguments, **named):
        shown.append(process := spawn(*arguments, **named))
        return process

    monkeypatch.setattr(start_up.pexpect, "spawn", kept)
    for name in ("a name by Tab", "an option by Tab"):
        start_up.measure(name, str(tmp_path))
    texts = [process.before.decode().split() for process in shown]
    assert texts == [["demo"], ["--dram-limit", "--device"]]
