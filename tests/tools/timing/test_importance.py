"""tools/timing/importance.py: the prefills that it times, its figures, and what it refuses."""

from __future__ import annotations

import json
from itertools import chain

import pytest

from edgemoe.engine.engine import Engine
from tools.timing import importance


@pytest.fixture
def prefills(monkeypatch) -> list[tuple[str, int, int]]:
    """Records the importance, tokens in the sequence before, and new tokens of every prefill."""
    real, seen = Engine.prefill, []

    def prefill(engine, sequence, tokens):
        seen.append((engine.settings.importance, sequence.length, len(tokens)))
        return real(engine, sequence, tokens)

    monkeypatch.setattr(Engine, "prefill", prefill)
    return seen


def test_signals_alternate_and_the_first_round_is_not_counted(tiny_store, monkeypatch, capsys, prefills):
    """With a given clock: 1, 2 and 9 s for load, 2, 3 and 4 s for scores add one half."""
    rounds = [(100, 100), (1, 2), (2, 4), (9, 3)]
    ends = chain.from_iterable((0, seconds) for seconds in chain.from_iterable(rounds))
    monkeypatch.setattr(importance, "perf_counter", lambda: next(ends))
    assert importance.main([str(tiny_store), "--tokens", "24", "--json"]) == 0
    assert prefills == [("load", 0, 24), ("heavy-hitters", 0, 24)] * 4
    report = json.loads(capsys.readouterr().out)
    assert report["samples_s"] == {"load": [1, 2, 9], "heavy-hitters": [2, 4, 3]}
    assert report["median_s"] == {"load": 2, "heavy-hitters": 3}
    assert report["added_share"] == 0.5
    assert report["experts_resident"] == 16


def test_table_under_a_limit(tiny_store, capsys, prefills):
    """Under a limit below the whole model the table has each sample and the added percentage."""
    assert importance.main([str(tiny_store), "--tokens", "8", "--runs", "1", "--vram-limit", "2.4MB"]) == 0
    assert len(prefills) == 4
    said = capsys.readouterr().out
    assert "8 tokens of conversations of the demo's tasks" in said
    assert "--vram-limit 2.4 MB" in said
    rows = [line.split("|")[1:-1] for line in said.splitlines() if line.startswith(("| load", "| heavy"))]
    assert [row[0].strip() for row in rows] == ["load", "heavy-hitters"]
    assert all(row[1] == row[2] for row in rows)  # the median of one sample is the sample
    assert "heavy-hitters over load: " in said


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--vram-limit", "much"), 2, "'much'"),
        (("--vram-limit", "100KB"), 3, "--vram-limit"),
    ],
)
def test_impossible_limits_are_refused(tiny_store, capsys, prefills, options, code, message):
    """A limit that is no size exits 2, too small a limit 3; nothing runs."""
    assert importance.main([str(tiny_store), *options]) == code
    assert message in capsys.readouterr().err
    assert prefills == []


def test_missing_model_is_refused(tmp_path, capsys):
    """The tool exits 2 with the path."""
    assert importance.main([str(tmp_path / "nowhere")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err


def test_limit_all_needs_every_expert_resident(tiny_store, monkeypatch, capsys, prefills):
    """Where fewer experts fit the tool exits 3, because reads would take part in the times."""

    def fewer(store, plan, settings):
        return store.plan(vram_limit=plan.minimum_vram_bytes, settings=settings, context=plan.context)

    monkeypatch.setattr(importance, "within_memory", fewer)
    assert importance.main([str(tiny_store), "--tokens", "8"]) == 3
    said = capsys.readouterr().err
    assert "all 16 experts" in said
    assert "blocks for 2" in said
    assert prefills == []


@pytest.mark.parametrize("option", ["--tokens", "--runs"])
def test_numbers_that_measure_nothing_are_refused(tiny_store, capsys, option):
    """No tokens or no runs exit 2 with the option's name."""
    with pytest.raises(SystemExit) as stopped:
        importance.main([str(tiny_store), option, "0"])
    assert stopped.value.code == 2
    assert option in capsys.readouterr().err
