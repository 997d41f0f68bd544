"""tools/gpu/measure.py and tools/gpu/under_limit.py: steps that fail or take too long, and a rehearsal on the CPU."""

from __future__ import annotations

import json
import sys

import pytest

from tools.gpu import measure
from tools.gpu.measure import MeasuredStep, run_step


def test_a_step_that_fails_leaves_its_output(tmp_path):
    """The exit code, an end by time and a missing program differ, and what was printed before is kept."""
    fails = MeasuredStep("fails", (sys.executable, "-c", "print('found'); raise SystemExit(3)"))
    assert run_step(fails, tmp_path, 60) == "exit code 3"
    assert (tmp_path / "fails.txt").read_text() == "found\n"
    waits = MeasuredStep("waits", (sys.executable, "-c", "import time; print('begun'); time.sleep(60)"))
    assert run_step(waits, tmp_path, 1) == "time was over"
    assert (tmp_path / "waits.txt").read_text() == "begun\n"
    assert "no-such-program" in str(run_step(MeasuredStep("none", ("no-such-program",)), tmp_path, 60))


@pytest.mark.folders
@pytest.mark.e2e
def test_a_rehearsal_writes_every_figure(tmp_path, capsys, monkeypatch):
    """After a step that fails the next one begins; its file has prompts, new tokens and batches, with samples."""
    options = ("--batches", "1,2", "--prompts", "8", "--new-tokens", "4", "--blocks", "2")
    monkeypatch.setattr(measure, "UNDER_LIMIT", {"wrong": ("--prompts", "no number"), "small": options})
    only = ("--only", "wrong", "--only", "small")
    assert measure.main([str(tmp_path), "--like", "tiny", "--device", "cpu", *only]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert ["wrong: exit code" in lines[0], lines[1].endswith("small: done"), len(lines)] == [True, True, 2]
    rows = json.loads((tmp_path / "small.json").read_text())["rows"]
    assert [(row["rows"], row["path"]) for row in rows if row["what"] == "batch"] == [
        (1, "fast"),
        (1, "modules"),
        (2, "fast"),
        (2, "modules"),
    ]
    blocks = [row for row in rows if row["what"] == "new tokens"]
    assert [(row["block"], len(row["samples_ms"])) for row in blocks] == [("cold", 16), (0, 4), (1, 4)]
    assert [row["arm"] for row in rows if row["what"] == "prompt"] == ["cold", "filled", "again"]
