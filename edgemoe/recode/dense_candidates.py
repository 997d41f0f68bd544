"""Files of a store's dense weights with other numbers of bits, next to the file in use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from edgemoe.calibrate.windows import Window
from edgemoe.families.table import family_of
from edgemoe.machine.cgroups import cores
from edgemoe.models.store_model import StoreModel
from edgemoe.recode.dense import DenseCoding
from edgemoe.recode.request import RecodeRequest, codes_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.store.dense_file import write_dense_file
from edgemoe.storage.store.manifest import Manifest, is_dense_name


class DenseCandidates:
    """Writes the files. Arguments: see recode.dense_choice.DenseTrial."""

    def __init__(
        self, store: StoreModel, source: Path, request: RecodeRequest, sample: Sequence[Window]
    ) -> None:
        self._store, self._request, self._sample = store, request, sample
        self._checkpoint = Checkpoint.open(source)
        self._family = family_of(self._checkpoint.config)
        self._experts = ExpertWeights(self._checkpoint, self._family).names

    def write(self, bits: int) -> Manifest:
        """Writes a file of dense weights; returns the manifest of the store with it.

        Raises:
            DoesNotFit: the limits or the disk are too small.
            DamagedData: the checkpoint is damaged.
        """
        store, request = self._store, self._request
        weights = DenseWeights(self._checkpoint, self._experts, self._family, bits)
        made = replace(store.manifest, dense_bits=bits)
        tensors: Iterable[tuple[str, torch.Tensor]] = weights.tensors()
        run, coding = None, None
        if self._sample:
            codes = codes_of(made, list(self._sample), request)
            made, run = replace(made, codes=codes), codes.run
            threads = request.threads or cores()
            coding = DenseCoding(store, self._family, weights, self._sample, request, threads).tensors()
            tensors = coding
        parts = made.source, bits, run
        name = f"dense-{xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())[:8]}.safetensors"
        with suppress(FileNotFoundError):
            (store.directory / name).unlink()
        with closing(coding) if coding else nullcontext():
            entry = write_dense_file(store.directory / name, weights.specs(), tensors)
        files = {other: each for other, each in made.files.items() if not is_dense_name(other)}
        return replace(made, files=files | {name: entry})
