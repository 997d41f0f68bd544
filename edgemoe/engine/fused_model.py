"""A single token's way through a whole model whose layers are all NewTokenLayers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.kv.sequence import StepKV
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.fused_decode import NewTokenLayers


class NewTokenModel:
    """What a plain model's `forward` does, without what it spends around the layers.

    Args:
        model: embedding, layers, norm and head (Family.plain_attention).
        layers: all of its layers, in their order.
    """

    def __init__(self, model: Any, layers: Sequence[NewTokenLayers]) -> None:
        self._embedding, self._rotary = model.model.embed_tokens.forward, model.model.rotary_emb.forward
        self._norm, self._head = model.model.norm.forward, model.lm_head.forward
        self._layers = layers

    @classmethod
    def like(cls, model: Any, layers: Sequence[NewTokenLayers]) -> NewTokenModel | None:
        """One for a model with these layers, if they are all it has."""
        kinds = type(model.model.embed_tokens), type(model.model.norm), type(model.lm_head)
        if sum(map(len, layers)) < len(model.model.layers) or kinds != (
            DenseEmbedding,
            DenseNorm,
            DenseLinear,
        ):
            return None
        return cls(model, layers)

    @property
    def ready(self) -> bool:
        """Whether the model's own code has taken a token through every layer, and said what its attention sees."""
        return all(layers.asked for layers in self._layers)

    def __call__(self, token: int, kv: StepKV) -> torch.Tensor:
        """Logits after a step's only token, float32 [1, V], once it is ready."""
        hidden = self._embedding(torch.tensor([[token]]))
        rotation = self._rotary(hidden, torch.tensor([[kv.spans[0][0].length]]))
        for layers in self._layers:
            layers(hidden, rotation, kv)
        logits: torch.Tensor = self._head(self._norm(hidden))[0].float()
        return logits
