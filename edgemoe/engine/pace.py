"""How prompts and answers share an engine's steps."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.memory.limits import SHARED_ROWS

WORK_BETWEEN = 128
"""Tokens of a prompt that the model computes while other sequences wait for their next tokens. A layer of a larger
chunk is not divided: no other step may run while its experts are computed."""


@dataclass(frozen=True)
class Pace:
    """How prompts and answers share the steps.

    Args:
        chunk: tokens of a prompt in one step, 1 to the plan's prefill_rows; None: as many, but at most
            SHARED_ROWS where several sequences may run. It never depends on what runs, so neither do answers.
        every: decode steps between two chunks, while any sequence decodes; 0: prompts first, so answers wait for them.
        work: tokens of a prompt that the model computes between such steps.
    """

    chunk: int | None = None
    every: int = 4
    work: int = WORK_BETWEEN

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise UserError("a chunk of 1 token or more", f"{self.chunk}", "choose another one")
        if self.every < 0:
            raise UserError("0 or more decode steps between two chunks", f"{self.every}", "choose 4")

    def rows(self, engine: Engine) -> int:
        """Tokens of a prompt in one step of an engine.

        Raises:
            UserError: a chunk of more rows than the plan has memory for.
        """
        most = engine.plan.prefill_rows
        if self.chunk is not None:
            if self.chunk > most:
                raise UserError(
                    f"a chunk of 1 to {most} tokens", f"{self.chunk}", f"give --prefill-rows {self.chunk} too"
                )
            return self.chunk
        if engine.plan.parallel == 1:
            return most
        # On a device no other step runs between two layers.
        return WORK_BETWEEN if engine.device else min(most, SHARED_ROWS)
