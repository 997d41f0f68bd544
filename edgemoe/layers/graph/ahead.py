"""A new token through all layers in one launch, and the next one ahead of its request.

    host       token t requested ─► launches t + 1 ─► waits for t, counts it ─► sampling ─► token t + 1 requested
    device     … t ──────────────────────────────────► t + 1 ──────────────────────────────────► …

The launch of a token ends with the next one in the device's memory, where the same launch begins: the likeliest one, or
the one that the conversation's next random number draws. So the next token is launched while the host still waits for
this one. If the next step asks for another token, what ran ahead is discarded: it has written rows of keys and values
after the sequence's last token, which nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import ReferenceType, ref

import numpy as np
import torch

from edgemoe.experts.step import StepContext
from edgemoe.kv.sequence import SequenceKV
from edgemoe.layers.graph.base import Launches
from edgemoe.layers.graph.groups import LONGEST_REST, Division, GraphGroups, Numbers
from edgemoe.layers.graph.memory import TokenMemory
from edgemoe.machine.device import Device, Event
from edgemoe.policy.levels import LevelPolicy

MATCHES = 8
"""Tokens in a row that the device must have chosen as the host did before the next one runs ahead, after one that it
did not. Until then one is enough: a wrong guess takes the device for a whole token, and a right one hides the host's
part of it."""


@dataclass(frozen=True)
class TokenRequest:
    """A token that a sequence goes on with.

    Args:
        sequence: the sequence.
        token: its id; -1: not known yet.
        length: the sequence's tokens before it.
        changes: the sequence's number of changes so far; an equal number stands for equal tokens.
        policy: the rules of its step.
    """

    sequence: ReferenceType[SequenceKV]
    token: int
    length: int
    changes: int
    policy: LevelPolicy

    @classmethod
    def of(cls, step: StepContext, sequence: SequenceKV, token: int) -> TokenRequest:
        """The token that a step asks for."""
        return cls(ref(sequence), token, sequence.length, sequence.changes, step.policy)

    def after(self) -> TokenRequest:
        """The token after this one, whose id is not known yet."""
        return replace(self, token=-1, length=self.length + 1, changes=self.changes + 1)


@dataclass
class Flight:
    """A token that has been launched.

    Args:
        request: the token.
        own: int64 [layers, experts], the levels in the device's memory that it computes with.
        outcome: TokenMemory.outcome, in RAM.
        landed: is done once the outcome is there and the launch reads nothing any more.
    """

    request: TokenRequest
    own: Numbers
    outcome: torch.Tensor
    landed: Event


class OneLaunch:
    """Runs new tokens through all layers in one launch each, where every expert lies in one of both memories.

    Args:
        device: the device of the model.
        memory: the memory of the launches.
        groups: the groups of the model's layers, which count and move experts.
        launches: the launches of the model.
    """

    def __init__(
        self,
        device: Device,
        memory: TokenMemory,
        groups: GraphGroups,
        launches: Launches,
    ) -> None:
        self._device, self._memory, self._groups = device, memory, groups
        self._launches = launches
        self._rests = Division(len(memory.trace), len(memory.trace), ())
        self._captured: dict[bool, Callable[[], None]] = {}
        """A token's launch, which ends with the likeliest next token, or (True) with one that is drawn."""
        self._ahead: Flight | None = None
        self._following: tuple[ReferenceType[SequenceKV], int] | None = None
        self._matches, self._enough = 0, 1

    def run(self, step: StepContext, sequence: SequenceKV, token: int, *, alone: bool) -> torch.Tensor | None:
        """Appends a token to a sequence.

        Args:
            step: the step.
            sequence: has room for the token.
            token: its id.
            alone: whether the step has no other token.

        Returns:
            float32 [vocab] in RAM, the logits after it; None: it is to be computed in groups of layers.
        """
        self._compare(sequence, token)
        draws = step.step.segments[0].draws if alone else None
        self._memory.drawing = draws is not None and draws.rule is not None
        if draws and draws.rule:
            self._memory.draws.follow(draws, sequence.length)
        request = TokenRequest.of(step, sequence, token)
        flight = self._take(request)
        try:
            if flight is None:
                if not self._groups.everywhere(step) or self._rests.rests(0):
                    return None
                self._memory.begin_token(sequence, token)
                if not self._is_captured():
                    return None
                flight = self._launch(request)
            self._groups.move(step)
            if alone and self._pays(sequence) and self._groups.everywhere(step) and not _settles(step):
                self._ahead = self._launch(request.after())
            flight.landed.wait()
        except BaseException:
            self._device.await_computed()
            self._ahead = None
            raise
        return self._landed(step, flight)

    def settle(self) -> None:
        """Waits for a token that ran ahead: nothing that it reads is in use any more."""
        if self._ahead:
            self._ahead.landed.wait()

    def discard(self) -> None:
        """Waits for a token that ran ahead, and discards it: rows of keys and values are computed in other ways."""
        self.settle()
        self._ahead = self._following = None

    def _landed(self, step: StepContext, flight: Flight) -> torch.Tensor | None:
        """Counts a token that has been computed and returns its logits; None: it stopped."""
        layers, memory = len(self._memory.trace), self._memory
        parts: list[torch.Tensor] = flight.outcome.split([part.numel() for part in memory.outcome_parts])
        logits, trace, following = parts
        numbers = trace.view(layers, -1).numpy()
        if numbers[self._groups.moe[-1], -1]:
            self._rests.note_stop(0)
            self.discard()
            return None
        self._rests.stops[0] = 0
        self._groups.count(step, range(layers), numbers[:, :-1].astype(np.int64), flight.own)
        token = int(following[0])
        self._following = flight.request.sequence, token
        if self._ahead:
            self._ahead.request = replace(self._ahead.request, token=token)
        return logits.view(torch.float32)

    def _take(self, request: TokenRequest) -> Flight | None:
        """The token that ran ahead, if it is the one requested; another one is discarded."""
        flight, self._ahead = self._ahead, None
        if flight and flight.request != request:
            flight.landed.wait()
            flight = None
        return flight

    def _compare(self, sequence: SequenceKV, token: int) -> None:
        """Notes whether a token is the one that the device chose after the token before it."""
        if self._following is None or self._following[0]() is not sequence:
            self._matches, self._enough = 0, 1
        elif self._following[1] == token:
            self._matches += 1
        else:
            self._matches, self._enough = 0, MATCHES

    def _pays(self, sequence: SequenceKV) -> bool:
        """Whether the token after the next one of a sequence may run ahead, and is likely to be requested."""
        end = sequence.length + 2
        room = end <= min(sequence.context, sequence.reserved)
        # Rows of windows move when a token becomes valid, and states and factors change with each token.
        fixed = not (sequence.window_rows or sequence.states or self._memory.lengths)
        return room and fixed and self._matches >= self._enough

    def _launch(self, request: TokenRequest) -> Flight:
        """Launches the token that the memory's state has, and the copy of its outcome."""
        self._groups.places.send()
        self._captured[self._memory.drawing]()
        return Flight(request, self._groups.places.own, *self._device.fetch(self._memory.outcome))

    def _is_captured(self) -> bool:
        """Captures a token's launch, unless it has been. It runs for that, so the state is kept meanwhile.

        Returns:
            whether there is one; where memory is short, some tokens are computed in groups before it is tried again.
        """
        drawing = self._memory.drawing
        if drawing not in self._captured:
            self._groups.places.send()
            before = self._memory.state.clone()
            with torch.inference_mode():
                try:
                    self._captured[drawing] = self._device.capture(self._whole, self._launches)
                except torch.OutOfMemoryError:
                    self._rests.rest[0] = LONGEST_REST
                self._memory.state.copy_(before)
        return drawing in self._captured

    def _whole(self) -> None:
        """Launches a token's beginning, its layers and its end."""
        self._launches.begin()
        self._groups.launch(range(len(self._memory.trace)), ())
        self._launches.end()


def _settles(step: StepContext) -> bool:
    """Whether experts may change their level after a step, and the next token waits for that."""
    hotness = step.policy.settings.hotness
    return hotness is not None and hotness.settled
