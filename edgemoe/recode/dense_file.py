"""Writes a store's file of dense weights again, where these are codes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from edgemoe.calibrate.windows import Window
from edgemoe.families.table import family_of
from edgemoe.machine.cgroups import cores
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.dense import DenseCoding
from edgemoe.recode.dense_choice import DenseTrial
from edgemoe.recode.request import RecodeRequest
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.recoded import RecodedLayers


def write_dense(
    store: StoreModel, source: Path, windows: Sequence[Window], files: RecodedLayers, request: RecodeRequest
) -> None:
    """Writes a new file of the dense weights, where these are codes.

    Args:
        store: the store.
        source: its checkpoint.
        windows: the sample, complete.
        files: the new files of the store.
        request: the limits, and the number of threads.

    Raises:
        DoesNotFit, DamagedData: as DenseCoding.tensors.
    """
    if not store.manifest.has_dense_codes:
        return
    checkpoint = Checkpoint.open(source)
    family = family_of(checkpoint.config)
    bits = store.manifest.dense_bits, store.manifest.head_bits
    weights = DenseWeights(checkpoint, ExpertWeights(checkpoint, family).names, family, *bits)
    coding = DenseCoding(store, family, weights, windows, request, request.threads or cores())
    with closing(coding.tensors()) as tensors:
        files.write_dense(weights.specs(), tensors)


def finish_dense(
    files: RecodedLayers, source: Path, request: RecodeRequest, windows: Sequence[Window]
) -> Manifest:
    """Makes the store use its new files, then chooses the bits of its dense weights if the request says so.

    Args:
        files: the new files, complete.
        source: the checkpoint of the store.
        request: the limits, and the number of threads.
        windows: the sample, complete.

    Returns:
        the manifest of the store.

    Raises:
        DoesNotFit, DamagedData: as DenseTrial.run.
    """
    made = files.finish()
    if not request.chooses(made):
        return made
    return DenseTrial(StoreModel.open(files.directory), source, request, windows).run()
