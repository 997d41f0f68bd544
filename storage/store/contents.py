"""A description of a store's contents in values for JSON: for people, other programs and tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgemoe.storage.base import LEVELS, Plane
from edgemoe.storage.store.calibration import load_calibration
from edgemoe.storage.store.manifest import DENSE_NAME, HEAD_NAME, Manifest


def describe(directory: Path) -> dict[str, Any]:
    """Describes a store in values for JSON. Sizes are in bytes; bits per weight are the source's, on disk.

    Raises:
        UserError, BadManifest: from Manifest.load.
    """
    manifest = Manifest.load(directory)
    geometry = manifest.geometry
    counts = [len(layer.records) for layer in manifest.layers.values()]
    levels = [level for level in LEVELS if 0 < level <= manifest.max_level]
    return {
        "format": manifest.format,
        "source": manifest.source,
        "source_format": manifest.source_format,
        "source_error": manifest.source_error,
        "codes": str(manifest.codes) if manifest.codes else None,
        "layout": manifest.layout,
        "layers": len(counts),
        "experts": sum(counts),
        "experts_per_layer": sorted(set(counts)),
        "weights_per_expert": geometry.weights,
        "matrices": {m.name: [m.rows, m.cols] for m in geometry.matrices},
        "groups": {m.name: m.group for m in geometry.matrices},
        "max_level": manifest.max_level,
        "bits_per_weight": {str(n): _bits_per_weight(manifest, n) for n in levels},
        "plane_bytes": _plane_bytes(manifest),
        "expert_bytes": manifest.expert_bytes,
        "dense_bits": manifest.dense_bits,
        "head_bits": 16 if manifest.dense_bits == 16 else manifest.head_bits,
        "dense_codes": _dense_codes(manifest),
        "dense_choice": str(manifest.dense_choice) if manifest.dense_choice else None,
        "dense_bytes": manifest.files[manifest.dense_name].size
        if manifest.dense_name in manifest.files
        else 0,
        "calibration": _calibration(directory, manifest),
        "compensators": describe_compensators(manifest),
        "head": describe_head(manifest),
        "codes_by_layer": list(_codes_by_layer(manifest)),
    }


def _dense_codes(manifest: Manifest) -> str | None:
    """Describes how codes of dense weights were chosen; None: rounded to nearest, or there are none."""
    coded = manifest.has_dense_codes and manifest.dense_name != DENSE_NAME
    return str(manifest.codes) if manifest.codes and coded else None


def _bits_per_weight(manifest: Manifest, level: int) -> float:
    """Mean bits on disk per weight of the source up to a level."""
    counts = {number: len(layer.records) for number, layer in manifest.layers.items()}
    geometry = manifest.geometry
    if not counts:
        return 8 * geometry.prefix_bytes(level) / geometry.weights
    size = sum(count * geometry.of_layer(layer).prefix_bytes(level) for layer, count in counts.items())
    return 8 * size / (geometry.weights * sum(counts.values()))


def _plane_bytes(manifest: Manifest) -> dict[str, int]:
    """Bytes of each plane of all experts."""
    out = dict.fromkeys((Plane(i).label for i in range(len(manifest.geometry.planes))), 0)
    for number, layer in manifest.layers.items():
        for i, plane in enumerate(manifest.geometry.of_layer(number).planes):
            out[Plane(i).label] += plane.length * len(layer.records)
    return out


def _codes_by_layer(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Yields the bits of every matrix, with the layers, ascending, whose matrices have the same bits."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for layer in sorted(manifest.layers):
        alike.setdefault(manifest.geometry.of_layer(layer).matrix_bits, []).append(layer)
    for bits, layers in alike.items():
        for spec, each in zip(manifest.geometry.matrices, bits, strict=True):
            yield {
                "layers": layers,
                "matrix": spec.name,
                "bits": each,
                "group": spec.group,
                "bits_per_weight": each + 32 / spec.group,
            }


def describe_head(manifest: Manifest) -> dict[str, Any] | None:
    """Describes a store's head for further tokens in values for JSON; None without one."""
    head = manifest.head
    if not head:
        return None
    count = len(head.experts.records)
    return {
        "layer": head.layer,
        "experts": count,
        "expert_bytes": count * manifest.geometry.of_layer(head.layer).record_bytes,
        "dense_bytes": manifest.files[HEAD_NAME].size if HEAD_NAME in manifest.files else 0,
    }


def describe_compensators(manifest: Manifest) -> dict[str, Any] | None:
    """Describes a store's compensators in values for JSON, with the mean bits per weight; None without any."""
    index = manifest.compensators
    if not index:
        return None
    count = sum(len(layer.entries) for layer in index.layers.values())
    return {
        "base_level": index.base_level,
        "rule": index.rule,
        "mean_rank": index.mean_rank,
        "reference": index.reference,
        "left_error": index.error,
        "bits_per_weight": 8 * index.nbytes / (manifest.geometry.weights * count),
        "bytes": index.nbytes,
    }


def _calibration(directory: Path, manifest: Manifest) -> str | None:
    """The text on which the store's calibration was measured; None where there is no usable one."""
    counts = {len(layer.records) for layer in manifest.layers.values()}
    layers = sorted(manifest.layers)
    found = load_calibration(
        directory, manifest.coded_source, manifest.max_level, layers, max(counts, default=0)
    )
    return found.measured_on if found else None
