"""Rows that experts compute, and each token's weighted sum of its own."""

from __future__ import annotations

import torch

from edgemoe.experts.assignments import Assignments
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.experts import weighted_sum
from edgemoe.kernels.native.rows import add_weighted_rows


class RowSum:
    """Keeps every row until all have come; then sums a token's rows in float32 and in the router's order.

    >>> made = Assignments.of(torch.tensor([[1, 0]]), torch.tensor([[4, 4]]), torch.tensor([[0.75, 0.25]]))
    >>> rows = RowSum(torch.zeros(1, 8, dtype=torch.bfloat16), made)
    >>> for place in (1, 0):
    ...     rows.add(torch.tensor([place]), rows.room(torch.tensor([place])).fill_(place + 1))
    >>> rows.result()[0, 0].item()
    1.25

    Args:
        hidden: bf16 [T, H], the experts' input.
        assignments: the rows of each expert.
    """

    def __init__(self, hidden: torch.Tensor, assignments: Assignments) -> None:
        self.gates = assignments.gates
        # The last row is the zero row of skipped pairs.
        self._rows = hidden.new_empty(assignments.rows + 1, hidden.shape[1])
        self._places: list[torch.Tensor] = []
        self._end = 0

    def room(self, places: torch.Tensor) -> torch.Tensor:
        """Where an expert kernel writes rows with these places, indices into the flat [T, k]: bf16 [len(places), H]."""
        return self._rows[self._end : self._end + len(places)]

    def add(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Takes rows that were written to `room` of the same places."""
        self._places.append(places)
        self._end += len(rows)

    def result(self, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """The sums, bf16 [T, H], or `add_to`, bf16 of T H in all, with the rounded sums added in place."""
        rows, gates = self._rows, self.gates
        row_of = torch.full((gates.numel(),), -1)
        if self._places:
            row_of[torch.cat(self._places)] = torch.arange(len(rows) - 1)
        if rows.device.type == "cpu" and native.available():
            return weighted_sum(rows, gates.contiguous(), row_of.view_as(gates), add_to)
        rows[-1].zero_()
        own = rows[row_of.to(rows.device, non_blocking=True) % len(rows)].view(*gates.shape, -1)
        gates = gates.to(rows.device, non_blocking=True)
        total = own[:, 0].float() * gates[:, :1]
        for slot in range(1, gates.shape[1]):
            total.addcmul_(own[:, slot].float(), gates[:, slot : slot + 1])
        summed = total.to(rows.dtype)
        return summed if add_to is None else add_to.add_(summed.view_as(add_to))


class PromptSum(RowSum):
    """Adds rows to their tokens' sums as they come: float32 [T, H] in memory instead of bf16 [T k, H].

    In RAM. The experts come in a fixed order, so the sums do too.
    """

    def __init__(self, hidden: torch.Tensor, assignments: Assignments) -> None:
        self.gates, self._hidden = assignments.gates, hidden
        self._sums = torch.zeros(hidden.shape)

    def room(self, places: torch.Tensor) -> torch.Tensor:
        """Memory for these rows alone."""
        return self._hidden.new_empty(len(places), self._hidden.shape[1])

    def add(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds rows by their gate weights."""
        tokens, gates = places // self.gates.shape[1], self.gates.reshape(-1)[places]
        if native.available():
            add_weighted_rows(self._sums, rows, tokens, gates)
        else:
            self._sums.index_add_(0, tokens, rows.float() * gates[:, None])

    def result(self, add_to: torch.Tensor | None = None) -> torch.Tensor:
        """The sums, rounded where they lie: the result has the first half of their memory."""
        shape = self._sums.shape
        rounded = self._sums.view(self._hidden.dtype).view(-1)[: shape.numel()].view(shape)
        # A block's rounded rows end before the rows that follow it begin.
        for start in range(0, len(rounded), 64):
            part = slice(start, start + 64)
            rounded[part] = self._sums[part].to(rounded.dtype)
        return rounded if add_to is None else add_to.add_(rounded.view_as(add_to))
