"""`edgemoe export`: a store becomes a checkpoint of other engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, StoreArgument, named_store
from edgemoe.errors import UserError
from edgemoe.models.options.declared import one_of, option

if TYPE_CHECKING:
    from edgemoe.storage.export.levels import Levels
    from edgemoe.storage.export.plan import Errors
    from edgemoe.storage.store.manifest import Manifest

EXAMPLES = "Example: edgemoe export ~/stores/qwen3 ~/exports/qwen3-int4 --format compressed-tensors --level 4"

_BITS = "bits:"
FORMATS = ("compressed-tensors", "gguf", "safetensors")
ExportArgument = Annotated[Path, typer.Argument(help="Directory to write.")]


@dataclass(frozen=True)
class ExportOptions:
    """Options of the export that is written."""

    format: str = option(
        "compressed-tensors (vLLM, SGLang, transformers), gguf (llama.cpp) or safetensors (bf16, for every tool).",
        "compressed-tensors",
        autocompletion=one_of(*FORMATS),
    )
    level: str = option(
        'Level of all experts, 8 or 4; a JSON file of levels such as {"*": 4, "0": 8, "3.17": 2}: for all experts, '
        "a layer, one expert; or a mean such as bits:5.5, with 8 bits where a store's calibration says that they save "
        "most (by layer, in safetensors by expert). Default: the store's highest level.",
        "",
        show_default=False,
    )


@grouped
def export_command(
    store: StoreArgument,
    destination: ExportArgument,
    *,
    options: ExportOptions,
    as_json: JsonOption = False,
) -> None:
    """Export a store for another program.

    Engines of many GPUs and other tools read the files. A call that was ended early continues where it stopped; a
    finished one returns at once.

    `edgemoe verify` compares an export with its checksums.
    """
    if options.format not in FORMATS:
        raise UserError(f"a format among {', '.join(FORMATS)}", repr(options.format), "choose one of them")
    store = named_store(store)
    from edgemoe.console.progress import ByteProgress
    from edgemoe.families.table import family_of
    from edgemoe.storage.convert.config import bounded_config
    from edgemoe.storage.export.run import export
    from edgemoe.storage.files.untrusted import read_json
    from edgemoe.storage.store.manifest import Manifest

    manifest = Manifest.load(store)
    levels = _levels(store, manifest, options)
    family = family_of(bounded_config(read_json(store, "config.json")))
    with ByteProgress(f"exporting {store.name}") as bar:
        errors = export(store, destination, family, format=options.format, levels=levels, progress=bar.update)
    relative = [
        (part / errors.total) ** 0.5 if errors.total else 0.0 for part in (errors.exported, errors.own)
    ]
    if as_json:
        exported, own = relative
        print(
            json.dumps({"directory": str(destination), "error": exported, "own_error": own, **vars(errors)})
        )
    else:
        print(_line(options.format, manifest, errors, *relative))


def _levels(store: Path, manifest: Manifest, options: ExportOptions) -> Levels:
    """The level of every expert by the option --level."""
    from edgemoe.storage.export.levels import one_level, read_levels

    level = options.level
    if level.startswith(_BITS):
        return _levels_of_mean(store, manifest, level, by_layer=options.format != "safetensors")
    if level.isdecimal():
        if level not in ("8", "4"):
            raise UserError("8, 4, bits:MEAN or a JSON file of levels", level, "choose --level 8 or 4")
        if int(level) > manifest.max_level:
            raise UserError(
                f"a level of at most {manifest.max_level}, the store's highest", level, "choose a lower level"
            )
        return one_level(manifest, int(level))
    return read_levels(Path(level), manifest) if level else one_level(manifest, manifest.max_level)


def _levels_of_mean(store: Path, manifest: Manifest, level: str, *, by_layer: bool) -> Levels:
    """Levels 8 and 4 by the calibration of a store, and by its heat where there is one."""
    from edgemoe.calibrate.static_levels import HIGH, LOW, static_levels
    from edgemoe.models.calibration import calibration_of
    from edgemoe.models.heat import load_heat
    from edgemoe.policy.damage import Damage

    try:
        bits = float(level.removeprefix(_BITS))
    except ValueError:
        bits = nan
    if not LOW <= bits <= HIGH:
        raise UserError(
            f"a mean from {LOW} to {HIGH}, such as --level bits:5.5", repr(level), "choose such a mean"
        )
    if manifest.max_level < HIGH:
        raise UserError(
            f"a store with level {HIGH} for --level {level}",
            f"level {manifest.max_level} at most",
            "choose --level 4, or convert the model with --max-level 8",
        )
    found = calibration_of(store, manifest, HIGH)
    if found is None:
        raise UserError(
            f"calibration.safetensors in {store} for --level {level}",
            "none that fits the store",
            "run `edgemoe calibrate` on the store",
        )
    return static_levels(Damage.of(found), load_heat(store, manifest), bits, by_layer=by_layer)


def _line(format: str, manifest: Manifest, errors: Errors, exported: float, own: float) -> str:
    """The errors of an export, in a line."""
    kept = (
        f"; {100 * errors.kept / errors.groups:.0f} % of groups keep the store's codes"
        if errors.groups
        else ""
    )
    return (
        f"{format}: relative error {exported:.4f} against the store's level {manifest.max_level}, where the store's "
        f"own levels have {own:.4f} (first and middle expert of every layer){kept}"
    )
