"""`edgemoe recode`: a store's experts get codes that cost less quality at few bits. Heavy imports happen inside."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, StoreArgument, named_store
from edgemoe.console.printable import printable
from edgemoe.models.demo import demo_by_name
from edgemoe.models.options.declared import one_of, option
from edgemoe.models.options.groups import LimitOptions, Opening

EXAMPLES = (
    "Examples: edgemoe recode ~/stores/qwen3 ~/models/Qwen3-30B-A3B "
    "| edgemoe recode ~/stores/qwen3 ~/models/Qwen3-30B-A3B --text my-conversations.txt --samples 16384"
)

CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        help="Directory or GGUF file of the checkpoint that the store was converted from.",
        callback=lambda given: demo_by_name(given),
    ),
]


@dataclass(frozen=True)
class SampleOptions:
    """Options of the sample that codes are calibrated on."""

    text: Path | None = option("UTF-8 text to sample on. Default: a text that the model writes itself.")
    samples: int = option("Tokens of the text, in windows of 512 spread over it.", 8192, min=512)
    favour: str = option(
        "low: the least error at 2 and 4 bits, a little more at 8. high: 8 bits stay as good.",
        "low",
        autocompletion=one_of("low", "high"),
    )


@grouped
def recode_command(
    store: StoreArgument,
    checkpoint: CheckpointArgument,
    *,
    sample: SampleOptions,
    limits: LimitOptions,
    as_json: JsonOption = False,
) -> None:
    """Choose better codes for a store.

    The codes are chosen with error feedback on a text: at 2 and 4 bits about half the loss of quality.

    No byte more is read for a token. Killed, it resumes; finished, it returns at once. The store can be used meanwhile.
    Its compensators and its calibration, which were made for the old codes, are removed.
    """
    made = recode_store(named_store(store), checkpoint, sample, limits)
    if as_json:
        print(json.dumps({"store": str(store), "codes": str(made)}))
    else:
        print(printable(f"{store}: {made}"))


def recode_store(
    directory: Path,
    checkpoint: Path,
    sample: SampleOptions,
    limits: LimitOptions,
    *,
    choose_dense: bool = False,
) -> str:
    """Codes a store again, and chooses the bits of its dense weights; returns a description of its codes."""
    from edgemoe.console.loading import starting
    from edgemoe.errors import UserError
    from edgemoe.families.table import require_known
    from edgemoe.models.open import open_model
    from edgemoe.models.plans.division import parse_limits

    if sample.favour not in ("low", "high"):
        raise UserError("--favour low or high", f"'{sample.favour}'", "choose one of them")
    sizes = parse_limits(limits)
    require_known(checkpoint)
    with starting("loading torch"):
        from edgemoe.recode.request import RecodeRequest
        from edgemoe.recode.run import recode
    opened = open_model(Opening(directory, **vars(limits)))
    request = RecodeRequest(sample.text, sample.samples, sample.favour, *sizes, choose_dense=choose_dense)
    return str(recode(opened, checkpoint, request).codes)
