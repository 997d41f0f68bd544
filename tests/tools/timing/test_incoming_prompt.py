"""tools/timing/incoming_prompt.py: the rows of its table."""

from __future__ import annotations

from tools.timing import incoming_prompt


def test_every_pace_has_a_row(tiny_store, capsys):
    """A row for each pace, with no p50 above its p99; while a prompt comes in the longest gap has its chunk."""
    paces = ["8:2", "64:2"]
    arguments = [str(tiny_store), "--running", "2", "--prompt-tokens", "64", "--paces", *paces]
    incoming_prompt.main(arguments)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == paces
    for _, *numbers, ttft in rows:
        before, before_p99, during, during_p99 = map(float, numbers)
        assert before <= before_p99
        assert during <= during_p99
        assert float(ttft) > 0
