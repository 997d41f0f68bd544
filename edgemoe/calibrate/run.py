"""One calibration: the experts' errors in every window of a text, then every layer's sensitivity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from edgemoe.calibrate.sensitivity import NOISE, measure_sensitivity
from edgemoe.calibrate.state import CalibrationState
from edgemoe.calibrate.windows import Window, spread_windows, written_window
from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import UserError
from edgemoe.experts.output_errors import OutputErrors, sample_tokens
from edgemoe.experts.step import Study
from edgemoe.kv.sequence import SequenceKV
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.calibration import TEXT, WRITTEN, Calibration

WINDOW = 512
"""Tokens of a window."""

DISTURBED_WINDOWS = 1
"""Windows in which each layer is disturbed."""


@dataclass(frozen=True)
class CalibrationRequest:
    """The text of a calibration, and its limits.

    Args:
        text: a UTF-8 file; None: a text that the model writes.
        tokens: the number of tokens of the text.
        vram_limit, dram_limit: bytes, as for a chat; no result depends on them.
    """

    text: Path | None
    tokens: int
    vram_limit: int | None = None
    dram_limit: int = 0


def calibrate(store: StoreModel, request: CalibrationRequest) -> Calibration:
    """Measures a store's experts and layers, and writes the result next to the files of the store.

    Shows progress and remaining time on stderr. Killed and run again, it goes on after the last complete window or
    layer, and ends with the same bytes.

    Raises:
        UserError: the text is unusable, or the store has level 2 alone.
        DoesNotFit: the limits are too small, or the disk is full.
        WriteFailed: the store cannot be written.
    """
    if store.manifest.max_level <= 2:
        raise UserError(
            "a store with level 4 or 8", f"{store.directory} with level 2 alone", "convert the model again"
        )
    settings = RunSettings.uniform(store.manifest.max_level)
    plan = store.plan(
        vram_limit=request.vram_limit, dram_limit=request.dram_limit, settings=settings, context=WINDOW
    )
    windows = [] if request.text is None else _windows_of_text(store, request.text, request.tokens)
    count, name = len(windows) or request.tokens // WINDOW, store.directory.name
    state = _state(store, windows, count)
    with Engine(store, plan, settings) as engine:
        sequence = engine.sequences.new()
        if request.text is None:
            with CountProgress(f"writing a text with {name}", count * WINDOW) as progress:
                _write(engine, sequence, count, state, progress)
        else:
            state.windows = windows
        disturbed = state.windows[:: math.ceil(len(state.windows) / DISTURBED_WINDOWS)]
        steps = len(state.windows) + len(disturbed) * (len(state.errors.layers) + 1)
        with CountProgress(f"calibrating {name}", steps) as progress:
            _measure_errors(engine, sequence, state, progress)
            measure_sensitivity(engine, sequence, disturbed, state, progress)
    made = _result(store, request, state, len(disturbed))
    made.save(store.directory)
    state.remove()
    return made


def _state(store: StoreModel, windows: list[Window], count: int) -> CalibrationState:
    """The state of a run on these windows, of a text or none: a new one, or the state of the interrupted run."""
    errors = OutputErrors(sorted(store.manifest.layers), store.shape.experts_per_layer)
    run = {
        "source": store.manifest.coded_source,
        "layout": store.manifest.layout,
        "count": count,
        "text": xxhash.xxh3_64_hexdigest(np.array(windows, np.int64).tobytes()),
    }
    return CalibrationState(store.directory, run, errors)


def _windows_of_text(store: StoreModel, text: Path, tokens: int) -> list[Window]:
    return spread_windows(load_tokenizer(store.directory), text, tokens, WINDOW)


def _write(
    engine: Engine, sequence: SequenceKV, count: int, state: CalibrationState, progress: CountProgress
) -> None:
    """Lets the model write the windows that are missing."""
    progress.advance(len(state.windows) * WINDOW)
    while len(state.windows) < count:
        window = written_window(engine, sequence, len(state.windows), progress.advance)
        progress.advance()  # for the first token, which is not written
        state.windows.append(window)
        state.save()


def _measure_errors(
    engine: Engine, sequence: SequenceKV, state: CalibrationState, progress: CountProgress
) -> None:
    """Adds the windows that are missing to the sums of errors."""
    for number, window in enumerate(state.windows):
        if number >= len(state.choices):
            sequence.crop(0)
            with engine.studied(Study(probe=state.errors)):
                engine.all_logits(sequence, window, decode=True)
            chosen, gates = zip(*(state.errors.choices[layer] for layer in state.errors.layers), strict=True)
            state.choices.append((torch.stack(chosen), torch.stack(gates)))
            state.save()
        progress.advance()


def _result(
    store: StoreModel, request: CalibrationRequest, state: CalibrationState, windows: int
) -> Calibration:
    errors = state.errors
    energy = NOISE**2 * errors.squared[..., -1].sum(1) / errors.counts.sum(1).clamp_min(1)
    sensitivity = state.kl / windows / energy.clamp_min(1e-30)
    # A layer at 0 would lose all its experts.
    sensitivity = torch.maximum(sensitivity, 0.01 * sensitivity.mean()).float()
    chosen, gates = (torch.cat(each, 1) for each in zip(*state.choices, strict=True))
    kept = sample_tokens(chosen.shape)
    spread = torch.linspace(0, chosen.shape[1] - 1, kept).round().long()
    return Calibration(
        source=store.manifest.coded_source,
        max_level=store.manifest.max_level,
        origin=TEXT if request.text else WRITTEN,
        text=request.text.name if request.text else "",
        tokens=WINDOW * len(state.windows),
        layers=errors.layers,
        error=errors.means().numpy(),
        sensitivity=sensitivity.numpy(),
        chosen=chosen[:, spread].numpy().astype(np.uint16),
        gates=gates[:, spread].numpy().astype(np.float16),
    )
