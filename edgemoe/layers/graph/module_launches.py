"""The launches of a new token through transformers' own modules, for layers that have no kernels of their own.

    begin        memory.token, memory.position ─► memory.hidden, and the arguments of every layer
    layer        memory.hidden ─ a decoder layer, in the middle of which the experts are launched ─► memory.hidden
    end          memory.hidden ─ norm ─ head ─► memory.outcome; the next token ─► memory.state

The model's loop over its layers runs twice without its layers (layers.resumable): at the beginning, to learn with which
arguments each layer is called, and at the end. A layer's router and experts meet in `_routed`: it writes the report,
lets the experts be launched, and sums their rows. Where the host brings a layer's experts, the capture of the layer is
cut there, into the launch of its report and the launch of what follows its experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from edgemoe.experts.launched import launching
from edgemoe.experts.layer import ExpertLayer
from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.layers.graph.base import Launch, nothing
from edgemoe.layers.graph.module_memory import ModuleMemory
from edgemoe.layers.graph.static_kv import StaticKV, latents_alone
from edgemoe.layers.indexed import indexers
from edgemoe.layers.resumable import Call, Pass, ResumableLayer, running
from edgemoe.machine.device import Device


class ModuleLaunches:
    """Launches of a model's modules, which read and write the places of one ModuleMemory.

    Between two layers the state is memory.hidden alone.

    Args:
        device: Computes the launches.
        model: Model of layers.build that `why_not` finds no fault in.
        shape: Shape of a sequence's KV.
        kernel: TritonExpertKernel of the model's experts.
        memory: Memory of the launches.

    Attributes:
        moe, reports, experts, rests: As in base.Launches.

    Raises:
        Exception: An operator of the model cannot be captured.
    """

    def __init__(self, device: Device, model: Any, shape: KVShape, kernel: Any, memory: ModuleMemory) -> None:
        self._device, self._model, self._kernel, self._memory = device, model, kernel, memory
        self._blocks = list(model.model.layers)
        experts = [experts_of(block) for block in self._blocks]
        self.moe = [layer for layer, each in enumerate(experts) if each]
        first = experts[self.moe[0]]
        self._activation = first.activation
        if memory.biases:
            apply, (up, _) = first.activation.apply, memory.biases
            self._activation = Activation(CUSTOM, lambda products: apply(products + up))
        self._kv = StaticKV(shape, memory.state, memory.states)
        # Until a token begins, launches write the first row of this sequence.
        sequence = SequenceKV(shape, 1, device.place)
        memory.begin_token(sequence, 0)
        with torch.inference_mode():
            self._calls = self._fixed(self._calls_now())
            self._try_all()
            pieces = [
                device.capture_pieces(partial(self._report, layer), self)
                for layer in range(len(self._blocks))
            ]
            self.reports: list[Launch] = [first for first, *_ in pieces]
            self.rests: list[Launch] = [(rest or [nothing])[0] for _, *rest in pieces]
            # A pool of their own: they run between the pieces of a layer, whose tensors theirs must not overwrite.
            self.experts = [
                device.capture(partial(self._launch_table, table), memory) for table in range(memory.slots)
            ]
            device.await_computed()
        del sequence

    def begin(self) -> None:
        """Launches the embedding of the memory's token, and the arguments of every layer."""
        now = tree_leaves(self._calls_now())
        for at, tensor in self._changing.items():
            tensor.copy_(now[at])

    def layer(self, layer: int, experts: Launch, *, predicts: bool = False) -> None:
        """Launches a layer.

        Args:
            layer: Its number in the model.
            experts: Launches the experts of the report that lies in memory.reporting, into memory.rows.
            predicts: Whether the report predicts the next layer's experts; else it has the layer's own in their place.
        """
        memory, (args, kwargs) = self._memory, self._calls[layer]
        with launching(partial(self._routed, experts, predicts)), latents_alone(self._blocks[layer]):
            memory.hidden.copy_(self._blocks[layer](memory.hidden[None, None], *args, **kwargs).reshape(-1))

    def compute(self) -> None:
        """Launches the experts of the memory's items."""
        memory = self._memory
        self._kernel.launch_rows(memory.items, memory.normed, self._activation, memory.inner, memory.products)
        if memory.biases:
            torch.add(memory.products, memory.biases[1], out=memory.rows)

    def end(self) -> None:
        """Launches the norm, the head and the choice of the next token."""
        memory = self._memory
        with self._without_layers(Pass(result=memory.hidden[None, None])):
            logits = self._model(**self._inputs()).logits.view(-1)
        memory.choose(logits)

    def _inputs(self) -> dict[str, Any]:
        memory = self._memory
        tokens, positions = memory.token[None], memory.position[None]
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "past_key_values": self._kv,
            "use_cache": True,
            "kv": self._kv,
        }

    def _calls_now(self) -> list[Call]:
        """Launches what precedes the layers; returns each layer's arguments."""
        run = Pass()
        with self._without_layers(run):
            self._model.model(**self._inputs())
        assert run.start is not None
        self._memory.hidden.copy_(run.start.view(-1))
        return run.calls

    @contextmanager
    def _without_layers(self, run: Pass) -> Iterator[None]:
        """Puts modules in the places of the layers that compute nothing, within the block."""
        layers, last = self._model.model.layers, len(self._blocks) - 1
        for number, block in enumerate(self._blocks):
            layers[number] = ResumableLayer(block, last=number == last)
        try:
            with running(run):
                yield
        finally:
            for number, block in enumerate(self._blocks):
                layers[number] = block

    def _changes(self, argument: Any) -> bool:
        """Whether an argument of a layer differs from token to token: a window is a single number on the host."""
        tensor = isinstance(argument, torch.Tensor) and argument.device == self._device.place
        return tensor and argument.dim() > 0

    def _fixed(self, calls: list[Call]) -> list[Call]:
        """Arguments of all layers at fixed addresses; a tensor that several layers take has one."""
        leaves, form = tree_flatten(calls)
        self._changing: dict[int, torch.Tensor] = {}
        """Arguments that differ from token to token, by the place of the first one of their leaves."""
        first: dict[int, int] = {}
        for at, leaf in enumerate(leaves):
            if self._changes(leaf) and first.setdefault(id(leaf), at) == at:
                self._changing[at] = leaf.clone()
        fixed = [self._changing[first[id(leaf)]] if id(leaf) in first else leaf for leaf in leaves]
        made: list[Call] = tree_unflatten(fixed, form)
        return made

    def _try_all(self) -> None:
        """Launches everything twice, the second time where torch refuses to wait, so that a capture will not fail."""
        self._run_all()
        with self._device.without_waits():
            self._run_all()

    def _run_all(self) -> None:
        self.begin()
        for layer in range(len(self._blocks)):
            self.layer(layer, nothing, predicts=True)
        self.end()

    def _report(self, layer: int, cut: Launch) -> None:
        memory = self._memory

        def report() -> None:
            memory.reported.copy_(memory.reporting, non_blocking=True)
            cut()

        self.layer(layer, report, predicts=True)

    def _routed(
        self,
        experts: Launch,
        predicts: bool,
        layer: ExpertLayer,
        hidden: torch.Tensor,
        choice: torch.Tensor,
        gates: torch.Tensor,
    ) -> torch.Tensor:
        """Takes the place of ExpertLayer.routed: bf16 [1, H] of a state bf16 [1, H]."""
        from edgemoe.kernels.triton.choice import report_choice, weighted_rows

        memory, predicted = self._memory, choice[0]
        if predicts and (logits := layer.next_logits(hidden)):
            predicted = logits().float().topk(memory.slots).indices[0]
        memory.normed.copy_(hidden[0])
        report_choice(choice[0].contiguous(), gates[0].contiguous(), predicted.contiguous(), memory.reporting)
        if layer.biases and memory.biases:
            for bias, of_slots in zip(layer.biases, memory.biases, strict=True):
                of_slots.copy_(bias[memory.reporting[: memory.slots].long()])
        experts()
        summed = torch.empty_like(memory.normed)
        weighted_rows(memory.rows, memory.gates, summed)
        return summed[None]

    def _launch_table(self, table: int) -> None:
        self._memory.send_table(table)
        self.compute()


def experts_of(block: Any) -> Any:
    """The ExpertLayer of a decoder layer; None: it has none."""
    return next((module.edgemoe for module in block.modules() if hasattr(module, "edgemoe")), None)


def why_not(model: Any, shape: KVShape) -> str | None:
    """Why the launches of a model's modules cannot be captured, as far as that is known before they are tried.

    Returns:
        a clause for a message; None: nothing is known against it.
    """
    layers = [each for each in map(experts_of, model.model.layers) if each]
    if shape.index or indexers(model):
        return "an index chooses the tokens that it attends to"
    if RotaryLengths.of(model.config.to_dict()):
        return "its rotary factors depend on a sequence's length"
    if len({type(each.biases) for each in layers}) > 1:
        return "only some of its experts have biases"
    return None
