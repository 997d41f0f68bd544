"""The weights that a store's level is compared with to make compensators, and what a run of it refuses."""

from __future__ import annotations

from pathlib import Path

import torch

from edgemoe.errors import ModelRefused, UserError
from edgemoe.storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from edgemoe.storage.compensators.files import CompensatorRun
from edgemoe.storage.compensators.geometry import CompensatorGeometry
from edgemoe.storage.compensators.index import CompensatorIndex, check_choices
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertNames, ExpertWeights
from edgemoe.storage.convert.system_errors import source_errors
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader


def run_of(
    source: Path | None,
    directory: Path,
    family: ExpertNames | None,
    manifest: Manifest,
    base_level: int,
    rule: str,
    mean_rank: int,
) -> tuple[CompensatorRun, ExpertWeights | None]:
    """Checks the options; returns the run and its weights, None for the store's highest level.

    Raises:
        UserError, ModelRefused, DamagedData: see making.compensate.
    """
    if not manifest.geometry.gated:
        raise ModelRefused(
            "experts with a gate, for compensators", "experts without one", "leave compensators out"
        )
    _check_options(directory, manifest, base_level, rule, mean_rank)
    reference, weights = _weights_of(source, family, directory, manifest, base_level)
    return CompensatorRun(manifest.fingerprint, reference, base_level, rule, mean_rank), weights


def _weights_of(
    source: Path | None, family: ExpertNames | None, directory: Path, manifest: Manifest, base_level: int
) -> tuple[str, ExpertWeights | None]:
    """Opens the weights that the base level is compared with, and refuses what it keeps exactly.

    Returns:
        the run's reference; the weights, None for the store's highest level.
    """
    if source and family:
        with source_errors(source):
            checkpoint = Checkpoint.open(source)
            experts = ExpertWeights(checkpoint, family)
            reference = checkpoint.fingerprint()
        _check_source(checkpoint, experts, directory, manifest, base_level)
        return reference, experts
    if base_level == manifest.max_level:
        raise ModelRefused(
            f"weights of more than {base_level} bits to compensate level {base_level} of {directory}",
            "a store without a higher level",
            "give --reference the checkpoint that it was converted from",
        )
    return f"level {manifest.max_level}", None


def _check_source(
    checkpoint: Checkpoint, experts: ExpertWeights, directory: Path, manifest: Manifest, base_level: int
) -> None:
    """Refuses a checkpoint of another shape than the store's, and 4-bit codes where level 4 keeps them."""
    if experts.has_codes(4) and base_level == 4:
        raise ModelRefused(
            f"a checkpoint with weights of more than 4 bits to compensate level 4 of {directory}",
            f"4-bit codes ({checkpoint.format}) in {checkpoint.directory}",
            "give --reference the checkpoint that this one was quantized from, or choose --residual 2",
        )
    fields = {
        "layers with experts": (sorted(manifest.layers), sorted(experts.layers)),
        "experts per layer": ({len(layer.records) for layer in manifest.layers.values()}, {experts.count}),
        "shapes of an expert": (
            *([[m.rows, m.cols] for m in g.matrices] for g in (manifest.geometry, experts.geometry(None))),
        ),
    }
    for field, (wanted, found) in fields.items():
        if wanted != found:
            raise ModelRefused(
                f"{field} {wanted} in {checkpoint.directory}, as {directory} has",
                str(found),
                "give --reference the checkpoint that the store was converted from",
            )


def _check_options(directory: Path, manifest: Manifest, base_level: int, rule: str, mean_rank: int) -> None:
    check_choices(base_level, rule)
    if base_level > manifest.max_level:
        raise UserError(
            f"level {base_level} in {directory}",
            f"a store up to level {manifest.max_level}",
            f"choose --residual {manifest.max_level}",
        )
    most = CompensatorGeometry.of(manifest.geometry, (0, 0, 0)).most
    if not 1 <= mean_rank <= most:
        raise UserError(
            f"a mean rank from 1 to {most}, the smaller side of an expert's matrices",
            str(mean_rank),
            "choose another",
        )


def is_of(index: CompensatorIndex, run: CompensatorRun) -> bool:
    """Whether compensators are the result of a run on their store."""
    found = (index.reference, index.base_level, index.rule, index.mean_rank)
    return found == (run.reference, run.base_level, run.rule, run.mean_rank)


def stored_weights(
    reader: RecordReader, manifest: Manifest, key: ExpertKey, level: int
) -> list[torch.Tensor]:
    """The matrices of an expert of the store at a level: gate_up and down, float32."""
    own = manifest.geometry.of_layer(key.layer)
    level = min(level, own.max_level)
    record = aligned(own.prefix_bytes(level))
    last = Plane(PLANES_OF_LEVEL[level] - 1)
    reader.read(key, Plane.BASE, last, [record.data])
    return decode(record, manifest.geometry, LAYOUTS[manifest.layout], level, key.layer)
