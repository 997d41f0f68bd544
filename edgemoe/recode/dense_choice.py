"""Chooses the bits of a store's dense weights: the fewest that cost a small part of what experts of 4 bits do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from edgemoe.calibrate.windows import Window, written_window
from edgemoe.console.progress import CountProgress
from edgemoe.console.width import say
from edgemoe.engine.engine import Engine
from edgemoe.evaluate.reference import LogitFile
from edgemoe.evaluate.score import Text, prompt_logits, setting_quality
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.recode.dense_candidates import DenseCandidates
from edgemoe.recode.plans import logit_bytes, plan_for_run
from edgemoe.recode.request import WINDOW, RecodeRequest
from edgemoe.storage.store.dense_choice import DenseChoice
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.manifest_updates import save_dense
from edgemoe.storage.store.recoded import remove_others

CANDIDATES = (4, 5, 6, 8)
"""Bits that are measured, until some cost little enough."""

WINDOWS = 4
"""Windows that the model writes to measure on."""

_FIRST = 1 << 16
"""Number of the first of them: the sample that codes are calibrated on has others."""


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
        self._store, self._request = store, request
        self._candidates = DenseCandidates(store, source, request, sample)

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
                files[bits] = self._candidates.write(bits)
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
        settings = RunSettings.uniform(level)
        plan = plan_for_run(store, self._request, settings, logit_bytes(store), "logits")
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
