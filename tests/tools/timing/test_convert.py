"""tools/timing/convert.py: figures that add up, of a real conversion that leaves nothing behind."""

from __future__ import annotations

import json

import pytest
import small_checkpoint

from storage.convert import cores
from tools.timing import convert as time_convert


def test_what_a_run_prints(tmp_path, monkeypatch, capsys):
    """Seconds per billion weights follow from wall and weights, cores from processor time; the store is gone."""
    monkeypatch.setattr(time_convert, "PROBE_BYTES", 1 << 20)
    model = small_checkpoint.save(tmp_path / "model")
    store = tmp_path / "store"
    assert time_convert.main([str(model), str(store), "--", "--dense-bits", "8"]) == 0
    about, run = map(json.loads, capsys.readouterr().out.splitlines())
    weights = sum(tensor.numel() for tensor in small_checkpoint.tensors().values())
    assert (about["weights"], about["cores"]) == (weights, cores())
    assert about["disk"]["read"] > 0
    assert run["s_per_billion"] == pytest.approx(run["wall_s"] / (weights / 1e9))
    assert run["cores_busy"] == pytest.approx((run["user_s"] + run["system_s"]) / run["wall_s"])
    assert 100e6 < run["peak_bytes"] < 2e9
    assert not store.exists()


def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch, capsys):
    """Exit 2 for a store that is there already, which stays, and for a conversion that failed."""
    monkeypatch.setattr(time_convert, "PROBE_BYTES", 1 << 20)
    model = small_checkpoint.save(tmp_path / "model")
    (tmp_path / "there").mkdir()
    assert time_convert.main([str(model), str(tmp_path / "there")]) == 2
    assert (tmp_path / "there").exists()
    assert time_convert.main([str(model), str(tmp_path / "store"), "--", "--dense-bits", "5"]) == 2
    assert "exit code 2" in capsys.readouterr().err


@pytest.mark.parametrize("runs", ["0", "-1", "many"])
def test_a_number_of_runs_that_measures_nothing_is_refused(tmp_path, capsys, runs):
    """It exits 2, naming the option and what was given, before the disk is measured."""
    with pytest.raises(SystemExit) as stopped:
        time_convert.main([str(tmp_path), str(tmp_path / "store"), "--runs", runs])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--runs" in said
    assert repr(runs) in said
