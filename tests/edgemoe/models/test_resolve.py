"""An interrupted conversion goes on as it began, also where another command finishes it."""

from __future__ import annotations

from dataclasses import replace

from edgemoe.hub.name import HubModel
from edgemoe.models import resolve
from edgemoe.models.place import Place
from edgemoe.storage.store.manifest import MARKER_NAME, Manifest


def test_an_interrupted_conversion_goes_on_with_its_bits(tiny_store, tmp_path, monkeypatch):
    """Bits of dense weights, and of embedding and head, are the ones that it began with."""
    begun = replace(Manifest.load(tiny_store), dense_bits=6, head_bits=6)
    begun.save(tmp_path / MARKER_NAME)
    place, passed = Place(tmp_path, "a/b", HubModel("a/b")), list[tuple[int, int]]()
    monkeypatch.setattr(resolve, "locate", lambda *_: place)
    monkeypatch.setattr(
        resolve,
        "_convert_hub",
        lambda *how: passed.append((how[4]["dense_bits"], how[4]["head_bits"])),
    )
    monkeypatch.setattr(resolve, "touch", lambda store: None)
    monkeypatch.setattr(resolve.FirstCodes, "finish", lambda codes: None)
    resolve.resolve_store(tmp_path / "named")
    assert passed == [(6, 6)]
