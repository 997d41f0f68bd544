"""Random dense tensors of a model of any family, named by transformers' modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from edgemoe.families.base import Family
from edgemoe.layers.dense_tensors import dense_parameters
from edgemoe.storage.files.header import Spec
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.dense import quantize_rows
from edgemoe.storage.store.manifest import SCALE_SUFFIX

_NUMBERS = 1 << 22
"""Random numbers that all dense weights are made of; embeddings and heads repeat them most often."""


class RandomDense:
    """The dense tensors of a model: their types and shapes, and random values.

    Norms and gains are 1, biases 0, embeddings have variance 1, and other matrices variance 1 / inputs, less at
    attention's output in deep models, as in workload.random_dense. Rows of routers are scaled by a lognormal of
    sigma .35, so that some experts are used far more than others.

    Args:
        model: transformers' modules on the meta device, without experts (layers.skeleton).
        family: the model's family.
        bits: one of DENSE_BITS, for matrices that may have so few; 16 for all others and for routers.
    """

    def __init__(self, model: Any, family: Family, bits: int) -> None:
        tied = model.config.tie_word_embeddings
        self._shapes: dict[str, tuple[tuple[int, ...], int]] = {}
        for name, shape, kinds in dense_parameters(model):
            own = bits if "I8" in kinds and not family.is_router(name) else 16
            if own < 8 and (dense_shapes.DTYPE not in kinds or family.keeps_rows(name)):
                own = 8
            if not (tied and name == "lm_head.weight"):
                self._shapes[name] = shape, own
        self._routers = {name for name in self._shapes if family.is_router(name)}
        self._layers = model.config.num_hidden_layers
        self._pool = torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(0))

    def specs(self) -> dict[str, Spec]:
        """Name -> (element type, shape) of every tensor, in order."""
        found: dict[str, Spec] = {}
        for name, (shape, bits) in self._shapes.items():
            if bits < 8:
                found[name] = (dense_shapes.DTYPE, dense_shapes.stored_shape(shape, bits))
            elif bits == 8:
                found |= {name: ("I8", shape), name + SCALE_SUFFIX: ("BF16", shape[:1])}
            else:
                found[name] = ("BF16", shape)
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of `specs` one at a time."""
        for name, (shape, bits) in self._shapes.items():
            value = self._value(name, shape)
            if bits < 8:
                yield name, dense_groups.quantize_groups(value.to(torch.bfloat16), bits)
            elif bits == 8:
                codes, scales = quantize_rows(value)
                yield from ((name, codes), (name + SCALE_SUFFIX, scales))
            else:
                yield name, value.to(torch.bfloat16)

    def _value(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("bias") or name.endswith("sinks"):
            return torch.zeros(shape)
        if len(shape) < 2:
            return torch.ones(shape)
        count = torch.Size(shape).numel()
        start = xxhash.xxh3_64_intdigest(name.encode()) % _NUMBERS
        numbers = self._pool.roll(-start).repeat(-(-count // _NUMBERS))[:count].view(shape)
        value = numbers * (1.0 if "embed" in name else shape[-1] ** -0.5)
        if name.endswith(("o_proj.weight", "out_proj.weight")):
            value *= 2 * self._layers**-0.5
        if name in self._routers:
            random = torch.Generator().manual_seed(start)
            value *= torch.empty(shape[0], 1).log_normal_(0, 0.35, generator=random)
        return value
