"""Measures what fewer bits of each expert cost on random tokens, where a store has no calibration."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import torch

from edgemoe.engine.sequences import Sequences
from edgemoe.errors import DoesNotFit, EdgemoeError, UserError
from edgemoe.experts.output_errors import OutputErrors
from edgemoe.experts.step import Study
from edgemoe.kv.step import Segment, Step
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.calibration import CALIBRATION_NAME, Calibration

RANDOM_TOKENS = 512
"""Tokens that experts are measured on where a store has no calibration."""

_log = logging.getLogger("edgemoe")


class MeasuredEngine(Protocol):
    """An engine, as far as a measurement uses it (engine.Engine)."""

    store: StoreModel
    plan: MemoryPlan
    sequences: Sequences

    @property
    def settings(self) -> RunSettings:
        """The settings of the next step."""

    def configure(self, settings: RunSettings) -> None:
        """Changes the settings of the steps that follow."""

    def studied(self, study: Study) -> AbstractContextManager[None]:
        """Measures the steps inside the block."""

    def step(self, step: Step) -> torch.Tensor:
        """Runs a step."""

    def forget_experts(self) -> None:
        """Empties the expert tiers."""


def measure_on_random_tokens(engine: MeasuredEngine) -> Calibration:
    """Measures every expert's error on random tokens; the result is saved with a store that has no calibration.

    Raises:
        UserError: a sequence takes the memory that a measurement needs.
    """
    store, before, level = engine.store, engine.settings, engine.plan.levels[0]
    _log.warning(
        "%s has no usable calibration: levels go by errors on random tokens; `edgemoe calibrate` measures on text",
        store.directory,
    )
    try:
        sequence = engine.sequences.new()
    except DoesNotFit as error:
        found = f"{store.directory} without a calibration"
        action = "run `edgemoe calibrate` on it, or start again with these levels"
        raise UserError("what fewer bits of each expert cost", found, action) from error
    one = {"bits": None, "tpot_target": None, "hotness": None, "compensation": None}
    engine.configure(before.with_(levels=(level,), exact=True, speculate="off", **one))
    errors = OutputErrors(sorted(store.manifest.layers), store.shape.experts_per_layer)
    enough = min(RANDOM_TOKENS, engine.plan.context)
    rows = min(enough, engine.plan.prefill_rows)
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(store.shape.vocab, (rows,), generator=random).tolist()
    try:
        with engine.studied(Study(probe=errors)):
            engine.step(Step((Segment(sequence, tuple(tokens)),)))
    finally:
        engine.sequences.end(sequence)
        engine.forget_experts()
        engine.configure(before)
    made = errors.calibration(store.manifest.coded_source, level, rows)
    keeps = rows == enough and level == store.manifest.max_level
    if keeps and not (store.directory / CALIBRATION_NAME).exists():
        with suppress(EdgemoeError):  # a store that only others may write to
            made.save(store.directory)
    return made
