"""tools/timing/convert.py: the figures of a real conversion."""

from __future__ import annotations

import json

import pytest
import small_checkpoint

from edgemoe.storage.threads import cores
from tools.timing import convert


@pytest.mark.e2e
def test_figures_of_a_run_agree(tmp_path, monkeypatch, capsys):
    """Seconds a billion weights follow from wall time and weights, cores from processor time; the store is removed."""
    monkeypatch.setattr(convert, "PROBE_BYTES", 1 << 20)
    model = small_checkpoint.save(tmp_path / "model")
    store = tmp_path / "store"
    assert convert.main([str(model), str(store), "--", "--dense-bits", "8"]) == 0
    machine, run = map(json.loads, capsys.readouterr().out.splitlines())
    weights = sum(tensor.numel() for tensor in small_checkpoint.tensors().values())
    assert (machine["weights"], machine["cores"]) == (weights, cores())
    assert machine["disk"]["read"] > 0
    assert run["s_per_billion"] == pytest.approx(run["wall_s"] / (weights / 1e9))
    assert run["cores_busy"] == pytest.approx((run["user_s"] + run["system_s"]) / run["wall_s"])
    assert 100e6 < run["peak_bytes"] < 2e9
    assert not store.exists()


@pytest.mark.e2e
def test_impossible_runs_are_refused(tmp_path, monkeypatch, capsys):
    """An existing destination, which stays, and a failed conversion exit 2."""
    monkeypatch.setattr(convert, "PROBE_BYTES", 1 << 20)
    model = small_checkpoint.save(tmp_path / "model")
    (tmp_path / "there").mkdir()
    assert convert.main([str(model), str(tmp_path / "there")]) == 2
    assert (tmp_path / "there").exists()
    assert convert.main([str(model), str(tmp_path / "store"), "--", "--dense-bits", "5"]) == 2
    assert "exit code 2" in capsys.readouterr().err


@pytest.mark.parametrize("runs", ["0", "-1", "many"])
def test_number_of_runs_that_measures_nothing_is_refused(tmp_path, capsys, runs):
    """The tool exits 2 with the option's name and value before it measures the disk."""
    with pytest.raises(SystemExit) as stopped:
        convert.main([str(tmp_path), str(tmp_path / "store"), "--runs", runs])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "--runs" in said
    assert repr(runs) in said
