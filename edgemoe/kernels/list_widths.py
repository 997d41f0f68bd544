"""The widths of the rows that a list's operations read and write, which must go together."""

from __future__ import annotations

from edgemoe.kernels.program import (
    HIDDEN,
    Activate,
    Add,
    Attend,
    Call,
    DeltaNet,
    Experts,
    LatentQueries,
    LatentValues,
    LayerProgram,
    Linear,
    Norm,
    Operation,
    Place,
    Scale,
    ShortConv,
    StateSpace,
    StoreLatents,
)
from edgemoe.storage.store.dense_groups import columns_of


def with_widths(program: LayerProgram, hidden: int) -> list[tuple[Operation, int, int]]:
    """Returns each operation of a list, with how many numbers of a row it reads, and how many it writes.

    Args:
        program: the list.
        hidden: numbers of the state.

    Raises:
        ValueError: an operation reads a buffer that has rows of another width, or none yet.
    """
    now, found = {HIDDEN: hidden}, list[tuple[Operation, int, int]]()
    for each in program.operations:
        had, changed = now.get(each.input), now.get(each.output)
        reads, writes = _widths_of(each, had or 0, hidden)
        adds = isinstance(each, Scale | Add) or (isinstance(each, Experts) and each.output == HIDDEN)
        writes = changed if isinstance(each, Scale) and had and changed and changed % had == 0 else writes
        if had != reads or (adds and changed != writes):
            raise ValueError(
                f"expected rows of {reads} in {each.input} and of {writes} in {each.output} for "
                f"{type(each).__name__}, got {had} and {changed}"
            )
        now[each.output] = writes
        found.append((each, reads, writes))
    return found


def _widths_of(each: Operation, had: int, hidden: int) -> tuple[int, int]:
    """The numbers of a row that an operation reads and writes, where its input has rows of `had` numbers."""
    match each:
        case Norm():
            return each.weight.shape[-1], each.weight.shape[-1]
        case Linear():
            weight = each.weights[0]
            return columns_of(weight), len(weight)
        case Attend():
            return each.attention.reads, each.attention.heads * each.attention.value_dim
        case StoreLatents():
            return each.latents.stored, each.latents.stored
        case LatentQueries():
            return each.latents.queries, each.latents.heads * each.latents.stored
        case LatentValues():
            return each.latents.heads * each.latents.stored, each.latents.values
        case DeltaNet():
            return each.net.reads, each.net.writes
        case ShortConv():
            return each.conv.reads, each.conv.writes
        case StateSpace():
            return each.space.reads, each.space.writes
        case Activate():
            return had, had // 2
        case Experts():
            return hidden, hidden
        case Call() | Place():
            return had, each.cols
        case _:
            return had, had
