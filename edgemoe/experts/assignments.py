"""The rows of a layer that each expert computes, their levels, and each token's weighted sum of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from edgemoe.cache.base import Lease
from edgemoe.kernels.base import MOST_ROWS
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.experts import weighted_sum
from edgemoe.kernels.native.rows import add_weighted_rows
from edgemoe.policy.schedule import row_sums
from edgemoe.storage.base import ExpertKey

_LEVEL_RANGE = 16
"""Above every level: packs (expert, level) into one number."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The (token, slot) pairs of one expert that are computed at one level.

    Args:
        level: the level scheduled for them.
        rows: number of pairs.
        places: int64 [rows], indices into the flat [T * k]: the compensated ones, then the others, each ascending.
        compensated: rows that are computed with the expert's compensator, at a level that has one.
    """

    level: int
    rows: int
    places: torch.Tensor
    compensated: int = 0

    def parts(self, limit: int) -> Iterator[Assignment]:
        """Parts of at most `limit` rows, where it has more."""
        for start in range(0, self.rows, limit):
            places = self.places[start : start + limit]
            compensated = min(max(self.compensated - start, 0), len(places))
            yield Assignment(self.level, len(places), places, compensated)


@dataclass(frozen=True)
class Assignments:
    """One layer's experts for the rows of a step, and how their results are summed.

    >>> chosen, levels = torch.tensor([[2, 0], [2, 1]]), torch.tensor([[4, 2], [4, 0]])
    >>> made = Assignments.of(chosen, levels, torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    >>> [(expert, one.level, one.places.tolist()) for expert, some in made.by_expert.items() for one in some]
    [(0, 2, [1]), (2, 4, [0, 2])]
    >>> made.rows, made.skipped
    (3, [1])

    Args:
        by_expert: expert -> its assignments, of one level each; of a single token in the router's order.
        gates: float32 [T, k], gate weights, 0 where the level is 0.
        order: int64 [T, k], the slots of each token in the order of their experts.
        rows: (token, slot) pairs that are computed.
        skipped: number of (token, slot) pairs of each skipped expert.
    """

    by_expert: dict[int, list[Assignment]]
    gates: torch.Tensor
    order: torch.Tensor
    rows: int
    skipped: list[int]

    @classmethod
    def of(
        cls,
        choice: torch.Tensor,
        levels: torch.Tensor,
        gates: torch.Tensor,
        compensated: torch.Tensor | None = None,
    ) -> Assignments:
        """Groups a router's choice.

        Args:
            choice: int64 [T, k], experts.
            levels: int64 [T, k]; 0: skipped.
            gates: [T, k], 0 where the level is 0.
            compensated: bool [T, k]; None: no pair.
        """
        if choice.shape[0] == 1:
            flags = compensated[0].tolist() if compensated is not None else ()
            return cls.of_token(choice[0].tolist(), levels[0].tolist(), gates.float(), flags)
        by_expert: dict[int, list[Assignment]] = {}
        skipped, rows = [], choice.numel()
        joined = (choice * _LEVEL_RANGE + levels).reshape(-1)
        plain = torch.ones_like(joined) if compensated is None else (~compensated).reshape(-1).long()
        order = (joined * 2 + plain).argsort(stable=True)
        values, group, counts = joined[order].unique_consecutive(return_inverse=True, return_counts=True)
        firsts = (counts - torch.zeros_like(counts).index_add_(0, group, plain[order])).tolist()
        sizes = counts.tolist()
        for value, size, places, first in zip(
            values.tolist(), sizes, order.split(sizes), firsts, strict=True
        ):
            expert, level = divmod(value, _LEVEL_RANGE)
            if level:
                by_expert.setdefault(expert, []).append(Assignment(level, size, places, first))
            else:
                skipped.append(size)
                rows -= size
        return cls(by_expert, gates.float().contiguous(), choice.argsort(dim=1), rows, skipped)

    @classmethod
    def of_token(
        cls,
        choice: Sequence[int],
        levels: Sequence[int],
        gates: torch.Tensor,
        compensated: Sequence[bool] = (),
    ) -> Assignments:
        """Makes the short list of a single token's assignments.

        Args:
            choice: k experts, in the router's order.
            levels: k levels; 0: skipped.
            gates: float32 [1, k], 0 where the level is 0.
            compensated: k; empty: no expert.
        """
        count = len(choice)
        by_expert: dict[int, list[Assignment]] = {}
        slots = zip(choice, levels, _each_slot(count), compensated or _no_slot(count), strict=True)
        for expert, level, place, flag in slots:
            if level:
                by_expert[expert] = [Assignment(level, 1, place, int(flag))]
        skipped = [1] * levels.count(0)
        order = torch.tensor([sorted(range(count), key=choice.__getitem__)])
        return cls(by_expert, gates, order, len(by_expert), skipped)

    def wanted(self, layer: int) -> dict[ExpertKey, int]:
        """Key -> the highest level of each expert."""
        wanted: dict[ExpertKey, int] = {}
        for expert, some in self.by_expert.items():
            level = some[0].level if len(some) == 1 else max(one.level for one in some)
            wanted[ExpertKey(layer, expert)] = level
        return wanted

    def batches(self, leases: Sequence[Lease], limit: int) -> list[list[tuple[Lease, Assignment]]]:
        """Splits the assignments of leased experts into calls.

        A call has at most `limit` rows, or a larger part of one assignment. A part has at most MOST_ROWS rows.
        """
        batches: list[list[tuple[Lease, Assignment]]] = []
        left = 0
        for lease in leases:
            for one in self.by_expert[lease.key.expert]:
                for assignment in one.parts(MOST_ROWS) if one.rows > MOST_ROWS else (one,):
                    left -= assignment.rows
                    if left < 0:
                        batches.append([])
                        left = limit - assignment.rows
                    batches[-1].append((lease, assignment))
        return batches


class RowSum:
    """Keeps every row until all have come; then sums a token's rows in float32.

    In RAM it adds them in the order of their experts, as PromptSum does; a device adds them in the router's order.

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
        self.gates, self._order = assignments.gates, assignments.order
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
        if rows.device.type == "cpu":
            gates, row_of = gates.gather(1, self._order), row_of.view_as(gates).gather(1, self._order)
            if native.available():
                return weighted_sum(rows, gates, row_of, add_to)
        rows[-1].zero_()
        row_of = (row_of.to(rows.device, non_blocking=True) % len(rows)).view_as(gates)
        gates = gates.to(rows.device, non_blocking=True)
        total = rows[row_of[:, 0]].float() * gates[:, :1]
        for slot in range(1, gates.shape[1]):
            total.addcmul_(rows[row_of[:, slot]].float(), gates[:, slot : slot + 1])
        summed = total.to(rows.dtype)
        return summed if add_to is None else add_to.add_(summed.view_as(add_to))


class PromptSum(RowSum):
    """Adds rows to their tokens' sums as they come: float32 [T, H] in memory instead of bf16 [T k, H].

    In RAM. The experts come in the order of their keys, so the sums do too.
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


@cache
def _each_slot(slots: int) -> tuple[torch.Tensor, ...]:
    """The places of a single token's slots."""
    return tuple(torch.tensor([slot]) for slot in range(slots))


@cache
def _no_slot(slots: int) -> tuple[bool, ...]:
    """No slot of a token is compensated."""
    return (False,) * slots


def without_skipped(gates: torch.Tensor, levels: torch.Tensor, *, renormalise: bool) -> torch.Tensor:
    """Gate weights [T, k] with 0 where levels [T, k] are 0, in float32.

    Args:
        gates: [T, k].
        levels: int64 [T, k].
        renormalise: scale the rest of each row to the row's sum before; a row of which nothing is left stays 0.
    """
    left = gates.float().masked_fill(levels == 0, 0)
    if renormalise:
        left = left * (row_sums(gates.float()) / row_sums(left).clamp_min(1e-20))
    return left


def joined(parts: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """Joins the rows of parts whose levels were chosen together; parts without any (None) are left out."""
    rows = [part for part in parts if part is not None]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
