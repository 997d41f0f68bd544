"""`edgemoe convert`: a checkpoint becomes a store; `edgemoe export`: a store becomes a checkpoint of other engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.option_groups import grouped, one_of, option
from edgemoe.commands.options import JsonOption, KeepSourceOption, StoreArgument, named_store
from edgemoe.commands.verify import inspect_command
from storage.errors import UserError

if TYPE_CHECKING:
    from storage.export.levels import Levels
    from storage.export.plan import Errors
    from storage.manifest import Manifest

EXAMPLES = "Example: edgemoe convert ~/models/Qwen3-30B-A3B ~/stores/qwen3 --max-level 4 --dense-bits 8"
EXPORT_EXAMPLES = (
    "Example: edgemoe export ~/stores/qwen3 ~/exports/qwen3-int4 --format compressed-tensors --level 4"
)

SourceArgument = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint directory, GGUF file, or a model of the Hub: org/name[:quantization][@revision]."
    ),
]
DestinationArgument = Annotated[Path, typer.Argument(help="Store directory to write.")]


@dataclass(frozen=True)
class StoreOptions:
    """Options of the store that is written."""

    max_level: int | None = option(
        "Highest level stored, 8 or 4 bits. Default: 4 where the experts have 4-bit codes, otherwise 8.",
        show_default=False,
        autocompletion=one_of("8", "4"),
    )
    layout: str = option(
        "auto, cpu-avx512, cpu-avx2, cpu-avx2-paired, cpu-generic or cuda.",
        "auto",
        autocompletion=one_of("auto", "cpu-avx512", "cpu-avx2", "cpu-avx2-paired", "cpu-generic", "cuda"),
    )
    dense_bits: int = option(
        "Bits of all weights outside the experts, 16 or 8.", 16, autocompletion=one_of("16", "8")
    )


@grouped
def convert_command(
    source: SourceArgument,
    destination: DestinationArgument,
    *,
    store: StoreOptions,
    keep_source: KeepSourceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to a store. Killed, it resumes; finished, it returns at once.

    A model of the Hub is downloaded shard by shard, and each shard is deleted once it is converted.
    """
    from edgemoe.models.resolve import convert_named

    convert_named(source, destination, keep_source=keep_source, **vars(store))
    inspect_command(destination, as_json)


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
        'Level of all experts, 8 or 4; or a JSON file of levels such as {"*": 4, "0": 8, "3.17": 2}: for all experts, '
        "a layer, one expert. Default: the store's highest level.",
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
    """Export a store for an engine of many GPUs or another tool. Killed, it resumes; finished, it returns at once.

    `edgemoe verify` compares an export with its checksums.
    """
    if options.format not in FORMATS:
        raise UserError(f"a format among {', '.join(FORMATS)}", repr(options.format), "choose one of them")
    store = named_store(store)
    from edgemoe.console.progress import ByteProgress
    from edgemoe.families.table import family_of
    from storage.checkpoint import bounded_config
    from storage.export.run import export
    from storage.manifest import Manifest
    from storage.untrusted import read_json

    manifest = Manifest.load(store)
    levels = _levels(options.level, manifest)
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


def _levels(level: str, manifest: Manifest) -> Levels:
    """The level of every expert by the option --level."""
    from storage.export.levels import one_level, read_levels

    if level.isdecimal() and not Path(level).exists():
        if level not in ("8", "4"):
            raise UserError("8, 4 or a JSON file of levels", level, "choose --level 8 or 4")
        if int(level) > manifest.max_level:
            raise UserError(
                f"a level of at most {manifest.max_level}, the store's highest", level, "choose a lower level"
            )
        return one_level(manifest, int(level))
    return read_levels(Path(level), manifest) if level else one_level(manifest, manifest.max_level)


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
