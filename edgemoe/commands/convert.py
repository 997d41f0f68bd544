"""`edgemoe convert`: a checkpoint becomes a store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgemoe.commands.compensate import CompensatorOptions, compensate_store
from edgemoe.commands.dense_bits import (
    AUTO,
    check_checkpoint,
    choose_dense_bits,
    dense_bits_of,
    head_bits_of,
)
from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, KeepSourceOption
from edgemoe.commands.recode import SampleOptions, recode_store
from edgemoe.commands.verify import inspect_command
from edgemoe.errors import UserError
from edgemoe.models.options.declared import one_of, option
from edgemoe.models.options.groups import LimitOptions
from edgemoe.storage.compensators.index import check_choices
from edgemoe.storage.store.codes import SELF

EXAMPLES = (
    "Examples: edgemoe convert ~/models/Qwen3-30B-A3B ~/stores/qwen3 --max-level 4 "
    "| edgemoe convert ~/models/Qwen3-30B-A3B ~/stores/qwen3 --compensate 32"
)

SourceArgument = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint directory, GGUF file, or a model of the Hub: org/name[:quantization][@revision]."
    ),
]
DestinationArgument = Annotated[Path, typer.Argument(help="Store directory to write.")]

CompensateOption = Annotated[
    int | None,
    typer.Option(
        "--compensate", min=1, help="Add low-rank compensators of this mean rank.", show_default=False
    ),
]

CalibrateOption = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="TEXT|self",
        help="Choose codes with error feedback on a UTF-8 text, or on one that the model writes itself: about half the "
        "quality loss at 2 and 4 bits. With --max-level 8 the codes keep the quality of 8 bits.",
        show_default=False,
    ),
]

SamplesOption = Annotated[
    int | None,
    typer.Option(
        "--samples", min=512, help="With --calibrate: tokens of the text. Default: 8192.", show_default=False
    ),
]


@dataclass(frozen=True)
class StoreOptions:
    """Options of the store that is written."""

    max_level: int | None = option(
        "Highest level stored, 8 or 4 bits. Default: as many bits as each matrix of the source fills.",
        show_default=False,
        autocompletion=one_of("8", "4"),
    )
    layout: str = option(
        "auto, cpu-avx512, cpu-avx2, cpu-avx2-paired, cpu-generic or cuda.",
        "auto",
        autocompletion=one_of("auto", "cpu-avx512", "cpu-avx2", "cpu-avx2-paired", "cpu-generic", "cuda"),
    )
    dense_bits: str | None = option(
        "Bits of the weights outside the experts: bf16, 8, 6, 5 or 4 (embedding and head: --head-bits). "
        "auto: the fewest that add at most a quarter of what experts of 4 bits cost, measured on a text of the model, "
        "or 8 where these add at most .0006 nats. "
        "Default: 8, or the bits of a store that was begun.",
        show_default=False,
        autocompletion=one_of("bf16", "8", "6", "5", "4", AUTO),
    )
    head_bits: int | None = option(
        "Bits of embedding and head where --dense-bits is 8 or fewer: 8 or 6. 6 take a fifth less memory and cost more "
        "quality than 6 bits for all other dense weights. Default: 8, or the bits of a store that was begun.",
        show_default=False,
        autocompletion=one_of("8", "6"),
    )
    no_vision: bool = option(
        "Leave the vision tower of a multimodal model out. Convert again without this option to add it.",
        False,
    )


@grouped
def convert_command(
    source: SourceArgument,
    destination: DestinationArgument,
    *,
    store: StoreOptions,
    compensate: CompensateOption = None,
    compensators: CompensatorOptions,
    calibrate: CalibrateOption = None,
    samples: SamplesOption = None,
    keep_source: KeepSourceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint to a store.

    A call that was ended early continues where it stopped; a finished one returns at once.

    A model of the Hub is downloaded shard by shard, and each shard is deleted once it is converted: its compensators
    are computed from the store's highest level.
    """
    from edgemoe.models.conversion.named import convert_named

    _check(source, store, compensate, compensators, calibrate, samples)
    check_checkpoint(source, store.max_level, store.dense_bits, calibrated=calibrate is not None)
    bits = dense_bits_of(store.dense_bits, destination)
    head = head_bits_of(store.head_bits, destination, bits, auto=store.dense_bits == AUTO)
    how = vars(store) | {"dense_bits": bits, "head_bits": head}
    convert_named(source, destination, keep_source=keep_source, **how)
    if calibrate is not None:
        text = None if calibrate == SELF else Path(calibrate)
        favour = "high" if store.max_level == 8 else "low"
        sample = SampleOptions(text, samples or SampleOptions().samples, favour)
        recode_store(destination, source, sample, LimitOptions(), choose_dense=store.dense_bits == AUTO)
    elif store.dense_bits == AUTO:
        choose_dense_bits(destination, source)
    if compensate is not None:
        compensate_store(destination, source if source.exists() else None, compensate, compensators)
    inspect_command(destination, as_json)


def _check(
    source: Path,
    store: StoreOptions,
    compensate: int | None,
    compensators: CompensatorOptions,
    calibrate: str | None,
    samples: int | None,
) -> None:
    """Refuses options that have no effect or that contradict one another, before anything is read."""
    if compensate is None and compensators != CompensatorOptions():
        raise UserError("--compensate RANK with --ranks and --residual", "none", "add --compensate 32")
    check_choices(compensators.residual, compensators.ranks)
    if compensate is not None and store.max_level and compensators.residual > store.max_level:
        found = f"--max-level {store.max_level}"
        raise UserError(
            f"a store with level {compensators.residual}, for --residual", found, "give --residual 2"
        )
    if compensate is not None and not source.exists() and compensators.residual == store.max_level:
        wanted = f"weights of more than {compensators.residual} bits after a download, for --compensate"
        raise UserError(
            wanted, f"--max-level {store.max_level}", "leave --max-level out, or choose a lower --residual"
        )
    if calibrate is None and samples is not None:
        raise UserError("--calibrate TEXT with --samples", "none", "add --calibrate self")
    for needed, name in (
        (calibrate is not None, "--calibrate"),
        (store.dense_bits == AUTO, "--dense-bits auto"),
    ):
        if needed and not source.exists():
            wanted = f"a checkpoint on disk for {name}"
            raise UserError(wanted, f"{source}", "download it first, and give its directory")
