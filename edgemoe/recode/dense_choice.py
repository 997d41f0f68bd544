"""Chooses the bits of a store's dense weights: the fewest that cost a small part of what experts of 4 bits do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from edgemoe.calibrate.windows import Window, written_window
from edgemoe.console.progress import CountProgress
from edgemoe.console.width import say
from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.score import Text, prompt_logits, setting_quality
from edgemoe.families.table import family_of
from edgemoe.machine.cgroups import cores
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.dense import DenseCoding
from edgemoe.recode.request import WINDOW, RecodeRequest, codes_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.store.dense import DenseWeights
from edgemoe.storage.store.dense_choice import DenseChoice
from edgemoe.storage.store.dense_file import write_dense_file
from edgemoe.storage.store.dense_shapes import BITS
from edgemoe.storage.store.manifest import Manifest, is_dense_name
from edgemoe.storage.store.manifest_updates import save_dense
from edgemoe.storage.store.recoded import remove_others

CANDIDATES = (4, 5, 6, 8)
"""Bits that are measured, until some cost little enough."""

WINDOWS = 4
"""Windows that the model writes to measure on."""

_FIRST = 1 << 16
"""Number of the first of them: the sample that codes are calibrated on has others."""


def require_level_8(source: Path, max_level: int | None) -> None:
    """Refuses a checkpoint whose store would lack the level with which 4 bits are compared.

    Raises:
        UserError: the store would have level 4 alone.
    """
    checkpoint = Checkpoint.open(source)
    found = ExpertWeights(checkpoint, family_of(checkpoint.config)).geometry(max_level).max_level
    if found < 8:
        wanted = "a store with level 8, with which --dense-bits auto compares 4 bits"
        raise UserError(wanted, f"{found} bits for experts of {source}", "choose --dense-bits 6, 5 or 4")


class DenseTrial:
    """Writes and measures dense weights of several numbers of bits in a store whose dense weights are bf16.

    Args:
        store: the store, at level 8.
        source: its checkpoint.
        request: the limits, and the number of threads.
        sample: windows for codes with error feedback; none: codes are rounded to nearest.
    """

    def __init__(
        self, store: StoreModel, source: Path, request: RecodeRequest, sample: Sequence[Window]
    ) -> None:
        self._store, self._request, self._sample = store, request, sample
        self._checkpoint = Checkpoint.open(source)
        self._family = family_of(self._checkpoint.config)
        self._experts = ExpertWeights(self._checkpoint, self._family).names

    def run(self) -> Manifest:
        """Measures, prints the choice, and makes the store use it; returns the store's manifest.

        Killed, the store stays with dense weights in bf16.

        Raises:
            DoesNotFit: the limits or the disk are too small.
            DamagedData: the checkpoint is damaged.
        """
        store, manifest = self._store, self._store.manifest
        windows, files, added = list[Window](), dict[int, Manifest](), dict[int, float]()
        with LogitFile(WINDOWS * WINDOW, store.shape.vocab) as logits:
            with self._engine(store, 8) as engine:
                windows += self._write(engine, logits)
                experts = self._measure(engine, windows, logits, "experts at 4 bits")
            for bits in CANDIDATES:
                files[bits] = self._candidate(bits)
                with self._engine(store.with_manifest(files[bits]), 4) as engine:
                    kl = self._measure(engine, windows, logits, f"dense weights of {bits} bits")
                added[bits] = kl - experts
                choice = DenseChoice(experts, dict(added), len(windows) * WINDOW)
                if choice.bits < 16:
                    break
        made = replace(files.get(choice.bits, manifest), dense_choice=choice)
        save_dense(store.directory, made)
        remove_others(store.directory, made)
        say(f"dense weights: {choice}")
        return made

    def _engine(self, store: StoreModel, level: int) -> Engine:
        settings, request = RunSettings.uniform(level), self._request
        plan = store.plan(
            vram_limit=request.vram_limit, dram_limit=request.dram_limit, settings=settings, context=WINDOW
        )
        return Engine(store, plan, settings)

    def _write(self, engine: Engine, logits: LogitFile) -> list[Window]:
        """Has the model write the windows; keeps its logits of each."""
        windows, sequence = list[Window](), engine.sequences.new()
        label = f"writing a text with {self._store.directory.name}"
        with CountProgress(label, WINDOWS * (WINDOW - 1)) as progress:
            for number in range(_FIRST, _FIRST + WINDOWS):
                windows.append(written_window(engine, sequence, number, progress.advance))
                sequence.crop(0)
                parts = list(prompt_logits(engine, sequence, windows[-1]))
                logits.append(torch.cat(parts).bfloat16())
        engine.sequences.end(sequence)
        return windows

    def _measure(self, engine: Engine, windows: list[Window], logits: LogitFile, label: str) -> float:
        """KL with experts at 4 bits."""
        sequence = engine.sequences.new()
        with CountProgress(f"measuring {label}", len(windows)) as progress:
            text = Text(windows, logits, progress.advance)
            quality, _ = setting_quality(engine, sequence, RunSettings.uniform(4), "prefill", text)
        engine.sequences.end(sequence)
        assert quality.kl is not None
        return quality.kl

    def _candidate(self, bits: int) -> Manifest:
        """Writes a file of dense weights; returns the manifest of the store with it."""
        store, request = self._store, self._request
        weights = DenseWeights(self._checkpoint, self._experts, self._family, bits)
        made = replace(store.manifest, dense_bits=bits)
        coded = bool(self._sample) and bits in BITS
        if coded:
            made = replace(made, codes=codes_of(made, list(self._sample), request))
        parts = [made.source, bits, made.codes.run if coded and made.codes else None]
        name = f"dense-{xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())[:8]}.safetensors"
        path = store.directory / name
        with suppress(FileNotFoundError):
            path.unlink()
        if coded:
            threads = request.threads or cores()
            coding = DenseCoding(store, self._family, weights, self._sample, request, threads)
            with closing(coding.tensors()) as tensors:
                entry = write_dense_file(path, weights.specs(), tensors)
        else:
            entry = write_dense_file(path, weights.specs(), weights.tensors())
        files = {other: each for other, each in made.files.items() if not is_dense_name(other)}
        return replace(made, files=files | {name: entry})
