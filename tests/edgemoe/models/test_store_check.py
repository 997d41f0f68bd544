"""A store whose parts contradict each other, or that changed after it was written, is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resealed_store import edit_dense, edit_manifest, reseal

from edgemoe.errors import BadManifest, ChecksumMismatch, MissingTensor
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.store.manifest import Manifest

EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
QUERIES = "model.layers.1.self_attn.q_proj.weight"


def resized(matrix: int, rows: int = 0, cols: int = 0):
    """A change of a manifest: so many more rows and columns of a matrix, and the records that belong to them."""

    def change(manifest: Manifest) -> Manifest:
        specs = list(manifest.geometry.matrices)
        old = specs[matrix]
        specs[matrix] = MatrixSpec.of(old.name, old.rows + rows, old.cols + cols)
        geometry = RecordGeometry(tuple(specs), manifest.max_level)
        layers = {}
        for number, layer in manifest.layers.items():
            records = tuple(
                replace(record, offset=i * geometry.record_bytes) for i, record in enumerate(layer.records)
            )
            layers[number] = replace(layer, records=records)
        return replace(manifest, geometry=geometry, layers=layers)

    return change


def without_layer(manifest: Manifest) -> Manifest:
    return replace(manifest, layers={i: layer for i, layer in manifest.layers.items() if i != 2})


def with_layer(manifest: Manifest) -> Manifest:
    more = {9: replace(manifest.layers[2], file="experts-00009.safetensors")}
    return replace(manifest, layers={**manifest.layers, **more})


def with_fewer_experts(manifest: Manifest) -> Manifest:
    layer = manifest.layers[2]
    return replace(manifest, layers={**manifest.layers, 2: replace(layer, records=layer.records[:-1])})


def with_one_matrix(manifest: Manifest) -> Manifest:
    return replace(manifest, geometry=RecordGeometry(manifest.geometry.matrices[:1], manifest.max_level))


MANIFESTS = {
    "gate_up has more rows": (resized(0, rows=4096), "rows and columns of gate_up"),
    "gate_up has more columns": (resized(0, cols=8192), "rows and columns of gate_up"),
    "down has more rows": (resized(1, rows=4096), "rows and columns of down"),
    "down has more columns": (resized(1, cols=64), "rows and columns of down"),
    "a matrix is missing": (with_one_matrix, "matrices"),
    "a layer is missing": (without_layer, "layers"),
    "a layer too many": (with_layer, "layers"),
    "an expert is missing": (with_fewer_experts, "experts of layer 2"),
    "no dense weights": (
        lambda m: replace(m, files={"config.json": m.files["config.json"]}),
        "dense.safetensors",
    ),
    "no config": (lambda m: replace(m, files={}), "config.json"),
}


@pytest.mark.e2e
@pytest.mark.parametrize(("change", "field"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_contradicts_the_config_is_refused(run, damageable, change, field):
    """Opening names the field, chat and plan exit with 4, and so does verify although some checksums may fit."""
    edit_manifest(damageable, change)
    with pytest.raises(BadManifest, match=field):
        StoreModel.open(damageable)
    for command in (
        ("chat", "--model", damageable, "--prompt", "a"),
        ("plan", "--model", damageable),
        ("verify", damageable),
    ):
        code, _, err = run(*command)
        assert code == 4, (command, err)


def longer(tensor: torch.Tensor, rows: int = 1) -> torch.Tensor:
    return torch.cat([tensor, tensor[:rows]])


DENSE = {
    "the vocabulary is larger": lambda t: t.update({EMBEDDING: longer(t[EMBEDDING])}),
    "a projection is wider": lambda t: t.update({QUERIES: torch.cat([t[QUERIES], t[QUERIES][:, :8]], 1)}),
    "a norm is shorter": lambda t: t.update({NORM: t[NORM][:-1]}),
    "a projection is missing": lambda t: t.pop(QUERIES),
    "a matrix is float32": lambda t: t.update({QUERIES: t[QUERIES].float()}),
    "a matrix has 8 bits without scales": lambda t: t.update({QUERIES: t[QUERIES].to(torch.int8)}),
    "there are too few scales": lambda t: t.update(
        {QUERIES: t[QUERIES].to(torch.int8), QUERIES + "_scale": t[QUERIES][1:, 0].clone()}
    ),
    "scales are float32": lambda t: t.update(
        {QUERIES: t[QUERIES].to(torch.int8), QUERIES + "_scale": t[QUERIES][:, 0].float()}
    ),
}


@pytest.mark.e2e
@pytest.mark.parametrize("change", DENSE.values(), ids=DENSE)
def test_dense_weights_that_contradict_the_config_are_refused(run, open_engine, damageable, change):
    """No engine opens, and chat and verify exit with 4, although every checksum fits."""
    edit_dense(damageable, change)
    with pytest.raises((BadManifest, MissingTensor)):
        open_engine(damageable)
    assert run("chat", "--model", damageable, "--prompt", "a")[0] == 4
    code, out, _ = run("verify", damageable)
    said = " ".join(out.split())
    assert (code, "config.json" in said or "another shape or type" in said) == (4, True)


@pytest.mark.e2e
def test_every_flipped_bit_of_the_dense_weights_is_noticed(open_engine, damageable):
    """24 single bits, all over the file after its header: each is an error with the file's name."""
    path = damageable / "dense.safetensors"
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for i in range(24):
        at = start + (len(raw) - start - 1) * i // 23
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << i % 8]) + raw[at + 1 :])
        with pytest.raises(ChecksumMismatch, match=r"dense\.safetensors"):
            open_engine(damageable)
    path.write_bytes(raw)
    open_engine(damageable)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
)
def test_a_changed_small_file_is_noticed(run, damageable, name):
    """A flipped bit in any file next to the weights is an error with the file's name."""
    path: Path = damageable / name
    if not path.exists():
        path.write_text("{}")
        reseal(damageable, name)
    StoreModel.open(damageable)
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 4]))
    with pytest.raises(ChecksumMismatch, match=name):
        StoreModel.open(damageable)
    assert run("chat", "--model", damageable, "--prompt", "a")[0] == 4


def test_a_whole_store_passes(run, tiny_store):
    """verify says that the shapes are the config's."""
    code, out, _ = run("verify", tiny_store)
    assert code == 0
    assert "every shape is as config.json says" in out
