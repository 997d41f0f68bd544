"""The bits of dense weights that `convert --dense-bits` names or measures. Heavy imports happen inside."""

from __future__ import annotations

from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.models.conversion.dense_default import dense_bits_for, head_bits_for
from edgemoe.models.options.groups import Opening
from edgemoe.storage.store.dense_shapes import HEAD_BITS
from edgemoe.storage.store.manifest import DENSE_BITS, MANIFEST_NAME, Manifest

AUTO = "auto"
"""Value of --dense-bits that measures."""


def check_checkpoint(
    source: Path, max_level: int | None, dense_bits: str | None, *, calibrated: bool
) -> None:
    """Refuses a checkpoint whose codes cannot be calibrated, or whose dense weights cannot be measured.

    Args:
        source: the checkpoint.
        max_level, dense_bits: options of the store.
        calibrated: whether codes are to be calibrated.

    Raises:
        UserError, ModelRefused: with the option to change.
    """
    if calibrated:
        from edgemoe.recode.request import codable_weights

        codable_weights(source, max_level)
    if dense_bits == AUTO:
        from edgemoe.recode.request import require_level_8

        require_level_8(source, max_level)


def dense_bits_of(text: str | None, destination: Path) -> int:
    """Parses --dense-bits.

    Args:
        text: bf16, auto, or a number of DENSE_BITS; None: the default.
        destination: the store, which may exist.

    Returns:
        bits to convert with; for auto the bits of a finished store that has been measured, else 16; by default those
        of a store that is there, else 8.

    Raises:
        UserError: another text.
    """
    if text is None:
        return dense_bits_for(destination)
    if text == AUTO:
        found = Manifest.load(destination) if (destination / MANIFEST_NAME).exists() else None
        return found.dense_bits if found and found.dense_choice else 16
    return parse_dense_bits(text, "auto, ")


def head_bits_of(number: int | None, destination: Path, dense_bits: int, *, auto: bool) -> int:
    """Checks --head-bits.

    Args:
        number: the option; None: the default.
        destination: the store, which may exist.
        dense_bits: bits of the store's other dense weights.
        auto: whether these are measured.

    Returns:
        bits to convert with; by default the bits of a store that is there, else 8.

    Raises:
        UserError: another number, or 6 where embedding and head have 16 bits or are measured with.
    """
    bits = head_bits_for(destination) if number is None else number
    if bits not in HEAD_BITS:
        raise UserError("8 or 6 bits for embedding and head", f"{bits}", "choose --head-bits 8 or 6")
    if bits < 8 and (auto or dense_bits == 16):
        found = f"--dense-bits {AUTO if auto else 'bf16'}"
        raise UserError("--dense-bits 8, 6, 5 or 4 with --head-bits 6", found, "give one of these numbers")
    return bits


def parse_dense_bits(text: str, others: str = "") -> int:
    """Parses a number of bits of dense weights.

    Args:
        text: bf16, or a number of DENSE_BITS.
        others: other values that the option has, for the message.

    Raises:
        UserError: another text.
    """
    bits = 16 if text == "bf16" else int(text) if text.isdecimal() else 0
    if bits not in DENSE_BITS:
        wanted = f"{others}bf16, 8, 6, 5 or 4 bits for the dense weights"
        raise UserError(wanted, text, f"choose --dense-bits {others}bf16 or 8")
    return bits


def choose_dense_bits(directory: Path, checkpoint: Path) -> None:
    """Chooses the bits of a store's dense weights, unless they have been chosen."""
    from edgemoe.models.open import open_model
    from edgemoe.recode.dense_choice import DenseTrial
    from edgemoe.recode.request import RecodeRequest

    opened = open_model(Opening(directory, device="cpu"))
    if not opened.manifest.dense_choice:
        DenseTrial(opened, checkpoint, RecodeRequest(None, 0, "low"), ()).run()
