"""Tensors that llama.cpp's converter writes in another form than transformers has them, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from edgemoe.errors import ModelRefused
from edgemoe.storage.formats.base import Weight

Config = Mapping[str, Any]
Make = Callable[..., torch.Tensor]
"""(config, the file's tensors ...) -> transformers' tensor. Computes shapes on the meta device, too."""


@dataclass(frozen=True)
class Change:
    """One tensor of transformers that is made of some of a file's.

    Args:
        name: its name below the layer; outside of layers its whole name.
        parts: names of the file's tensors below the layer, or whole names outside of layers.
        make: computes it of the parts.
        by_expert: whether the first dimension of all parts counts experts, each of which is computed alone.
    """

    name: str
    parts: tuple[str, ...]
    make: Make
    by_expert: bool = False


class Changed(Weight):
    """A tensor that is computed of others when it is read.

    Args:
        config: the model's sizes.
        change: says how.
        sources: the tensors of `change.parts`, in their order.

    Raises:
        ModelRefused: their shapes do not fit each other, or the config.
    """

    def __init__(self, config: Config, change: Change, sources: Sequence[Weight]) -> None:
        self._sources, self._by_expert = sources, change.by_expert
        self._make = partial(change.make, config)
        counts = {source.shape[0] for source in sources} if change.by_expert else {1}
        try:
            if len(counts) > 1:
                raise ValueError(f"different numbers of experts, {sorted(counts)}")
            inner = [source.shape[1:] if change.by_expert else source.shape for source in sources]
            made = self._make(*(torch.empty(shape, device="meta") for shape in inner))
        except (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            found = ", ".join(f"{source.parts[0]} {list(source.shape)}" for source in sources)
            raise ModelRefused(
                f"tensors that {change.name} can be made of, with the sizes that the file names",
                f"{found} ({str(error).splitlines()[0][:120]})",
                "choose another file",
            ) from error
        self.shape = (*counts, *made.shape) if change.by_expert else tuple(made.shape)
        self.parts = tuple(part for source in sources for part in source.parts)
        whole = sum(prod(source.shape) for source in sources)
        self.nbytes = sum(source.nbytes for source in sources) * prod(self.shape) // whole

    def read(self) -> torch.Tensor:
        """Reads the tensor in its shape as float32."""
        if self._by_expert:
            return torch.stack([self.read_slice(index) for index in range(self.shape[0])])
        return self._make(*(source.read() for source in self._sources)).contiguous()

    def read_slice(self, index: int) -> torch.Tensor:
        """Reads tensor[index], of experts that expert alone."""
        if not self._by_expert:
            return self.read()[index]
        return self._make(*(source.read_slice(index) for source in self._sources)).contiguous()


class Scaled(Weight):
    """A tensor whose file has a second one with a factor for it, or for each of its experts, as NVFP4 files have.

    Args:
        weight: the tensor before it is multiplied by the factor.
        factors: float32 [1] or [E].
        expert: the expert that `weight` belongs to; None: it has one factor.
    """

    def __init__(self, weight: Weight, factors: Weight, expert: int | None) -> None:
        self._weight, self._factors, self._at = weight, factors, expert or 0
        self.shape, self.parts = weight.shape, (*weight.parts, *factors.parts)
        self.nbytes = weight.nbytes
        if self._at >= prod(factors.shape) or (expert is None and prod(factors.shape) != 1):
            raise ModelRefused(
                f"a factor for {weight.parts[0]} in {factors.parts[0]}",
                f"shape {list(factors.shape)}",
                "choose another file",
            )

    def read(self) -> torch.Tensor:
        """Reads the tensor in its shape as float32."""
        return self._weight.read() * self._factors.read().flatten()[self._at]


def minus_one(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """The weight of a norm that transformers adds 1 to."""
    return weight - 1


def log_of_negated(config: Config, decay: torch.Tensor) -> torch.Tensor:
    """The logarithm of a decay rate, which the file has as -exp(logarithm)."""
    return torch.log(-decay)


def as_row(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """[K] -> [1, K]: the file has no dimension of size 1."""
    return weight.view(1, -1)


def as_channels(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """[C, K] -> [C, 1, K], a convolution of each channel alone."""
    return weight.unsqueeze(1)


def flat(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension: the file has one for each head, or group, too many."""
    return weight.flatten()


def as_it_is(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """Returns the tensor unchanged: it only gets another name."""
    return weight


def joined(config: Config, *weights: torch.Tensor) -> torch.Tensor:
    """The rows of all parts."""
    return torch.cat(weights)


def unpaired(heads: str) -> Make:
    """Puts each head's rows in transformers' order: the file's even rows, then its odd ones.

    Args:
        heads: config key of the number of heads.
    """

    def make(config: Config, weight: torch.Tensor) -> torch.Tensor:
        pairs = weight.view(config[heads], -1, 2, *weight.shape[1:])
        return pairs.transpose(1, 2).reshape(weight.shape)

    return make


def rows_of_joined(which: int) -> Make:
    """The queries', keys' or values' rows of a projection that has all three.

    Args:
        which: 0, 1 or 2.
    """

    def make(config: Config, weight: torch.Tensor) -> torch.Tensor:
        keys = config["num_key_value_heads"] * config["head_dim"]
        queries = config["num_attention_heads"] * config["head_dim"]
        parts: tuple[torch.Tensor, ...] = weight.split((queries, keys, keys))
        return parts[which]

    return make


def latent_expansion(config: Config, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """kv_b_proj [heads * (D + V), L] of the expansions of latents to keys [heads, L, D] and to values [heads, V, L]."""
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def alternating(config: Config, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[H, 2I] of an expert's gate and up [I, H], a column of each in turn."""
    return torch.stack((gate, up), 1).flatten(0, 1).t()


def alternating_biases(config: Config, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[E, 2I] of gate's and up's biases [E, I], one of each in turn."""
    return torch.stack((gate, up), -1).flatten(-2)


def transposed(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are the file's columns."""
    return weight.t()


def by_key_head(config: Config, joint: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """in_proj_qkvz, whose rows are each key head's queries, keys, values and gates.

    Args:
        config: the number and size of key heads.
        joint: all queries' rows, all keys', all values'.
        gate: all gates' rows.
    """
    heads = config["linear_num_key_heads"]
    width = heads * config["linear_key_head_dim"]
    parts = (*joint.split((width, width, gate.shape[0])), gate)
    return torch.cat([part.view(heads, -1, part.shape[-1]) for part in parts], 1).flatten(0, 1)


def value_heads(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """Puts value heads, the first dimension, next to their key head: the file has the first of each key head first."""
    heads = config["linear_num_key_heads"]
    tiled = weight.reshape(config["linear_num_value_heads"] // heads, heads, -1, *weight.shape[1:])
    return tiled.transpose(0, 1).reshape(weight.shape)


def last_value_heads(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """Applies `value_heads` to the rows after the queries' and keys'."""
    width = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return torch.cat((weight[:width], value_heads(config, weight[width:])))


def value_head_columns(config: Config, weight: torch.Tensor) -> torch.Tensor:
    """`value_heads` of columns."""
    return value_heads(config, weight.t()).t()


def chained(*makes: Make) -> Make:
    """Several changes of one tensor, one after another."""

    def make(config: Config, weight: torch.Tensor) -> torch.Tensor:
        for each in makes:
            weight = each(config, weight)
        return weight

    return make
