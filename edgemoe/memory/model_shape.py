"""The sizes of a model that its memory depends on."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.kv.shape import KVShape


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a memory plan depends on, in elements unless named bytes."""

    layers: int
    experts: int
    """Over all layers."""
    experts_per_layer: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    """Of queries."""
    kv: KVShape
    widest: int
    """Largest side of a dense matrix, except matrices with a row per word of the vocabulary."""
    vocab: int
    dense_bytes: int
    compiled_attention: bool = False
    """Whether the compiled kernel computes attention: it reads keys and values where they lie."""
