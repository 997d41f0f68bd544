"""A new token through groups of layers in one launch each, without the host: the device chooses levels and addresses.

An expert that the device's memory lacks is read where it lies in the host's: its planes come over the link while they
are multiplied, and no copy, no request and no wait is needed. Between tokens the hottest of them move into the device's
memory (layers.graph.promotions).

    layer      norm ─ q k v ─ … ─ router ─ choice ─► levels and addresses, from a table on the device ─► experts
    host       launches all groups; moves experts that the token before read; waits once; counts

A group stops where an expert lies in neither memory. Its first state was kept, and GraphDecode computes it again, layer
by layer. Once every expert lies in one of both memories, all layers are one launch (layers.graph.ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.experts.step import StepContext
from edgemoe.layers.graph.base import Launches
from edgemoe.layers.graph.memory import TokenMemory
from edgemoe.layers.graph.places import ExpertPlaces
from edgemoe.layers.graph.promotions import Promotions
from edgemoe.policy.levels import LevelPolicy
from edgemoe.storage.base import ExpertKey

GROUP = 4
"""Layers of a group. A smaller one computes less again after a stop, and saves its state more often."""

STOPS = 2
"""Tokens in a row at which a group may stop without a rest: trying takes a quarter of the time of layer by layer."""

LONGEST_REST = 15
"""Most tokens for which a group that goes on stopping is not tried."""

Numbers = NDArray[np.int64]


class Division:
    """The layers of a model in groups of one size.

    Args:
        layers: the number of layers.
        size: layers of a group; the last one may have fewer.
        state: the tensors that a layer reads from the previous layer.

    Attributes:
        groups: the layers of each group.
        rest: tokens for which each group is not tried.
        stops: tokens in a row at which each group has stopped.
        saved: the state before each group, as it was when the group began.
        captured: launches each group; empty until they are captured.
    """

    def __init__(self, layers: int, size: int, state: Sequence[torch.Tensor]) -> None:
        self._size = size
        self.groups = [range(first, min(first + size, layers)) for first in range(0, layers, size)]
        self.rest, self.stops = [0] * len(self.groups), [0] * len(self.groups)
        self.saved = [[torch.empty_like(x) for x in state] for _ in self.groups]
        self.captured: list[Callable[[], None]] = []

    def index(self, layer: int) -> int:
        """The number of a layer's group."""
        return layer // self._size

    def rests(self, group: int) -> bool:
        """Whether a group is not tried for this token. Counts the token."""
        resting = self.rest[group] > 0
        self.rest[group] -= resting
        return resting

    def note_stop(self, group: int) -> None:
        """Lets a group rest that has stopped."""
        self.stops[group] += 1
        self.rest[group] = min(2 ** max(self.stops[group] - STOPS, 0) - 1, LONGEST_REST)


class GraphGroups:
    """The groups of a model's layers.

    Args:
        runtime: the runtime of the experts, on a device.
        kernel: TritonExpertKernel.
        memory: the memory of the launches.
        launches: the launches of the model's layers.

    Attributes:
        places: the places of all experts.
        active: the experts that each layer's router has chosen in this step so far.
    """

    def __init__(self, runtime: ExpertRuntime, kernel: Any, memory: TokenMemory, launches: Launches) -> None:
        assert runtime.device
        self._runtime, self._device, self._memory = runtime, runtime.device, memory
        self._launches, self.moe = launches, list(launches.moe)
        count, experts = len(launches.reports), runtime.experts
        self.places = ExpertPlaces(self._device, kernel, runtime.source.pinned, count, experts)
        self.active: list[set[int]] = [set() for _ in range(count)]
        self._promotions = Promotions(count, experts)
        self._keys = [ExpertKey(layer, expert) for layer in range(count) for expert in range(experts)]
        self._division = Division(count, GROUP, self._state())
        self._used: list[tuple[Sequence[int], Numbers, Numbers, Numbers]] = []
        """(layers, experts, levels by the rule, levels in the device's memory), of what ran since the last `move`."""
        self._rules = self._damage = torch.empty(0)  # until the first step

    def configure(self, policy: LevelPolicy) -> None:
        """Sets the rules of levels for the steps that follow."""
        from edgemoe.kernels.triton.place import damage_of, rules_of

        slots, place = self._memory.slots, self._device.place
        rules = [policy.decode_rule(layer, slots) for layer in range(len(self._launches.reports))]
        settings = policy.settings
        numbers = rules_of(rules, slots, exact=settings.exact, renormalise=settings.renormalise)
        damage = damage_of(rules, self._runtime.experts)
        if not self._rules.numel():
            self._rules, self._damage = numbers.to(place), damage.to(place)
        self._rules.copy_(numbers)
        self._damage.copy_(damage)

    def everywhere(self, step: StepContext) -> bool:
        """Whether a step may read experts where they lie, and each of them lies in one of both memories."""
        return self._usable(step) and bool(self.places.levels[1, self.moe].all())

    def _usable(self, step: StepContext) -> bool:
        settings = step.policy.settings
        return settings.in_place == "on" and settings.cache

    def takes(self, step: StepContext, layer: int) -> bool:
        """Whether the group of a layer is tried in a step."""
        division = self._division
        rests = division.rest[division.index(layer)]
        return not rests and self._usable(step) and bool(self.places.levels[1].any())

    def of(self, layer: int) -> range:
        """The layers of a layer's group."""
        return self._division.groups[self._division.index(layer)]

    def note_choice(self, step: StepContext, layer: int, choice: Sequence[int], gates: torch.Tensor) -> None:
        """Counts what a layer's router has chosen for a token: experts, and their gate weights float32 [1, k]."""
        self.active[layer].update(choice)
        if step.record.choices or step.study.watch:
            step.note_choice(layer, torch.tensor([choice]), gates)

    def run(self, step: StepContext, layer: int) -> int:
        """Runs the groups from the one that begins with a layer on, up to one that is not tried or that stops.

        Returns:
            the first layer that has not run; the memory has the state before it.
        """
        division, count = self._division, len(self._launches.reports)
        first = last = division.index(layer)
        while last < len(division.groups) and self.takes(step, division.groups[last].start):
            last += 1
        end = self._try(step, range(first, last)) if first < last else first
        if end == last:
            if last < len(division.groups):
                division.rests(last)
            return division.groups[last].start if last < len(division.groups) else count
        division.note_stop(end)
        for now, before in zip(self._state(), division.saved[end], strict=True):
            now.copy_(before)
        return division.groups[end].start

    def _try(self, step: StepContext, groups: range) -> int:
        """Launches consecutive groups. Returns the first one that stopped, or the one after them."""
        division = self._division
        if not division.captured:
            self._capture(division)
        self.places.send()
        self._memory.stopped.zero_()
        for group in groups:
            division.captured[group]()
        copied, landed = self._device.fetch(self._memory.trace)
        self.move(step)
        landed.wait()
        trace = copied.numpy().astype(np.int64)
        end = next((g for g in groups if trace[division.groups[g], -1].any()), groups.stop)
        if end > groups.start:
            every = range(division.groups[groups.start].start, division.groups[end - 1].stop)
            self.count(step, every, trace[:, :-1], self.places.own)
        for group in range(groups.start, end):
            division.stops[group] = 0
        return end

    def _state(self) -> tuple[torch.Tensor, ...]:
        """The tensors that a layer reads from the previous layer."""
        return self._memory.hidden, self._memory.rows, self._memory.gates

    def _capture(self, division: Division) -> None:
        """Captures every group. Its launches run once for that, so the state is kept meanwhile."""
        before = [x.clone() for x in self._state()]
        with torch.inference_mode():
            captured = [
                self._device.capture(partial(self.launch, layers, saved), self._launches)
                for layers, saved in zip(division.groups, division.saved, strict=True)
            ]
            self._device.await_computed()
        division.captured = captured  # all, or none where memory is short
        for now, kept in zip(self._state(), before, strict=True):
            now.copy_(kept)

    def launch(self, layers: range, saved: Sequence[torch.Tensor]) -> None:
        """Launches some layers, and before them the copies of their state, if there are tensors to copy it to."""
        for now, before in zip(self._state(), saved, strict=bool(saved)):
            before.copy_(now)
        for layer in layers:
            self._launches.layer(layer, partial(self._launch_experts, layer))

    def _launch_experts(self, layer: int) -> None:
        """Launches the choice of a layer's levels and addresses, and its experts."""
        from edgemoe.kernels.triton.place import place_experts

        memory, places = self._memory, self.places
        place_experts(
            *(memory.reporting, places.table[layer], self._rules[layer], self._damage[layer]),
            *(places.offsets, memory.stopped, memory.items, memory.gates, memory.trace[layer]),
        )
        self._launches.compute()

    def count(self, step: StepContext, within: range, traces: Numbers, own: Numbers) -> None:
        """Counts a token's experts in some layers, by their levels; keeps them for `move`.

        Args:
            step: the step.
            within: numbers of the layers; the ones without experts count nothing.
            traces: int64 [layers, 3 k], the trace of every layer of the model.
            own: int64 [layers, experts], levels in the device's memory.
        """
        layers = [layer for layer in self.moe if layer in within]
        if not layers:
            return
        trace = traces[layers]
        k, settings = self._memory.slots, step.policy.settings
        chosen, wanted = trace[:, :k], trace[:, 2 * k :]
        has = own[np.asarray(layers)[:, None], chosen]
        self._used.append((layers, chosen, wanted, has))
        kinds, numbers = np.unique(has + 16 * wanted, return_counts=True)
        levels = {
            (kind % 16, kind // 16): n for kind, n in zip(kinds.tolist(), numbers.tolist(), strict=True)
        }
        step.experts.count_computed({pair: n for pair, n in levels.items() if pair[1]}, len(layers))
        for (mine, level), count in levels.items():
            computed = max(mine, level) if level and not settings.exact else level
            step.use.add_alike(level, computed, count)
        gates = torch.tensor(trace[:, k : 2 * k].astype(np.int32).view(np.float32))
        if settings.priced:
            step.use.add_damage(
                step.policy.damage, list(layers), torch.tensor(chosen), gates, torch.tensor(wanted)
            )
        for layer, row in zip(layers, chosen.tolist(), strict=True):
            self.active[layer].update(row)
        if step.record.choices:
            step.record.choices.add_token(layers, chosen, gates.numpy())
        if step.study.watch:
            for layer, row in zip(layers, chosen, strict=True):
                step.study.watch(layer, torch.tensor(row)[None])

    def move(self, step: StepContext) -> None:
        """Marks the previous token's experts as used, and moves the hottest ones that it read in DRAM.

        That takes the host longer than anything else of a token, so it is done while the device computes the next one.
        """
        source, used, away = self._runtime.source, list[ExpertKey](), list[tuple[ExpertKey, int]]()
        keys, (own, either) = self._keys, self.places.levels
        for layers, chosen, wanted, has in self._used:
            self._promotions.note(layers, chosen)
            rows = np.asarray(layers)[:, None]
            numbers = rows * self._runtime.experts + chosen
            used += [keys[number] for number in np.sort(numbers[(wanted > 0) & (has > 0)]).tolist()]
            # What has moved since, or left both memories, is not brought: a launch may read the blocks in DRAM.
            read = (has < wanted) & (own[rows, chosen] < wanted) & (wanted <= either[rows, chosen])
            levels = wanted[read].tolist()
            away += [
                (keys[number], level) for number, level in zip(numbers[read].tolist(), levels, strict=True)
            ]
        self._used.clear()
        source.pinned.mark_used(used)
        moving = self._promotions.choose(away, self.places.levels[0])
        if moving:
            source.promote(moving, step.record.transfers)
