"""Contract of the launches that a new token consists of, whose layers are captured alone or in groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Launch = Callable[[], None]


class Launches(Protocol):
    """Launches of a model, which read and write the places of one TokenMemory.

    `begin`, `layer` and `end` are not captured, so that several of them can be captured as one.

    """

    @property
    def moe(self) -> Sequence[int]:
        """Numbers of the layers with experts, ascending."""

    @property
    def reports(self) -> Sequence[Launch]:
        """Captured, per layer: the layer up to its router's report, and the copy of the report to the host.

        A layer without experts is launched as a whole.
        """

    @property
    def experts(self) -> Sequence[Launch]:
        """Captured: the experts of a table, by the table's number."""

    @property
    def rests(self) -> Sequence[Launch]:
        """Captured, per layer: the sum of its experts and the rest of the layer; nothing where the next layer sums."""

    def begin(self) -> None:
        """Launches the beginning of a token: memory.token and memory.position -> memory.hidden."""

    def layer(self, layer: int, experts: Launch, /) -> None:
        """Launches a layer of the model.

        Args:
            layer: its number.
            experts: launches the experts of the report in memory.reporting, into memory.rows; called once, or never
                for a layer without experts.
        """

    def compute(self) -> None:
        """Launches the experts of memory.items."""

    def end(self) -> None:
        """Launches the end of a token: the state after the last layer -> memory.outcome."""


def nothing() -> None:
    """Launches nothing."""
