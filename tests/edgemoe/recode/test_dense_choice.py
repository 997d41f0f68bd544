"""The bits of dense weights by measurement: the rule, and what a conversion writes, verifies and keeps."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from edgemoe.recode import dense_choice
from edgemoe.recode.dense_candidates import DenseCandidates
from edgemoe.storage.store.dense_choice import DenseChoice
from edgemoe.storage.store.manifest import Manifest


@pytest.mark.parametrize(
    ("added", "bits"),
    [
        ({4: 0.0011, 5: 0.0005, 6: 0.0001}, 5),
        ({4: -1e-6}, 4),
        ({4: 0.1, 5: 0.02, 6: 0.01, 8: 0.00058}, 8),
        ({4: 0.1, 6: 0.01, 8: 0.00061}, 16),
    ],
)
def test_the_first_bits_within_a_quarter_of_the_experts_kl_are_chosen(added, bits):
    """Experts cost .002 nats at 4 bits, so that dense weights may add .0005, and 8 bits .0006; bf16 where none do."""
    choice = DenseChoice(0.002, added, 2048)
    assert (choice.limit, choice.bits) == (0.0005, bits)
    assert str(choice).startswith("bf16" if bits == 16 else f"{bits} bits")


@pytest.mark.e2e
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_conversion_measures_and_writes_the_bits_that_it_chose(
    run, checkpoint, foxes_text, tmp_path, monkeypatch, calibrated
):
    """Fewer bits add more; one file of dense weights stays, verify reads it, and a second call changes nothing."""
    monkeypatch.setattr(dense_choice, "WINDOWS", 1)
    store, options = tmp_path / "store", ["--calibrate", foxes_text, "--samples", 512] if calibrated else []
    arguments = ["convert", checkpoint, store, "--dense-bits", "auto", *options, "--json"]
    code, out, err = run(*arguments)
    described, made = json.loads(out), Manifest.load(store)
    choice = made.dense_choice
    assert (code, made.dense_bits) == (0, choice.bits)
    assert described["dense_choice"] == str(choice)
    assert f"dense weights: {choice}" in " ".join(err.split())
    added = list(choice.added.values())
    assert added == sorted(added, reverse=True)
    assert (choice.tokens, choice.experts > 0) == (512, True)
    assert [path.name for path in store.glob("dense*")] == [made.dense_name]
    sizes = sum(tensor.nbytes for tensor in load_file(store / made.dense_name).values())
    whole = sum(
        tensor.nbytes
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if ".experts." not in name
    )
    assert (sizes < whole) == (choice.bits < 16)
    coded = calibrated and choice.bits < 8
    assert described["dense_codes"] == (str(made.codes) if coded else None)
    code, out, _ = run("verify", store, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
    before = {path.name: path.stat().st_mtime_ns for path in store.iterdir()}
    assert run(*arguments)[0] == 0
    assert {path.name: path.stat().st_mtime_ns for path in store.iterdir()} == before


@pytest.mark.e2e
def test_an_interrupted_choice_is_made_again_with_the_same_bytes(run, checkpoint, tmp_path, monkeypatch):
    """Interrupted before the second file of dense weights, the store has bf16 until a second call."""
    monkeypatch.setattr(dense_choice, "WINDOWS", 1)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run("convert", checkpoint, whole, "--dense-bits", "auto")[0] == 0
    write = DenseCandidates.write

    def interrupted(self: DenseCandidates, bits: int) -> Manifest:
        made = write(self, bits)
        raise KeyboardInterrupt(made.dense_name)

    with monkeypatch.context() as patch:
        patch.setattr(DenseCandidates, "write", interrupted)
        assert run("convert", checkpoint, stopped, "--dense-bits", "auto")[0] == 130
    assert (Manifest.load(stopped).dense_bits, Manifest.load(stopped).dense_choice) == (16, None)
    assert run("convert", checkpoint, stopped, "--dense-bits", "auto")[0] == 0
    assert {path.name: path.read_bytes() for path in stopped.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }


def test_a_store_that_cannot_be_measured_is_refused_before_it_is_made(run, checkpoint, tmp_path):
    """The message names the option; nothing is written."""
    arguments = "convert", checkpoint, tmp_path / "store", "--dense-bits", "auto", "--max-level", "4"
    code, _, err = run(*arguments)
    wanted = "a store with level 8, with which --dense-bits auto"
    assert (code, wanted in " ".join(err.split())) == (2, True)
    assert not (tmp_path / "store").exists()
