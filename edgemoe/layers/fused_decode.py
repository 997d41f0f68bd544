"""A single token's way through decoder layers: one call of the kernel as far as every expert it wants is held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from edgemoe.kernels.native.decode_layers import NativeLayers
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.kv.sequence import StepKV
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gqa import PlainAttention, room
from edgemoe.layers.router import SoftmaxRouter


class NewTokenLayers:
    """Stands in the place of consecutive decoder layers' `forward`s, and hands them every step but those of a token.

    The first of them that is called takes the token through all, the others pass it on.

    Args:
        layers: norm, attention, residual, norm, experts, residual; each one's attention is a PlainAttention, and
            they get one mask and one rotation.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._first = layers[0].self_attn.layer
        self._blocks = [layer.mlp for layer in layers]
        self._routers = [_router(layer) for layer in layers]
        self._experts = [
            layer.mlp.experts.edgemoe.of_one_token if router else None
            for layer, router in zip(layers, self._routers, strict=True)
        ]
        """Each layer's, where its router and they are all of its block."""
        self._runner = next((e.runner for e in self._experts if e), None)
        self.asked = False
        """Whether the model's own code has said what these layers' attention sees (`_window`)."""
        self._window: int | None = None
        self._parts = [self._part(i, layer) for i, layer in enumerate(layers)]
        self._native = NativeLayers(self._parts)
        for layer in layers:
            layer.forward = partial(self._forward, layer.self_attn.layer, layer.forward)

    @classmethod
    def place(cls, layers: Sequence[Any], kinds: Sequence[str]) -> list[NewTokenLayers]:
        """Before every layer whose parts are all of edgemoe's kernel.

        Args:
            layers: a model's.
            kinds: each one's kind of attention.
        """
        marked = [(_fits(layer), kind) for layer, kind in zip(layers, kinds, strict=True)]
        together = groupby(range(len(marked)), marked.__getitem__)
        return [cls([layers[i] for i in some]) for (fits, _), some in together if fits]

    def __len__(self) -> int:
        """Layers."""
        return len(self._blocks)

    def _part(self, index: int, layer: Any) -> Any:
        before, behind = (
            (norm.weight.data, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        experts = self._experts[index]
        held = experts.held if experts else None
        return layer.self_attn.layer_with(before, behind, self._routers[index], held)

    def _forward(self, layer: int, forward: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """transformers' interface of a decoder layer: bf16 [1, rows, H] -> the same; a single token's is changed."""
        kv: StepKV = kwargs["past_key_values"]
        if hidden_states.shape[1] > 1 or kv.state.signal:
            passed: torch.Tensor = forward(hidden_states, **kwargs)
            return passed
        if kv.state.passed > layer:
            return hidden_states
        hidden, window = hidden_states.contiguous(), kwargs.get("attention_mask")
        self._window, self.asked = None if window is None else int(window), True
        end = layer + 1 if kv.state.one_by_one else self._first + len(self)
        self._pass(range(layer, end), hidden, kwargs["position_embeddings"], kv)
        return hidden

    def __call__(self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], kv: StepKV) -> None:
        """Takes a single token through all of these layers, once they were asked.

        Args:
            hidden: bf16 [1, 1, H], contiguous; changed in place.
            rotation: cosine and sine for its position.
            kv: of its step.
        """
        self._pass(range(self._first, self._first + len(self)), hidden, rotation, kv)

    def _pass(
        self, layers: range, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], kv: StepKV
    ) -> None:
        kv.state.scores = None
        (sequence, _, _), first = kv.spans[0], self._first
        for experts in self._experts:
            if experts:
                experts.renew()
        at, end = layers.start, layers.stop
        while at < end:
            come = range(at - first, end - first)
            stopped = first + self._native.run(come, hidden, rotation, *room(sequence, at, self._window))
            if stopped > at and self._runner:
                self._count()
            if stopped < end:
                self._compute(stopped - first, hidden)
            at = stopped + 1
        kv.state.passed = end

    def _count(self) -> None:
        """What was computed without anybody here seeing it."""
        assert self._runner
        computed, level = self._native.take_computed(), self._runner.policy.uniform
        assert level
        self._runner.source.count_held([level] * sum(computed.values()))
        self._runner.use.held_at(computed, scheduled=level)

    def _compute(self, index: int, hidden: torch.Tensor) -> None:
        """Adds what lies behind a layer's norms to hidden."""
        normed, router, experts = self._parts[index].normed, self._routers[index], self._experts[index]
        if router and experts:
            experts(normed, router.chosen, router.shares, hidden)
        else:
            hidden += self._blocks[index](normed[None])


def _fits(layer: Any) -> bool:
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return isinstance(layer.self_attn, PlainAttention) and all(type(norm) is DenseNorm for norm in norms)


def _router(layer: Any) -> NativeRouter | None:
    """Of a layer's block, where routed experts are all that this has."""
    router = getattr(getattr(layer.mlp, "gate", None), "forward", None)
    if isinstance(router, SoftmaxRouter) and _is_router_and_experts(layer.mlp):
        return router.choose
    return None


def _is_router_and_experts(block: Any) -> bool:
    """Whether a block gives what its experts make of what its router chose, and nothing else: it is asked.

    Of a single token; the experts are called with the token as it is.
    """
    if block.experts.edgemoe.of_one_token is None:
        return False
    both = torch.randn(2, 1, block.gate.weight.shape[1], generator=torch.Generator().manual_seed(0))
    x, result = both.bfloat16().unbind()
    given = []

    def experts(*args: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        given.append([tensor.clone() for tensor in (*args, *more.values())])
        return result

    block.experts.forward = experts
    try:
        out = block(x[None])
    finally:
        del block.experts.forward
    _, shares, best = block.gate(x)
    want = x, best, shares
    if len(given) != 1 or len(given[0]) != len(want) or not isinstance(out, torch.Tensor):
        return False
    return torch.equal(out, result[None]) and all(
        torch.equal(*pair) for pair in zip(given[0], want, strict=True)
    )
