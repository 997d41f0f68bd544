"""The file of a calibration: a written file is read, and no other bytes are used."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_store import flip

from edgemoe.errors import DamagedData
from edgemoe.storage.files.array_file import read_arrays, write_arrays
from edgemoe.storage.store.calibration import CALIBRATION_NAME, TEXT, Calibration, load_calibration

LAYERS, EXPERTS, TOKENS, SLOTS = (1, 4), 3, 5, 2


def a_calibration(**changes) -> Calibration:
    random = np.random.default_rng(3)
    made = Calibration(
        source="f00d",
        max_level=8,
        origin=TEXT,
        text="a.txt",
        tokens=512,
        layers=LAYERS,
        error=random.random((2, EXPERTS, 4), np.float32),
        sensitivity=random.random(2, np.float32),
        chosen=random.integers(0, EXPERTS, (2, TOKENS, SLOTS)).astype(np.uint16),
        gates=random.random((2, TOKENS, SLOTS), np.float32).astype(np.float16),
    )
    return replace(made, **changes)


def load(directory: Path, source: str = "f00d", level: int = 8, experts: int = EXPERTS) -> Calibration | None:
    return load_calibration(directory, source, level, list(LAYERS), experts)


def same(one: Calibration, other: Calibration) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in vars(one))


def test_what_is_written_is_read(tmp_path):
    """Every field; equal calibrations have equal bytes."""
    a_calibration().save(tmp_path)
    raw = (tmp_path / CALIBRATION_NAME).read_bytes()
    found = load(tmp_path)
    assert found is not None
    assert same(found, a_calibration())
    assert found.measured_on == "512 tokens of a.txt"
    found.save(tmp_path)
    assert (tmp_path / CALIBRATION_NAME).read_bytes() == raw


def test_no_file_is_no_warning(tmp_path, caplog):
    assert load(tmp_path) is None
    assert caplog.messages == []


def assert_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture, why: str = "") -> None:
    """The file is not used, and one warning names it."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert load(tmp_path) is None
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / CALIBRATION_NAME} is not used: ")
    assert why in message


def test_every_flipped_byte_is_seen(tmp_path, caplog):
    """A bit changed anywhere in header or data: a warning that names the file."""
    a_calibration().save(tmp_path)
    path = tmp_path / CALIBRATION_NAME
    size = path.stat().st_size
    for offset in [*range(0, size, 7), size - 1]:
        flip(path, offset)
        assert_warned(tmp_path, caplog)
        flip(path, offset)
    assert load(tmp_path) is not None


def test_every_truncation_is_seen(tmp_path, caplog):
    """Cut at any length, the empty file included, or longer."""
    a_calibration().save(tmp_path)
    path = tmp_path / CALIBRATION_NAME
    raw = path.read_bytes()
    for length in [*range(0, len(raw), 31), len(raw) - 1]:
        path.write_bytes(raw[:length])
        assert_warned(tmp_path, caplog)
    path.write_bytes(raw + b"\0")
    assert_warned(tmp_path, caplog)


def test_a_directory_in_its_place_is_seen(tmp_path, caplog):
    (tmp_path / CALIBRATION_NAME).mkdir()
    assert_warned(tmp_path, caplog)


def test_another_models_is_not_used(tmp_path, caplog):
    """Another checkpoint, other layers or experts, or measured up to a lower level."""
    for changes in (
        {"source": "beef"},
        {"layers": (1, 5)},
        {"max_level": 4},
        {"error": np.ones((2, EXPERTS + 1, 4), np.float32)},
    ):
        a_calibration(**changes).save(tmp_path)
        assert_warned(tmp_path, caplog, "expected a calibration of f00d up to level 8")


def test_a_newer_format_is_not_used(tmp_path, caplog):
    a_calibration().save(tmp_path)
    description, arrays = read_arrays(tmp_path / CALIBRATION_NAME)
    write_arrays(tmp_path / CALIBRATION_NAME, description | {"format": 2}, arrays)
    assert_warned(tmp_path, caplog, "format 2, not 1, which this edgemoe reads")


@pytest.mark.parametrize(
    "changes",
    [
        {"error": np.full((2, EXPERTS, 4), np.nan, np.float32)},
        {"error": -np.ones((2, EXPERTS, 4), np.float32)},
        {"error": np.ones((2, EXPERTS, 3), np.float32)},
        {"sensitivity": np.ones(3, np.float32)},
        {"chosen": np.full((2, TOKENS, SLOTS), EXPERTS, np.uint16)},
        {"gates": np.ones((2, TOKENS, 1), np.float16)},
        {"chosen": np.zeros((2, 0, SLOTS), np.uint16), "gates": np.zeros((2, 0, SLOTS), np.float16)},
        {"layers": (4, 1)},
        {"layers": ("x", "y")},
        {"layers": 3},
    ],
)
def test_contents_that_contradict_are_not_used(tmp_path, caplog, changes):
    """With a right checksum, so that only the check of the contents can see it."""
    a_calibration(**changes).save(tmp_path)
    assert_warned(tmp_path, caplog)


def test_other_arrays_are_damaged_data(tmp_path):
    """A missing array, one too many, or a description that is no object."""
    a_calibration().save(tmp_path)
    path = tmp_path / CALIBRATION_NAME
    description, arrays = read_arrays(path)
    for changed in ({k: v for k, v in arrays.items() if k != "gates"}, arrays | {"more": arrays["gates"]}):
        write_arrays(path, description, changed)
        with pytest.raises(DamagedData, match=CALIBRATION_NAME):
            Calibration.read(tmp_path)
    write_arrays(path, [1], arrays)  # type: ignore[arg-type]
    with pytest.raises(DamagedData, match=CALIBRATION_NAME):
        Calibration.read(tmp_path)
