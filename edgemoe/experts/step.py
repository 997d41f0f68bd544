"""A step on its way through the layers: its context, and the record that it leaves.

The scheduler makes a context for each step (Engine.begin), the step owns it, and whatever the step counts, predicts or
chooses is in it. Another step may therefore run between two layers of this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch

from edgemoe.experts.records import StepRecord
from edgemoe.experts.use import ChoiceCounts, ExpertUse
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.compensators import Compensators
from edgemoe.kernels.device_compensators import AnyCompensators
from edgemoe.kernels.torch_rules import rows_alike
from edgemoe.kv.pictures import StepRows
from edgemoe.kv.step import Step, StepKV
from edgemoe.policy.importance import attention_kind, needs_attention
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.remapping import Remapping, changed_pairs
from edgemoe.prefetch.base import ExpertSource, StepExperts

Reroute = Callable[[int, torch.Tensor, int], torch.Tensor]
"""Layer, logits [T, E] that order experts as its router does, and k -> experts, int64 [T, k], the likeliest first."""


@dataclass(frozen=True)
class Routed:
    """A router's choice for the rows of a step.

    Args:
        hidden: bf16 [T, H], its input, where the model is.
        choice: int64 [T, k], experts.
        gates: [T, k], their gate weights, 0 where an expert is skipped.
        ranks: float [T], PromptAttention.ranks; None where the settings do not depend on attention.
    """

    hidden: torch.Tensor
    choice: torch.Tensor
    gates: torch.Tensor
    ranks: torch.Tensor | None


class MeasuredLayer(Protocol):
    """The experts of a layer, as far as a probe uses them."""

    layer: int
    """Index of the layer in the model."""

    def apply(self, x: Rows, parts: Sequence[Part], experts: Sequence[int], out: torch.Tensor) -> None:
        """Computes the parts' rows [R, H] (ExpertLayer.apply)."""

    def inner(self, expert: int, products: torch.Tensor) -> torch.Tensor:
        """Computes what an expert's second matrix is given (ExpertLayer.inner)."""


class ExpertProbe:
    """Measures experts in steps of several rows. A probe overrides what it needs; by itself it measures nothing."""

    def computed(
        self,
        layer: MeasuredLayer,
        x: Rows,
        parts: Sequence[Part],
        experts: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Takes the rows of some experts: inputs, and outputs [R, H] before their gate weights."""

    def routed(self, layer: int, routing: Routed, out: torch.Tensor) -> None:
        """Takes what a layer's router has chosen, and the sum [T, H] of its experts, which it may change."""


@dataclass(frozen=True)
class Study:
    """Measurements and changes in the steps of a study.

    Args:
        probe: measures experts; None: nothing is measured.
        reroute: chooses the experts; None: the routers choose.
        compensators: compensators of the experts; None: the experts have none.
        policy: chooses levels in place of the settings' rules; None: these do.
        modules: new tokens take transformers' modules: a rule that compiled code does not have holds there.
        choices: the record counts how often the routers choose each expert.
        watch: called with each layer and its router's choice, int64 [T, k]; None: nothing is called.
    """

    probe: ExpertProbe | None = None
    reroute: Reroute | None = None
    compensators: AnyCompensators | None = None
    policy: LevelPolicy | None = None
    modules: bool = False
    choices: bool = False
    watch: Callable[[int, torch.Tensor], None] | None = None

    @property
    def compensators_in_ram(self) -> Compensators | None:
        """The compensators, as far as they lie in RAM."""
        return self.compensators if isinstance(self.compensators, Compensators) else None

    def joined(self, other: Study) -> Study:
        """Returns this study with what another one adds or replaces."""
        return Study(
            other.probe or self.probe,
            other.reroute or self.reroute,
            other.compensators or self.compensators,
            other.policy or self.policy,
            other.modules or self.modules,
            other.choices or self.choices,
            other.watch or self.watch,
        )


class StepContext:
    """The state of one step while it passes through the model's layers. It ends with the step.

    Engine.begin makes it. No later step uses it.

    Args:
        source: brings the step's experts.
        step: the segments of sequences that the step computes.
        policy: chooses the level of each expert. It stays the same for the whole step, even if the engine is
            configured again while the step runs.
        study: the measurement of the step, or the changes made to it.
        all_rows: whether the step computes the logits of every row; otherwise only of each segment's last row.
        choices: counts the routers' choices; None: they are not counted.
        states_kept: most of each segment's last rows whose states `states` has.

    Raises:
        ContextExceeded: a sequence's context is too small.

    Attributes:
        kv: the step's keys and values, and the attention that its tokens receive.
        experts: the step's requests, predictions and transfers.
        decode: the rows are new tokens, each judged alone.
        record: the counts of the step; complete once it has ended.
        logits: float32 [segments or rows, vocab], in RAM, once it has ended.
        states: bf16 [rows, H] for each segment, in RAM, once it has ended: the states of its last rows after the last
            layer, before the model's last norm. Empty where none are kept, or where no path on a CPU has run.
        rerouted: int64 [T, k], the experts that a router chose before its choice was made again, where the model is,
            from the router to its layer's experts; None: the choice is the router's.
        picture_rows: rows of pictures, once the step has its inputs; None: it has no such rows.
    """

    def __init__(
        self,
        source: ExpertSource,
        step: Step,
        policy: LevelPolicy,
        study: Study,
        *,
        all_rows: bool = False,
        choices: ChoiceCounts | None = None,
        states_kept: int = 0,
    ) -> None:
        self.step, self.policy, self.study = step, policy, study
        self.all_rows, self.decode = all_rows, step.decodes
        settings, signal = policy.settings, None
        ranked = len(settings.scheduled) > 1 and not settings.priced
        if ranked and not self.decode and needs_attention(settings.importance):
            signal = attention_kind(settings.importance)
        self.kv = StepKV(step, signal=signal)
        self.experts: StepExperts = source.begin()
        size, counts = (len(step.segments), step.rows), self.experts.counts
        self.record = StepRecord(step.decodes, *size, transfers=counts, choices=choices, drafted=step.drafts)
        self.logits: torch.Tensor | None = None
        self.states, self._states_kept = list[torch.Tensor](), states_kept
        self.rerouted: torch.Tensor | None = None
        self.picture_rows: StepRows | None = None

    @property
    def use(self) -> ExpertUse:
        """The levels at which the step's experts have been computed so far."""
        return self.record.use

    @property
    def remapping(self) -> Remapping | None:
        """How the tokens of the step agree on experts; None: it has one token, or a prompt's, or each token chooses."""
        return self.policy.settings.remapping if self.decode and len(self.step.segments) > 1 else None

    @property
    def scans(self) -> bool:
        """Whether experts of a layer that wants most of them leave first: in prompts, and for several sequences."""
        return self.policy.settings.scan == "on" and (not self.decode or len(self.step.segments) > 1)

    @property
    def parts(self) -> list[slice]:
        """The rows of each segment, for which levels are chosen together: a prompt's, or all new tokens."""
        if self.decode:
            return [slice(0, self.step.rows)]
        return [slice(row, row + rows) for _, row, rows in self.kv.spans]

    def keep_states(self, hidden: torch.Tensor) -> None:
        """Takes the states of all rows after the last layer, [rows, H], and keeps the last ones of each segment."""
        most = self._states_kept
        if most:
            parts = [hidden[max(row, row + rows - most) : row + rows] for _, row, rows in self.kv.spans]
            # A view would keep the rows of the other segments, and all rows of a long prompt.
            self.states = [part.clone() if len(part) < self.step.rows else part for part in parts]

    def take_rerouted(self) -> torch.Tensor | None:
        """Returns `rerouted`, which is None from now on."""
        rerouted, self.rerouted = self.rerouted, None
        return rerouted

    def note_choice(
        self, layer: int, choice: torch.Tensor, gates: torch.Tensor, own: torch.Tensor | None = None
    ) -> None:
        """Counts the choice of a layer's router, in RAM.

        Args:
            layer: index of the layer in the model.
            choice: int64 [T, k], experts.
            gates: [T, k], their gate weights.
            own: int64 [T, k], `rerouted` in RAM; None: the choice is the router's.
        """
        if own is not None:
            self.use.add_remapped(own.unique().numel(), choice.unique().numel(), changed_pairs(own, choice))
        self.record.active[layer] = len(choice.unique())
        if self.study.watch:
            self.study.watch(layer, choice)
        if self.record.choices:
            self.record.choices.add(layer, choice, gates)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the step that modules compute in the block (`current_step`), with its rules of exactness."""
        token = _CURRENT.set(self)
        try:
            with rows_alike(self.policy.settings.exact):
                yield
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[StepContext] = ContextVar("step")


def current_step() -> StepContext:
    """Returns the step whose layer is being computed.

    transformers' blocks pass no argument on to routers and experts: these find their step here.

    Raises:
        LookupError: no step's layer is being computed.
    """
    return _CURRENT.get()
