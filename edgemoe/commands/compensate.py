"""`edgemoe compensate`: a store gets low-rank compensators."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption, StoreArgument, named_store
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size
from edgemoe.models.demo import demo_by_name
from edgemoe.models.options.declared import one_of, option
from edgemoe.storage.compensators.index import RULES
from edgemoe.storage.store.manifest import Manifest

EXAMPLES = (
    "Examples: edgemoe compensate ~/stores/qwen3 --reference ~/models/Qwen3-30B-A3B "
    "| edgemoe compensate demo --rank 16 --ranks uniform"
)

RankOption = Annotated[
    int,
    typer.Option(
        "--rank", min=1, help="Mean rank of an expert's three projections: a budget for each layer."
    ),
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        help="Directory or GGUF file of the checkpoint with the weights. Default: the store's highest level.",
        callback=lambda given: given and demo_by_name(given),
    ),
]


@dataclass(frozen=True)
class CompensatorOptions:
    """Options of compensators."""

    ranks: str = option(
        "How ranks are assigned within a layer: error (where a byte takes away most squared error), kurtosis (the "
        "largest ranks for the heaviest tails) or uniform.",
        RULES[0],
        autocompletion=one_of(*RULES),
    )
    residual: int = option(
        "Level whose error is compensated, 2 or 4 bits.", 2, autocompletion=one_of("2", "4")
    )


@grouped
def compensate_command(
    store: StoreArgument,
    *,
    reference: ReferenceOption = None,
    rank: RankOption = 32,
    compensators: CompensatorOptions,
    as_json: JsonOption = False,
) -> None:
    """Add low-rank compensators to a store.

    They approximate what experts lost at 2 or 4 bits. Compensators that the store has are replaced.

    Killed, it resumes; finished, it returns at once. The store can be used meanwhile, and without them.
    """
    directory = named_store(store)
    manifest = compensate_store(directory, reference, rank, compensators)
    from edgemoe.storage.store.contents import describe_compensators

    made = describe_compensators(manifest)
    assert made
    if as_json:
        print(json.dumps({"store": str(directory)} | made))
    else:
        text = (
            f"{directory}: level {made['base_level']} compensated at mean rank {made['mean_rank']} by {made['rule']}, "
            f"{format_size(made['bytes'])}, {made['bits_per_weight']:.3g} bits per weight, "
            f"{made['left_error']:.3g} of the error left"
        )
        print(printable(text))


def compensate_store(
    directory: Path, reference: Path | None, rank: int, options: CompensatorOptions
) -> Manifest:
    """Adds compensators to a store, with progress on stderr. Arguments and errors: see storage.compensators.making."""
    from edgemoe.console.loading import starting
    from edgemoe.console.progress import CountProgress
    from edgemoe.families.table import family_of, require_known

    with starting("loading torch"):
        from edgemoe.storage.compensators.making import compensate
        from edgemoe.storage.convert.checkpoint import Checkpoint
    family = None
    if reference:
        require_known(reference)
        family = family_of(Checkpoint.open(reference).config)
    experts = sum(len(layer.records) for layer in Manifest.load(directory).layers.values())
    with CountProgress(f"compensating {directory.name}", experts) as progress:
        return compensate(
            reference,
            directory,
            family,
            base_level=options.residual,
            rule=options.ranks,
            mean_rank=rank,
            progress=progress.update,
        )
