"""New tokens through a whole model: one kernel call for as long as every expert that they need is resident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from edgemoe.experts.assignments import Assignments, without_skipped
from edgemoe.experts.runtime import ExpertRuntime, Predicted
from edgemoe.experts.step import StepContext
from edgemoe.experts.use import ChoiceCounts
from edgemoe.families.base import FusedGQA
from edgemoe.kernels.compensators import Compensators
from edgemoe.kernels.native.decode_layers import (
    CHOSEN,
    COMPUTED,
    PREDICTED,
    WANTED,
    NativeDecodeLayers,
    Place,
)
from edgemoe.kernels.native.experts import NativeExpertKernel, ResidentTable
from edgemoe.kernels.program import HIDDEN, NORMED, Call
from edgemoe.layers.decode_counts import count_remapped
from edgemoe.layers.decoder_parts import outer_parts
from edgemoe.layers.program import calls_states, experts_of, has_program, layer_program, outer_layers
from edgemoe.layers.rotations import Rotations
from edgemoe.prefetch.base import is_scan
from edgemoe.storage.base import ExpertKey

if TYPE_CHECKING:
    from edgemoe.policy.levels import LevelPolicy


class FusedDecode:
    """Runs steps of one token of each sequence through a model whose layers have lists of operations.

    The kernel goes through the layers' lists of operations while every chosen expert is resident at its level, with its
    compensator where it is to have one. Where one is not, or an operation is a Call, it stops: the experts come through
    ExpertLayer.forward, a module is called, and the kernel goes on after that operation.

    Args:
        model: the model, from layers.build: embedding, layers, norm and head.
        traits: the traits of its family.
        runtime: the state that its MoE layers share.
        kernel: the runtime's kernel, or the kernel that it wraps.
        rows: most tokens of a step.
        first: number of the model's first layer among all layers with experts.
    """

    def __init__(
        self,
        model: Any,
        traits: FusedGQA,
        runtime: ExpertRuntime,
        kernel: NativeExpertKernel,
        rows: int,
        first: int = 0,
    ) -> None:
        self._model, self._runtime = model, runtime
        self._rotations = Rotations(model, traits)
        self.takes_guesses = not calls_states(model)
        """Whether rows of guesses leave every state as it is."""
        layers, positions = list(model.model.layers), outer_parts(model).positions
        self._experts = [experts_of(layer) for layer in layers]
        count, windows = runtime.experts, traits.windows(model.config)
        table = ResidentTable(kernel, len(layers), count, first)
        programs = [layer_program(layer, windows[i], positions) for i, layer in enumerate(layers)]
        outer = outer_layers(model)
        self._native = NativeDecodeLayers(outer, programs, table, kernel, rows)
        size, buffers = outer.norm[0].shape[-1], self._native.buffers
        self._normed = [buffers.rows_of(NORMED, count, size)[0] for count in range(1, rows + 1)]
        """bf16 [rows, H], the experts' input in a step of 1, 2, 3, ... rows."""
        self._numbers = range(first, first + len(layers))
        self._keys = [[ExpertKey(number, expert) for expert in range(count)] for number in self._numbers]
        self._routed = [i for i, program in enumerate(programs) if program.router]
        """The layers whose router is the kernel's."""
        self._experts_at = [program.experts_at for program in programs]
        runtime.source.pinned.observe(table.changed)
        self._configured: tuple[LevelPolicy, Compensators | None] | None = None
        """The rules that the kernel has now; the last step set them."""
        self._choices: ChoiceCounts | None = None
        """Where the kernel counts the choices of one step; None: it counts none."""

    remaps = compensates = turns = True
    """Whether tokens agree on experts, experts have compensators, and positions may differ from tokens' numbers."""

    @classmethod
    def try_from(
        cls, model: Any, traits: FusedGQA, runtime: ExpertRuntime, rows: int = 1, first: int = 0
    ) -> Self | None:
        """Makes one where the compiled kernel runs and every part of the model has a native form; None elsewhere."""
        kernel = getattr(runtime.kernel, "wrapped", runtime.kernel)
        if not isinstance(kernel, NativeExpertKernel) or not kernel.unpadded:
            return None
        if not has_program(model):
            return None
        return cls(model, traits, runtime, kernel, rows, first)

    @property
    def most_rows(self) -> int:
        """Most tokens of a step."""
        return self._native.most_rows

    def _configure(self, policy: LevelPolicy, compensators: Compensators | None) -> None:
        """Gives the kernel the rules of a step, unless it has them from the step before."""
        if self._configured == (policy, compensators):
            return
        self._configured = policy, compensators
        slots = self._native.gates.shape[2]
        rules = [policy.decode_rule(number, slots) for number in self._numbers]
        settings = policy.settings
        chosen = settings.compensation
        self._native.configure(
            rules,
            settings.remapping,
            (chosen, compensators) if chosen and compensators else None,
            exact=settings.exact,
            renormalise=settings.renormalise,
        )

    def __call__(self, tokens: Sequence[int], step: StepContext) -> torch.Tensor:
        """Appends a token to each sequence of a step, and writes the guesses at the tokens after it.

        Returns:
            float32 [rows, vocab], the logits after each.
        """
        return self._decoded(self._native.embed(tokens), step)

    def _decoded(self, hidden: torch.Tensor, step: StepContext) -> torch.Tensor:
        """The logits of a step, float32 [rows, vocab], whose first layer reads `hidden`, bf16 [1, rows, H]."""
        self._configure(step.policy, step.study.compensators_in_ram)
        self._count_choices(step)
        rows = hidden.shape[1]
        places = [(each, each.length + i) for each, _, own in step.kv.spans for i in range(own)]
        rotations = self._rotations.of(hidden, [at for each in step.step.segments for at in each.positions])
        of_step = self._native.begin(hidden, rotations, places)
        highest, count, predicted = step.policy.ahead[0], len(self._experts), set[int]()
        place = Place(0, 0)
        while place.layer < count:
            ahead = highest if self._runtime.source.looks_ahead else 0
            end = place.layer + 1 if step.experts.predicting else count
            begun, place = place, self._native.run(of_step, place, end, ahead)
            done, chosen = self._computed(begun, place)
            trace = self._native.trace[:, :, :rows].tolist()
            if done:
                self._count_hits(step, done, trace)
            if ahead:
                predicted.update(self._native.following[layer] for layer in done)
                self._count_predictions(step, predicted & {*done, *chosen}, trace)
            if place.layer < end:
                place = self._finish(step, place, hidden, trace, ahead)
        if self._routed and step.policy.settings.priced:
            step.use.add_damage(step.policy.damage, *self._native.choices_of(self._routed, rows))
        if step.remapping:
            count_remapped(self._native, self._routed, step)
        if self._choices and step.record.choices:
            step.record.choices.merge(self._choices)
        step.keep_states(hidden[0])
        return self._native.head(hidden)

    def _count_choices(self, step: StepContext) -> None:
        """Makes the kernel count the choices of this step, where its record wants them."""
        if (step.record.choices is None) != (self._choices is None):
            shape = len(self._experts), self._runtime.experts
            self._choices = None if step.record.choices is None else ChoiceCounts(*shape)
            counted = (self._choices.counts, self._choices.mass) if self._choices else (None, None)
            self._native.count_into(*counted)
        if self._choices:
            self._choices.clear()

    def _computed(self, start: Place, place: Place) -> tuple[list[int], list[int]]:
        """Layers that a call has computed with their experts, and the layer whose experts it has only chosen."""
        places, passed = self._experts_at, list[int]()
        for layer in range(start.layer, min(place.layer + 1, len(places))):
            at = places[layer]
            before = at < 0 or (layer == start.layer and at < start.operation)
            if not before and (layer < place.layer or at <= place.operation):
                passed.append(layer)
        if passed and (passed[-1], places[passed[-1]]) == place:
            return passed[:-1], passed[-1:]
        return passed, []

    def _finish(
        self,
        step: StepContext,
        place: Place,
        hidden: torch.Tensor,
        trace: list[list[list[list[int]]]],
        ahead: int,
    ) -> Place:
        """Computes the operation at which the kernel stopped. Returns the one after it."""
        layer, rows = place.layer, hidden.shape[1]
        operation = self._native.programs[layer].operations[place.operation]
        buffers, size = self._native.buffers, hidden.shape[2]
        if isinstance(operation, Call):
            read = hidden if operation.input == HIDDEN else buffers.rows_of(operation.input, rows, size)
            buffers.rows_of(operation.output, rows, operation.cols).copy_(operation.function(step, read))
        else:
            normed = self._normed[rows - 1]
            following = self._native.following[layer] if ahead else 0
            predicted = (trace[following][PREDICTED], trace[following][WANTED]) if following else None
            add_to = hidden if operation.output == HIDDEN else None
            out = self._compute_experts(step, layer, normed, trace[layer], predicted, add_to)
            if add_to is None:
                buffers.rows_of(operation.output, rows, size)[0].copy_(out)
        last = place.operation + 1 == len(self._native.programs[layer].operations)
        return Place(layer + 1, 0) if last else Place(layer, place.operation + 1)

    def _compute_experts(
        self,
        step: StepContext,
        layer: int,
        normed: torch.Tensor,
        trace: list[list[list[int]]],
        predicted: Predicted | None,
        add_to: torch.Tensor | None,
    ) -> torch.Tensor:
        """Computes a layer's chosen experts, which are brought into memory; as ExpertLayer.forward."""
        rows, settings, experts = len(normed), step.policy.settings, self._experts[layer]
        assert experts
        levels, gates = torch.tensor(trace[WANTED]), self._native.gates[layer, :rows]
        compensated = settings.compensation.of_tokens(gates) if settings.compensation else None
        step.record.active[self._numbers[layer]] = len(set(_flat(trace[CHOSEN])))
        if step.study.watch:
            step.study.watch(layer, torch.tensor(trace[CHOSEN]))
        if 0 in settings.levels:
            gates = without_skipped(gates, levels, renormalise=settings.renormalise)
        if rows == 1:
            flags = compensated[0].tolist() if compensated is not None else ()
            assignments = Assignments.of_token(trace[CHOSEN][0], trace[WANTED][0], gates, flags)
        else:
            assignments = Assignments.of(torch.tensor(trace[CHOSEN]), levels, gates, compensated)
        return experts.forward(step, normed, assignments, add_to, predicted, experts.next_logits(normed))

    def _count_hits(self, step: StepContext, layers: list[int], trace: list[list[list[list[int]]]]) -> None:
        """Counts experts that the kernel computed."""
        settings, used, computed = step.policy.settings, [], list[tuple[int, int, int]]()
        for layer in layers:
            parts = [_flat(trace[layer][row]) for row in (CHOSEN, WANTED, COMPUTED)]
            keys, highest = self._keys[layer], dict[int, int]()
            for (expert, level, at), pairs in Counter(zip(*parts, strict=True)).items():
                computed.append((level, at, pairs))
                if level > highest.get(expert, 0):
                    highest[expert] = level
            used.append([(keys[expert], level) for expert, level in highest.items()])
            step.record.active[self._numbers[layer]] = len(set(parts[0]))
            if step.study.watch:
                step.study.watch(layer, torch.tensor(trace[layer][CHOSEN]))
        step.use.add(computed)
        compensated = self._count_compensated(step, layers, trace) if settings.compensation else ()
        scan = step.scans and all(is_scan(len(experts), self._runtime.experts) for experts in used)
        step.experts.count_hits(used, scan=scan, compensated=compensated)

    def _count_compensated(
        self, step: StepContext, layers: list[int], trace: list[list[list[list[int]]]]
    ) -> list[ExpertKey]:
        """Counts the compensators that the kernel used, and returns their experts, in the order of their layers."""
        compensation, compensators = step.policy.settings.compensation, step.study.compensators
        used = dict[ExpertKey, None]()
        assert compensation
        if compensators is None:
            return []
        places = slice(compensation.first, compensation.end)
        for layer in layers:
            rows = zip(*(trace[layer][array] for array in (CHOSEN, WANTED, COMPUTED)), strict=True)
            pairs = Counter(
                (expert, wanted)
                for row in rows
                for expert, wanted, level in zip(*(values[places] for values in row), strict=True)
                if level == compensators.level
            )
            for (expert, _), count in pairs.items():
                if bits := compensators.bits_of(layer, expert):
                    step.use.add_compensated(bits, count)
                    used[self._keys[layer][expert]] = None
        return list(used)

    def _count_predictions(
        self, step: StepContext, layers: set[int], trace: list[list[list[list[int]]]]
    ) -> None:
        """Compares the experts that the kernel predicted for layers with the chosen ones."""
        taken, rows = step.policy.taken, ((layer, trace[layer]) for layer in sorted(layers) if layer)
        step.experts.count_predictions(
            [
                (layer, _distinct([taken(layer, each) for each in row[PREDICTED]]), _distinct(row[CHOSEN]))
                for layer, row in rows
            ]
        )


def _flat(rows: Sequence[Sequence[int]]) -> Sequence[int]:
    return rows[0] if len(rows) == 1 else [value for row in rows for value in row]


def _distinct(rows: Sequence[Sequence[int]]) -> list[int]:
    return list(dict.fromkeys(_flat(rows)))
