"""How hot each expert of a model was in earlier runs: a small file next to the store.

The file lies in the store's directory, or in the cache where that cannot be written. It is checked when it is read;
whatever is wrong with it costs a warning and nothing else.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import xxhash

from edgemoe.errors import EdgemoeError, ModelRefused
from edgemoe.models.cache import file_name, heat_directory
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.untrusted import read_json, shortened
from edgemoe.storage.store.manifest import Manifest

NAME = "heat.json"

VERSION = 1

SAVE_SECONDS = 180.0
"""Between two writes in a running chat."""

Heat = Mapping[ExpertKey, float]
"""Expert -> above 0, at most 1."""

_log = logging.getLogger("edgemoe")


def load_heat(directory: Path, manifest: Manifest) -> dict[ExpertKey, float]:
    """Reads the heat that earlier runs left for a store.

    Returns:
        expert -> share of the heat of its layer's hottest one; empty without a file, and, with a warning that names it,
        where the file is damaged, of another version or of another model.
    """
    for path in _places(directory, manifest):
        if not path.exists():
            continue
        try:
            return _checked(path, read_json(path.parent, path.name), manifest)
        except (EdgemoeError, OSError) as error:
            _log.warning("%s is not used, warm-up starts anew: %s", path, error)
    return {}


def save_heat(directory: Path, manifest: Manifest, heat: Heat) -> None:
    """Writes the heat atomically, in the store's directory or else in the cache; a failure costs a warning."""
    for path in _places(directory, manifest):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = json.dumps(_sealed(heat, manifest)).encode()
            with replacing(path, len(data)) as fd:
                write_all(fd, data)
            return
        except (EdgemoeError, OSError) as error:
            found = error
    _log.warning("hot experts are not kept for the next start: %s", found)


def mixed(before: Heat, now: Heat) -> dict[ExpertKey, float]:
    """Mixes the heat of earlier runs with this one's, half and half, each layer relative to its hottest expert."""
    earlier, latest = _relative(before), _relative(now)
    keys = earlier.keys() | latest.keys()
    return {key: (earlier.get(key, 0.0) + latest.get(key, 0.0)) / 2 for key in keys}


@contextmanager
def keeping_heat(
    directory: Path, manifest: Manifest, now: Callable[[], Heat]
) -> Iterator[tuple[Heat, Callable[[], None]]]:
    """Keeps the heat of a run: yields the heat of earlier runs, and a function to call after every answer.

    The function writes every SAVE_SECONDS; the end of the block writes, too, once there was an answer.

    Args:
        directory: the directory of the store.
        manifest: the manifest of the store.
        now: returns the heat of this run.
    """
    before, answers, saved = load_heat(directory, manifest), 0, time.monotonic()

    def save() -> None:
        nonlocal saved
        save_heat(directory, manifest, mixed(before, now()))
        saved = time.monotonic()

    def answered() -> None:
        nonlocal answers
        answers += 1
        if time.monotonic() - saved >= SAVE_SECONDS:
            save()

    try:
        yield before, answered
    finally:
        if answers:
            save()


def _places(directory: Path, manifest: Manifest) -> tuple[Path, Path]:
    return directory / NAME, heat_directory() / f"{file_name(manifest.source)}.json"


def _relative(heat: Heat) -> dict[ExpertKey, float]:
    highest: dict[int, float] = {}
    for key, value in heat.items():
        highest[key.layer] = max(value, highest.get(key.layer, 0.0))
    return {key: value / highest[key.layer] for key, value in heat.items() if highest[key.layer]}


def _sealed(heat: Heat, manifest: Manifest) -> dict[str, Any]:
    """The heat as a JSON object with its checksum."""
    layers = {
        str(layer): [round(heat.get(ExpertKey(layer, expert), 0.0), 4) for expert in range(len(of.records))]
        for layer, of in sorted(manifest.layers.items())
    }
    content = {"version": VERSION, "source": manifest.source, "layers": layers}
    return content | {"checksum": _checksum(content)}


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def _checked(path: Path, parsed: dict[str, Any], manifest: Manifest) -> dict[ExpertKey, float]:
    content = {name: value for name, value in parsed.items() if name != "checksum"}
    wanted = {
        "version": (VERSION, parsed.get("version")),
        "source": (manifest.source, parsed.get("source")),
        "checksum": (_checksum(content), parsed.get("checksum")),
    }
    for field, (expected, found) in wanted.items():
        if found != expected:
            raise ModelRefused(f"{field} {expected} in {path}", shortened(found), "delete the file")
    layers = parsed.get("layers")
    sizes = {str(layer): len(of.records) for layer, of in manifest.layers.items()}
    if (
        not isinstance(layers, dict)
        or {layer: len(values) if isinstance(values, list) else None for layer, values in layers.items()}
        != sizes
    ):
        raise ModelRefused(f"a value for every expert in {path}", "others", "delete the file")
    heat = {
        ExpertKey(int(layer), expert): value
        for layer, values in layers.items()
        for expert, value in enumerate(values)
    }
    if not all(
        isinstance(value, int | float) and isfinite(value) and 0 <= value <= 1 for value in heat.values()
    ):
        raise ModelRefused(f"numbers from 0 to 1 in {path}", "others", "delete the file")
    return heat
