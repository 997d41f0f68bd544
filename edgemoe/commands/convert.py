"""`edgemoe convert`: a checkpoint becomes a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgemoe.commands.inspect import inspect_command
from edgemoe.commands.options import JsonOption, KeepSourceOption

EXAMPLES = "Example: edgemoe convert ~/models/Qwen3-30B-A3B ~/stores/qwen3 --max-level 4 --dense-bits 8"

SourceArgument = Annotated[
    Path, typer.Argument(help="Checkpoint directory, or a model of the Hub: org/name or org/name@revision.")
]
DestinationArgument = Annotated[Path, typer.Argument(help="Store directory to write.")]
MaxLevelOption = Annotated[
    int | None,
    typer.Option(
        help="Highest level stored, 8 or 4 bits. Default: 4 where the experts have 4-bit codes, otherwise 8.",
        show_default=False,
    ),
]
LayoutOption = Annotated[
    str, typer.Option(help="auto, cpu-avx512, cpu-avx2, cpu-avx2-paired, cpu-generic or cuda.")
]
DenseBitsOption = Annotated[int, typer.Option(help="Bits of all weights outside the experts, 16 or 8.")]


def convert_command(
    source: SourceArgument,
    destination: DestinationArgument,
    max_level: MaxLevelOption = None,
    layout: LayoutOption = "auto",
    dense_bits: DenseBitsOption = 16,
    keep_source: KeepSourceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to a store. Killed, it resumes; finished, it returns at once.

    A model of the Hub is downloaded shard by shard, and each shard is deleted once it is converted.
    """
    from edgemoe.models.resolve import convert_named

    convert_named(
        source,
        destination,
        max_level=max_level,
        layout=layout,
        dense_bits=dense_bits,
        keep_source=keep_source,
    )
    inspect_command(destination, as_json)
