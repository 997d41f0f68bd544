"""The memory that a model may take, and the sequences for which it is divided."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.errors import UserError
from edgemoe.kv.blocks import BLOCK_ROWS

SHARED_ROWS = 2048
"""Most token rows of a step of prompts where several sequences may run: one layer of it bounds the gap between two
tokens of the others."""


GUESSED_ROWS = 32
"""Most rows of a step of new tokens that has guesses, unless more sequences run."""


def decode_rows(parallel: int, drafts: int) -> int:
    """Returns the most rows of a step of new tokens: the sequences' own, and guesses at the tokens after them.

    >>> decode_rows(1, 7), decode_rows(8, 7), decode_rows(8, 0), decode_rows(64, 7)
    (8, 32, 8, 64)

    Args:
        parallel: sequences that run at once.
        drafts: most guesses for each of them.
    """
    return max(parallel, min(parallel * (1 + drafts), GUESSED_ROWS))


@dataclass(frozen=True)
class Limits:
    """The limits that a plan divides, and the sequences that it divides them for.

    >>> Limits(vram=4_000_000_000, context=4096, parallel=2).tokens
    8192

    Args:
        vram: bytes of the fastest memory, of a device or of RAM; None: as many as all experts at the highest level
            take, at most the free memory.
        dram: bytes of the second tier, in RAM; 0: there is none.
        context: tokens of KV of each sequence.
        parallel: sequences that run at once.
        prefill_rows: most token rows of a prompt in one step; None: workspace.default_prefill_rows.

    Raises:
        UserError: prefill_rows below 2.
    """

    vram: int | None
    context: int
    dram: int = 0
    parallel: int = 1
    prefill_rows: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_rows is not None and self.prefill_rows < 2:
            raise UserError(
                "2 or more rows for --prefill-rows",
                f"{self.prefill_rows}",
                f"choose a multiple of {BLOCK_ROWS}",
            )

    @property
    def tokens(self) -> int:
        """Tokens of all sequences together."""
        return self.parallel * self.context

    @property
    def step_rows(self) -> int:
        """Token rows of a step of one block, or of one token of each sequence."""
        return max(min(self.tokens, BLOCK_ROWS), self.parallel)

    @property
    def prompt_rows(self) -> int:
        """Most token rows of prompts that are worth running in one step: a whole context, or several prompts."""
        return max(self.context, min(self.tokens, SHARED_ROWS))
