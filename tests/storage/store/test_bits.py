"""The bits of layers in store.json: saved, loaded again, and refused where they contradict the store."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import geometry

from edgemoe.errors import BadManifest
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.probes import PROBES
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.manifest_entries import LayerRecords, RecordEntry


def mixed() -> Manifest:
    """A manifest of two layers: one of two experts with 5 bits for down, and one of 4 bits."""
    limited = RecordGeometry.limited(geometry().matrices, {3: (4, 5), 7: (4, 4)})
    layers = {}
    for layer, count in ((3, 2), (7, 1)):
        own = limited.of_layer(layer)
        records = (
            RecordEntry(4096 + expert * own.record_bytes, tuple(range(len(own.planes))))
            for expert in range(count)
        )
        layers[layer] = LayerRecords(f"e{layer}", tuple(records))
    return Manifest("s", "cuda", PROBES["cuda"], limited, 8, layers, {})


def read(tmp_path: Path, content: dict[str, Any]) -> Manifest:
    return Manifest.parse(json.dumps(content).encode(), tmp_path)


def test_bits_of_layers_are_saved_and_loaded(tmp_path):
    """A store whose layers have fewer bits has format 2, and is loaded as it was saved."""
    manifest = mixed()
    manifest.save(tmp_path / MANIFEST_NAME)
    saved = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert saved["format"] == 2
    assert saved["bits"] == {"3": {"gate_up": 4, "down": 5}, "7": {"gate_up": 4, "down": 4}}
    assert [matrix.get("limit") for matrix in saved["matrices"]] == [4, None]
    assert Manifest.load(tmp_path) == manifest


def put_bits(value: Any) -> dict[str, Any]:
    return json.loads(mixed().to_json()) | {"bits": value}


LAYER_BITS, FOUR = {"gate_up": 4, "down": 5}, {"gate_up": 4, "down": 4}


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        ([], "not an object"),
        ({"3": LAYER_BITS | {"down": 7}}, "7 bits of down in layer '3'"),
        ({"3": LAYER_BITS | {"down": True}}, "bits of down"),
        ({"3": LAYER_BITS | {"gate_up": 5}}, "5 bits of gate_up in layer '3', not one of .* up to 4"),
        ({"3": {"down": 5}}, "not of the matrices"),
        ({"3": LAYER_BITS, "7": FOUR, "9": LAYER_BITS}, "bits of layer 9, which has no experts"),
        ({"x": LAYER_BITS}, "'x' as a layer number"),
        ({"3": {"gate_up": 4, "down": 4}}, "3 checksums for the 2 planes of layer 3"),
        ({"3": LAYER_BITS}, "2 checksums for the 3 planes of layer 7"),
        (None, "two overlapping records in layer 3"),
        ({"7": {"gate_up": 4, "down": 4}}, "two overlapping records in layer 3"),
    ],
)
def test_bits_that_contradict_the_store_are_refused(tmp_path, bits, words):
    """Other values than numbers of bits, and bits of another store than the records' planes and places."""
    with pytest.raises(BadManifest, match=words):
        read(tmp_path, put_bits(bits))


@pytest.mark.parametrize(("limits", "level"), [((4, 4), 8), ((4, 8), 4), ((6, 8), 8)])
def test_limits_of_no_store_are_refused(tmp_path, limits, level):
    """A limit is 8 or 4, one matrix has 8, and a store up to level 4 has none."""
    changed = json.loads(mixed().to_json()) | {"max_level": level}
    for matrix, limit in zip(changed["matrices"], limits, strict=True):
        matrix["limit"] = limit
    with pytest.raises(BadManifest):
        read(tmp_path, changed)


VALUES = st.one_of(st.integers(-1, 9), st.none(), st.booleans(), st.just({}), st.just([4, 5]), st.just("4"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_bits_end_in_a_manifest_or_a_typed_error(tmp_path, data):
    """Any value at any place of bits and limits: loaded, or refused as a bad manifest."""
    content = json.loads(mixed().to_json())
    places = [(content["bits"], layer) for layer in ("3", "7", "8")] + [
        (holder, name)
        for holder in (*content["bits"].values(), *content["matrices"])
        for name in ("gate_up", "down", "limit", "group")
    ]
    for holder, name in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique_by=id)):
        holder[name] = data.draw(VALUES)
    with suppress(BadManifest):
        read(tmp_path, content)
