"""A model's decoder layers one after another, with a pause after each, under the control of the caller.

transformers' models call their layers in a loop of their own. `LayerByLayer` lets that loop run twice without computing
a layer: first to learn with which arguments each layer is called, and, after the layers, to compute what follows them.

    first run     embedding ─ (arguments of each layer) ─ norm
    layers        layer 0 ─ pause ─ layer 1 ─ pause ─ … ─ layer n
    second run    embedding ─ (the state after layer n) ─ norm ─ head

What is computed twice is the embedding of the rows and the norm after the layers, less than a hundredth of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from edgemoe.families.meta_model import carried_by

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a layer after its first one, the state: positional and named."""


@dataclass
class Pass:
    """A run of a model's loop over its layers that computes no layer.

    Args:
        result: the state [1, rows, H] after all layers, which the last layer returns; None: layers return their input.

    Attributes:
        start: the first layer's input, [1, rows, H].
        calls: the arguments of each layer.
    """

    result: torch.Tensor | None = None
    start: torch.Tensor | None = None
    calls: list[Call] = field(default_factory=list)


_PASS: ContextVar[Pass | None] = ContextVar("pass", default=None)


class ResumableLayer(nn.Module):
    """Stands in the place of a decoder layer: computes it, or takes part in a run that computes no layer.

    Args:
        module: transformers' decoder layer, which maps a state [1, rows, H] to the next one.
        last: it is the model's last layer.
    """

    def __init__(self, module: nn.Module, *, last: bool) -> None:
        super().__init__()
        self.module, self.last = module, last

    def __getattr__(self, name: str) -> Any:
        """The layer's own attributes: models read the kind of a layer's attention."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Maps the state as the layer does, unless the model's loop runs without its layers."""
        run = _PASS.get()
        if run is None:
            return self.module(hidden_states, *args, **kwargs)
        run.start = hidden_states if run.start is None else run.start
        run.calls.append((args, kwargs))
        state = run.result if self.last and run.result is not None else hidden_states
        return (state, None) if carried_by(self.module) else state


class LayerByLayer:
    """Runs a model's layers with a pause after each. Puts a ResumableLayer in the place of every decoder layer.

    Args:
        model: transformers' model, with `model.layers`.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._layers = model, list(model.model.layers)
        for number, layer in enumerate(self._layers):
            model.model.layers[number] = ResumableLayer(layer, last=layer is self._layers[-1])

    def run(
        self, inputs: Mapping[str, Any], ended: Callable[[torch.Tensor], None] = lambda state: None
    ) -> Generator[int, None, Any]:
        """Computes what the model computes, and yields the number of each layer once it is done.

        The caller may do other work, with the same model too, before it goes on.

        Args:
            inputs: named arguments of the model's `forward`.
            ended: called with the state [1, rows, H] after all layers.

        Returns:
            what `forward` returns.
        """
        first = Pass()
        self._without_layers(
            first, self._model.model, {k: v for k, v in inputs.items() if k != "logits_to_keep"}
        )
        hidden, calls = first.start, first.calls
        first.start = None
        before: dict[str, Any] = {}
        for number, (layer, (args, kwargs)) in enumerate(zip(self._layers, calls, strict=True)):
            hidden = layer(hidden, *args, **kwargs | before)
            if carried := carried_by(layer):
                hidden, before[carried] = hidden
            yield number
        assert hidden is not None
        ended(hidden)
        return self._without_layers(Pass(result=hidden), self._model, inputs)

    @staticmethod
    def _without_layers(run: Pass, module: nn.Module, inputs: Mapping[str, Any]) -> Any:
        with running(run):
            return module(**inputs)


@contextmanager
def running(run: Pass) -> Iterator[None]:
    """Makes every ResumableLayer take part in a run that computes no layer, within the block."""
    token = _PASS.set(run)
    try:
        yield
    finally:
        _PASS.reset(token)
