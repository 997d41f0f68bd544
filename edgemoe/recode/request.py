"""How a store's experts are to be coded: the options, what they are checked against, and the name of the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import xxhash

from edgemoe.calibrate.windows import Window, spread_windows
from edgemoe.errors import ModelRefused, UserError
from edgemoe.families.table import family_of
from edgemoe.models.store_model import StoreModel
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.system_errors import source_errors
from edgemoe.storage.store.codes import SELF, CalibratedCodes
from edgemoe.storage.store.manifest import Manifest

WINDOW = 512
"""Tokens of a window."""

IMPORTANCE = {"low": {2: 1, 4: 4, 8: 16}, "high": {2: 1, 4: 8, 8: 64}}
"""Favoured level -> level -> weight of its squared distances. `low` costs level 8 more than `high` does."""


@dataclass(frozen=True)
class RecodeRequest:
    """How to code a store's experts.

    Args:
        text: a UTF-8 file to sample on; None: a text that the model writes.
        tokens: number of tokens of the text, rounded down to whole windows.
        favour: a key of IMPORTANCE.
        vram_limit, dram_limit: bytes, as for a chat.
        threads: threads that code; None: one for each core of this process. The result does not depend on it.
        choose_dense: chooses the bits of dense weights too, of a store where these are bf16 (recode.dense_choice).
    """

    text: Path | None
    tokens: int
    favour: str
    vram_limit: int | None = None
    dram_limit: int = 0
    threads: int | None = None
    choose_dense: bool = False

    def chooses(self, manifest: Manifest) -> bool:
        """Whether the bits of a store's dense weights are still to be chosen."""
        return self.choose_dense and manifest.dense_choice is None


def codable_weights(source: Path, max_level: int | None) -> tuple[ExpertWeights, str]:
    """Opens a checkpoint some of whose experts' matrices can be coded in another way.

    Args:
        source: the checkpoint.
        max_level: the highest level of the store, 8 or 4; None: as many bits as the source can fill.

    Returns:
        its experts, and its fingerprint.

    Raises:
        ModelRefused: the store keeps the codes that it has.
    """
    with source_errors(source):
        checkpoint = Checkpoint.open(source)
        experts = ExpertWeights(checkpoint, family_of(checkpoint.config))
        found = checkpoint.fingerprint()
    if experts.has_codes(max_level):
        raise ModelRefused(
            f"experts without codes of their own in {source}",
            "codes that a store keeps as they are",
            "leave the calibration of codes out: it would bring nothing",
        )
    return experts, found


def weights_of(store: StoreModel, source: Path) -> ExpertWeights:
    """Opens the checkpoint of a store.

    Raises:
        UserError: the store has level 2 alone.
        ModelRefused: another checkpoint, or one whose codes the store keeps.
    """
    if store.manifest.max_level <= 2:
        raise UserError(
            "a store with level 4 or 8", f"{store.directory} with level 2 alone", "convert the model again"
        )
    experts, found = codable_weights(source, store.manifest.max_level)
    if found != store.manifest.source:
        raise ModelRefused(
            f"the checkpoint that {store.directory} was converted from",
            f"another one in {source}",
            "give the checkpoint of the store, or convert this one",
        )
    return experts


def windows_of(store: StoreModel, request: RecodeRequest) -> list[Window]:
    """Returns the windows of the text; empty windows where the model is to write them.

    Raises:
        UserError: the text is unusable, or there are too few tokens.
    """
    if request.text:
        return spread_windows(load_tokenizer(store.directory), request.text, request.tokens, WINDOW)
    if request.tokens < WINDOW:
        raise UserError(f"at least {WINDOW} tokens to sample", f"{request.tokens}", "give more --samples")
    return [()] * (request.tokens // WINDOW)


def codes_of(manifest: Manifest, windows: list[Window], request: RecodeRequest) -> CalibratedCodes:
    """Describes the codes of this run."""
    weights = IMPORTANCE[request.favour].items()
    importance = {level: weight for level, weight in weights if level <= manifest.max_level}
    parts = [manifest.source, manifest.layout, manifest.max_level, sorted(importance.items()), windows]
    if manifest.has_dense_codes:
        parts.append("dense weights")
    run = xxhash.xxh3_64_hexdigest(json.dumps(parts).encode())[:8]
    text = request.text.name if request.text else SELF
    return CalibratedCodes(importance, text, len(windows) * WINDOW, run)


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
