"""Chooses the codes of a store's experts again: takes a sample of their inputs, then codes layer after layer."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from edgemoe.calibrate.windows import Window
from edgemoe.console.progress import CountProgress
from edgemoe.machine.cgroups import cores
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.coding import Coding
from edgemoe.recode.coding_memory import CodingMemory
from edgemoe.recode.dense_file import finish_dense, write_dense
from edgemoe.recode.request import WINDOW, RecodeRequest, codes_of, weights_of, windows_of
from edgemoe.recode.sample import ExpertSample
from edgemoe.recode.sampling import take_sample
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.system_errors import destination_errors, require_unchanged
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.store.codes import CalibratedCodes
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.recoded import RecodedLayers, remove_others

FOLDER = "recoding"
"""Folder of the sample in a store's directory while its experts are coded."""


def recode(store: StoreModel, checkpoint: Path, request: RecodeRequest) -> Manifest:
    """Replaces the codes of a store's experts by codes that were chosen with error feedback.

    Shows progress and remaining time on stderr. The store can be read meanwhile, and uses the new codes once all layers
    have them, and its dense weights of 8 or fewer bits. Killed and run again, it goes on after the last complete window
    or layer, with the same bytes in the end. A store with these codes stays. The disk holds all twice until the end.

    Args:
        store: an opened store of level 4 or 8.
        checkpoint: directory or file of the checkpoint that the store was converted from.
        request: how.

    Returns:
        the manifest of the store with the new codes.

    Raises:
        UserError: the text is unusable, or the store has level 2 alone.
        ModelRefused: another checkpoint, or one whose 4-bit codes the store keeps.
        StoreBusy: another process codes the store.
        DoesNotFit: the limits, the free memory or the disk are too small.
        DamagedData, WriteFailed: the checkpoint is damaged or changed, or the store cannot be written.
    """
    memory = CodingMemory.of(store, request)
    experts, windows = weights_of(store, checkpoint), windows_of(store, request)
    codes = codes_of(store.manifest, windows, request)
    if store.manifest.codes == codes and not request.chooses(store.manifest):
        remove_others(store.directory, store.manifest)
        return store.manifest
    folder = store.directory / FOLDER
    with destination_errors(store.directory):
        folder.mkdir(exist_ok=True)
        with StoreLock(folder, exclusive=True):
            sample = ExpertSample(folder, codes.run, experts.layers, len(windows), WINDOW, store.shape.hidden)
            with closing(sample):
                made = _write(store, experts, sample, windows, codes, memory, request)
                write_dense(store, checkpoint, sample.windows, made, request)
                require_unchanged(checkpoint, store.manifest.source)
            manifest = finish_dense(made, checkpoint, request, sample.windows)
            shutil.rmtree(folder, ignore_errors=True)
            return manifest


def _write(
    store: StoreModel,
    experts: ExpertWeights,
    sample: ExpertSample,
    windows: list[Window],
    codes: CalibratedCodes,
    memory: CodingMemory,
    request: RecodeRequest,
) -> RecodedLayers:
    """Takes the sample, and writes the new file of every layer that has none."""
    layers = take_sample(store, sample, windows, request)
    manifest = store.manifest
    files = RecodedLayers(store.directory, manifest, codes)
    with CountProgress(f"coding {store.directory.name}", 1) as progress:
        coding = Coding(sample, experts, layers, manifest.layout, codes.importance, memory, progress.update)
        coding.write(files, request.threads or cores())
    return files
