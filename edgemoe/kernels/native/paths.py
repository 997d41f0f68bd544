"""The paths of the compiled kernel: sets of instructions, of which each kind of work takes one.

All paths give the same bits: sums of products are integers, except in attention, and the operations in float32 have
one order. So a choice of paths changes the time of an answer and never the answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from edgemoe.kernels.native import library as native

PATHS = (
    *("avx2", "avx-vnni", "avx512-vnni", "avx512-bf16", "amx", "amx-emulated"),
    *("neon", "neon-dotprod", "neon-i8mm"),
)
"""Names of paths, in the order of `path` in csrc/paths.h. A processor has its architecture's: x86-64 or aarch64."""

EMULATED = "amx-emulated"
"""AMX's tiles in plain C: for tests, on every processor."""

_BYTES_ALONE = ("neon-dotprod", "neon-i8mm")
"""Paths whose instructions multiply 8-bit numbers; several rows at level 8, with 14-bit activations, take "neon"'s."""

WORKS = ("experts", "experts at 8 bits", "dense", "attention")
"""Kinds of work, in the order of `work` in csrc/paths.h."""

ROWS = ("1", "2 to 12", "13 to 31", "32 and more")
"""Rows of an expert or of a product that share a choice (row_bucket in csrc/paths.h); of attention, a token alone, and
several of a prompt."""

Choice = Mapping[tuple[str, str], str]
"""(kind of work, rows) -> path."""


def available() -> list[str]:
    """The paths of this processor, the narrowest first; the emulated one is not among them."""
    found = _found()
    return [path for i, path in enumerate(PATHS) if found >> i & 1 and path != EMULATED]


def _found() -> int:
    """A bit for each of PATHS: whether this processor has it."""
    found: int = native.library().edgemoe_paths()
    return found


def candidates(work: str, rows: str) -> list[str]:
    """The paths that have code of their own for a kind of work and number of rows, the narrowest first.

    AMX has none for single rows: those wait for memory. Attention multiplies bf16 numbers, for which AVX-VNNI and
    NEON's 8-bit products have nothing, and avx512-bf16 is for attention alone. NEON's 8-bit products serve experts, at
    8 bits single rows alone, whose 14-bit activations are split, and dense products.
    """
    found = available()
    if work == "attention":
        without = "avx-vnni", *_BYTES_ALONE
        found = [path for path in found if path not in without] if rows in (ROWS[0], ROWS[-1]) else []
        return [path for path in found if path != "amx" or rows != ROWS[0]]
    found = [path for path in found if path != "avx512-bf16"]
    if work == "experts at 8 bits" and rows != ROWS[0]:
        found = [path for path in found if path not in _BYTES_ALONE]
    return [path for path in found if path != "amx" or rows != ROWS[0]]


def choice() -> dict[tuple[str, str], str]:
    """The present choice for every kind of work and number of rows that has candidates; at first the widest paths."""
    library = native.library()
    return {
        (work, rows): PATHS[library.edgemoe_chosen_path(i, j)]
        for i, work in enumerate(WORKS)
        for j, rows in enumerate(ROWS)
        if candidates(work, rows)
    }


def forced(path: str) -> dict[tuple[str, str], str]:
    """The choice of one path for everything that it has code for, and of the widest other path for the rest.

    Raises:
        ValueError: no such path on this processor.
    """
    if path not in (*available(), EMULATED):
        raise ValueError(f"expected one of {', '.join(available())}, got {path}")
    below = [each for each in available() if path == EMULATED or PATHS.index(each) <= PATHS.index(path)]
    found = {}
    for key in choice():
        own = [each for each in candidates(*key) if each in below]
        found[key] = path if path == EMULATED else own[-1]
    return found


def choose(choice: Choice) -> None:
    """Lets each kind of work take its path. Not to be called while a product runs.

    Raises:
        ValueError: a path that this processor has not got.
    """
    for (work, rows), path in choice.items():
        index = PATHS.index(path) if path in PATHS else -1
        if native.library().edgemoe_choose_path(WORKS.index(work), ROWS.index(rows), index):
            raise ValueError(f"expected one of {', '.join(available())}, got {path}")
