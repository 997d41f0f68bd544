"""Rows of the bf16 model: as it is, and with the experts of one layer at fewer bits."""

from __future__ import annotations

from pathlib import Path

from edgemoe.console.progress import CountProgress
from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.accuracy import ChatTasks, reference_conversations
from edgemoe.evaluate.reference import LogitFile, Reference
from edgemoe.evaluate.rows import BF16, EvalRow, lowered_row, reference_row, with_accuracy
from edgemoe.evaluate.score import Windows, lowered_quality, reference_quality
from edgemoe.evaluate.studies import LOWERED


def reference_rows(
    store: StoreModel, checkpoint: Path, windows: Windows, tasks: ChatTasks, keep: LogitFile, *, layers: bool
) -> list[EvalRow]:
    """Returns the bf16 row, and the rows of the study of layers. The model is freed when this returns.

    Args:
        store: a store made from the checkpoint.
        checkpoint: the checkpoint of the bf16 model.
        windows: the windows of the text; none: no quality is measured.
        tasks: chat tasks.
        keep: receives the logits of the windows.
        layers: whether the study of layers runs.
    """
    model = Reference(checkpoint, store.shape.vocab, store.manifest.source)
    quality = by_kind = None
    if windows:
        with CountProgress(f"{BF16}: text", len(windows)) as progress:
            quality = reference_quality(model, windows, keep, progress.advance)
    if tasks:
        by_kind = tasks.accuracy(BF16, reference_conversations(model, tasks))
    rows = [with_accuracy(reference_row(quality), by_kind)]
    if not layers:
        return rows
    numbers = sorted(store.manifest.layers)
    with CountProgress(f"{BF16}, a layer at {LOWERED}: text", len(numbers) * len(windows)) as progress:
        for layer in numbers:
            lowered = lowered_quality(model, layer, windows, keep, progress.advance)
            rows.append(lowered_row(layer, len(numbers), lowered))
    return rows
