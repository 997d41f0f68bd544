"""Requirements of settings and sequences on a store and a device; a refusal names the option to change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import ModelRefused, UserError
from edgemoe.families.table import traits_of
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.memory.compensator_bytes import NO_COMPENSATORS, CompensatorBytes
from edgemoe.policy.settings import RunSettings, format_levels
from edgemoe.storage.sizes import format_size

if TYPE_CHECKING:
    from edgemoe.machine.device import Device
    from edgemoe.storage.store.manifest import Manifest

MOST_PARALLEL = 64
"""Most sequences that run at once; the compiled kernel has as many rows (MOST_ROWS in decode_layers.c)."""


def require_settings(
    settings: RunSettings, directory: Path, manifest: Manifest, device: Device | None
) -> None:
    """Refuses a level that a store does not have, and copies into no device.

    Raises:
        UserError: with the option that is to be changed.
    """
    if settings.levels[0] > manifest.max_level:
        raise UserError(
            f"a store with level {settings.levels[0]}",
            f"{directory}, converted with --max-level {manifest.max_level}",
            "choose a lower level, or convert the model again with a higher one",
        )
    if settings.in_place == "off" and not device:
        raise UserError("a GPU, for --in-place off", "--device cpu", "leave it out")


def require_drafts(
    settings: RunSettings, config: Mapping[str, Any], device: Device | None, *, has_head: bool
) -> None:
    """Refuses guesses at further tokens where a step cannot check several of them, or where no head makes them.

    Args:
        settings: the settings of the run.
        config: the model's config.json.
        device: None: the CPU.
        has_head: whether the store has a head for further tokens.

    Raises:
        UserError: with the option that is to be left out.
    """
    if settings.drafts != "off" and device:
        raise UserError(
            f"a model on the CPU, for --draft {settings.drafts}", f"--device {device.name}", "leave it out"
        )
    if settings.drafts == "mtp":
        _require_head(settings, config, has_head=has_head)


def _require_head(settings: RunSettings, config: Mapping[str, Any], *, has_head: bool) -> None:
    """Refuses guesses by a head that the store lacks, or with settings that count or move experts by layer."""
    if not has_head:
        again = "convert the model again from a checkpoint with its head, or give --draft ngram"
        has_one = traits_of(config["model_type"]).head
        found = "one without it" if has_one else f"model_type {config['model_type']}, which has none here"
        action = again if has_one else "give --draft ngram, or leave it out"
        raise UserError("a store with a head for further tokens, for --draft mtp", found, action)
    if settings.hotness:
        action = "give --draft ngram, or leave one of them out"
        raise UserError(
            "experts that stay at their levels, for --draft mtp", "--policy hotness, which moves them", action
        )


def require_parallel(config: Mapping[str, Any], parallel: int, context: int) -> None:
    """Refuses a number of sequences that cannot run at once.

    Args:
        config: the model's config.json.
        parallel: sequences.
        context: tokens of each.

    Raises:
        UserError: it is not 1 to MOST_PARALLEL.
        ModelRefused: several sequences of a model whose positions depend on the longest of them.
    """
    if not 1 <= parallel <= MOST_PARALLEL:
        raise UserError(f"1 to {MOST_PARALLEL} sequences at once", f"{parallel}", "choose a number of them")
    lengths = RotaryLengths.of(config)
    if parallel > 1 and lengths and lengths.factors(context):
        raise ModelRefused(
            "positions that no other sequence of a step changes",
            f"rotary factors in config.json that depend on the length, and {parallel} sequences of {context} tokens "
            "at once",
            f"run one sequence at a time, or give --context {lengths.least}",
        )


def compensators_for(
    settings: RunSettings, directory: Path, manifest: Manifest, top_k: int, device: Device | None
) -> CompensatorBytes:
    """Bytes of the compensators that settings use.

    Args:
        settings: the settings of the run.
        directory, manifest: the store.
        top_k: experts of a token.
        device: None: the CPU.

    Raises:
        UserError: settings that use them where the store or a level has none, or a part of them on a device.
        DoesNotFit: a limit of theirs that is too small.
    """
    if settings.compensation is None:
        return NO_COMPENSATORS
    wanted, found = f"for {settings.compensation.option}", manifest.compensators
    if found is None:
        raise UserError(
            f"a store with low-rank compensators, {wanted}",
            f"{directory} without them",
            "add them with `edgemoe compensate STORE --reference CHECKPOINT`",
        )
    require_base_level(settings, found.base_level)
    if settings.compensation.end > top_k:
        raise UserError(
            f"at most {top_k} experts, as many as a token of this model has, {wanted}",
            f"{settings.compensation.end}",
            "give fewer",
        )
    used = settings.compensation.count / top_k
    if device:
        if settings.compensators_limit is not None:
            option = f"--compensators-limit {format_size(settings.compensators_limit)}"
            raise UserError("all compensators in the GPU's memory", option, "leave it out")
        return CompensatorBytes.on_device(found, manifest.geometry, used)
    return CompensatorBytes.of(found, used, settings.compensators_limit)


def require_base_level(settings: RunSettings, base_level: int) -> None:
    """Raises UserError for settings that compensate a level which they do not have."""
    if settings.compensation and base_level not in settings.levels:
        raise UserError(
            f"levels with {base_level}, whose errors the compensators are of, for {settings.compensation.option}",
            f"levels {format_levels(settings.levels)}",
            "give --levels 4/2" if base_level == 2 else "give --levels 8/4",
        )


def require_gate(config: Mapping[str, Any], option: str) -> None:
    """Refuses an option that chooses experts again, where the family's routers do not choose by scores alone.

    Args:
        config: the model's config.json.
        option: the option, for the message.

    Raises:
        UserError: the family's routers do not choose by one score for each expert.
    """
    family = config["model_type"]
    gate = traits_of(family).gate
    if gate is None or not gate.remaps:
        wanted = f"a model whose routers choose by one score for each expert, for {option}"
        raise UserError(wanted, f"model_type {family}", f"leave {option} out")
