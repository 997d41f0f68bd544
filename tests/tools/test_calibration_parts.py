"""tools/calibration_parts.py: copies of a store that lack one part of its calibration."""

from __future__ import annotations

import numpy as np
import pytest

from edgemoe.storage.store.calibration import CALIBRATION_NAME, Calibration
from tools.calibration_parts import main


@pytest.fixture
def calibrated(tmp_path):
    """A store's directory as far as the tool reads it: a file of the model, and a calibration."""
    store, random = tmp_path / "store", np.random.default_rng(0)
    store.mkdir()
    (store / "store.json").write_text("{}")
    error, sensitivity = random.random((2, 3, 4), np.float32), random.random(2, np.float32)
    sample = np.zeros((2, 5, 2), np.uint16), np.ones((2, 5, 2), np.float16)
    Calibration("source", 8, "tokens that the model wrote", "", 5, (0, 1), error, sensitivity, *sample).save(
        store
    )
    return store


def test_each_copy_lacks_one_part(calibrated, capsys):
    """The model's file is shared; the removed part is 1 or a mean, and the rest is as it was."""
    whole = Calibration.read(calibrated)
    assert main([str(calibrated)]) == 0
    copies = {
        name: calibrated.with_name(f"{calibrated.name}-{name}")
        for name in ("alone", "mean", "typical", "random")
    }
    for copy in copies.values():
        assert (copy / "store.json").samefile(calibrated / "store.json")
    alone, mean, typical = (Calibration.read(copies[name]) for name in ("alone", "mean", "typical"))
    assert np.array_equal(alone.error, whole.error)
    assert set(alone.sensitivity) == {1.0} == set(typical.sensitivity)
    assert set(whole.sensitivity) != {1.0}
    assert np.array_equal(mean.sensitivity, whole.sensitivity)
    assert np.allclose(mean.error, whole.error.mean(1, keepdims=True))
    assert len(np.unique(typical.error.reshape(-1, 4), axis=0)) == 1
    assert not (copies["random"] / CALIBRATION_NAME).exists()
    assert main([str(calibrated)]) == 2
    assert "remove it" in capsys.readouterr().err
