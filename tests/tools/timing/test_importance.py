"""tools/timing/importance.py: which prefills are timed, what follows from their times, and what is refused."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from edgemoe.engine.engine import Engine
from tools.timing import importance as time_importance


@pytest.fixture
def prefills(monkeypatch) -> list[tuple[str, int, int]]:
    """Importance, tokens in the sequence before, and tokens of every prefill, as they come."""
    real, seen = Engine.prefill, []

    def prefill(engine, sequence, tokens):
        seen.append((engine.settings.importance, sequence.length, len(tokens)))
        return real(engine, sequence, tokens)

    monkeypatch.setattr(Engine, "prefill", prefill)
    return seen


def test_the_two_alternate_and_the_first_round_is_not_counted(tiny_store, monkeypatch, capsys, prefills):
    """By a clock that is told beforehand: 1, 2 and 9 s with load, 2, 3 and 4 s with scores, so one half is added."""
    rounds = [(100, 100), (1, 2), (2, 4), (9, 3)]
    ends = chain.from_iterable((0, seconds) for seconds in chain.from_iterable(rounds))
    monkeypatch.setattr(time_importance, "perf_counter", lambda: next(ends))
    assert time_importance.main([str(tiny_store), "--tokens", "24", "--json"]) == 0
    assert prefills == [("load", 0, 24), ("heavy-hitters", 0, 24)] * 4
    report = json.loads(capsys.readouterr().out)
    assert report["samples_s"] == {"load": [1, 2, 9], "heavy-hitters": [2, 4, 3]}
    assert report["median_s"] == {"load": 2, "heavy-hitters": 3}
    assert report["added_share"] == 0.5
    assert report["experts_resident"] == 16


def test_a_limit_and_real_times(tiny_store, capsys, prefills):
    """Under a limit that does not hold every expert: each sample and what is added stand in the table."""
    assert (
        time_importance.main([str(tiny_store), "--tokens", "8", "--runs", "1", "--vram-limit", "2.4MB"]) == 0
    )
    assert len(prefills) == 4
    said = capsys.readouterr().out
    assert "8 tokens of conversations of the demo's tasks" in said
    assert "--vram-limit 2.4 MB" in said
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith(("| load", "| heavy"))]
    assert [row[0].strip() for row in rows] == ["load", "heavy-hitters"]
    assert all(row[1] == row[2] for row in rows)  # of one sample, the median is that
    assert "heavy-hitters over load: " in said


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (("--vram-limit", "much"), 2, "a size was wanted"),
        (("--vram-limit", "100KB"), 3, "--vram-limit"),
    ],
)
def test_limits_that_cannot_work(tiny_store, capsys, prefills, options, code, told):
    """What is no size exits 2, what is too small 3; nothing is run."""
    assert time_importance.main([str(tiny_store), *options]) == code
    assert told in capsys.readouterr().err
    assert prefills == []


def test_a_model_that_is_none(tmp_path, capsys):
    """It exits 2, naming the place."""
    assert time_importance.main([str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_all_resident_is_all_or_nothing(tiny_store, monkeypatch, capsys, prefills):
    """Where memory is free for fewer experts, reads would be timed unasked: exit 3, and how to ask for them."""

    def fewer(store, plan, settings):
        return store.plan(vram_limit=plan.minimum_vram_bytes, settings=settings, context=plan.context)

    monkeypatch.setattr(time_importance, "within_memory", fewer)
    assert time_importance.main([str(tiny_store), "--tokens", "8"]) == 3
    said = capsys.readouterr().err
    assert "all 16 experts" in said
    assert "room for 2" in said
    assert prefills == []


@pytest.mark.parametrize("option", ["--tokens", "--runs"])
def test_counts_of_nothing(tiny_store, capsys, option):
    """No token, or no run, exits 2 and is named."""
    with pytest.raises(SystemExit) as stopped:
        time_importance.main([str(tiny_store), option, "0"])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err
