"""The operations of a decoder layer, for one new token of each of some sequences: data that kernels run.

edgemoe.layers.program makes a layer's list of transformers' modules; edgemoe.kernels.native.decode_layers runs it. Rows
of bf16 numbers go from one named buffer to another. HIDDEN has the state that goes from layer to layer, NORMED the
input of a layer's experts; all other names are a list's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from edgemoe.kernels.native.attention import NativeAttention, StoredAttention
from edgemoe.kernels.native.delta_net import NativeDeltaNet
from edgemoe.kernels.native.expert_activation import NativeExpertActivation
from edgemoe.kernels.native.latents import NativeLatents
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.kernels.native.short_conv import NativeShortConv
from edgemoe.kernels.native.state_space import NativeStateSpace

HIDDEN, NORMED = "hidden", "normed"

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Weight, row scale and bias of a linear layer, as layers.dense.DenseLinear has them."""


@dataclass(frozen=True, eq=False)
class Norm:
    """output = weight * input / sqrt(mean(input^2) + epsilon), or the same of the input minus its mean.

    Args:
        weight: bf16 [N], where what it is multiplied by is rounded to bf16 before; or float32 [N], where the product
            alone is rounded; or float32 [2, N], where the mean is subtracted: factors, and numbers that are added.
        epsilon: the number that is added to the mean.
    """

    input: str
    output: str
    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, eq=False)
class Linear:
    """output [N] = weight input [K] + bias."""

    input: str
    output: str
    weights: Weights


@dataclass(frozen=True, eq=False)
class Attend:
    """output = attention of the queries, keys and values in input, which are written to the sequence's KV.

    Args:
        attention: norms, rotates and attends; or attends alone, of finished queries to what the KV has.
        rotation: index of its rotation in the list of the step's rotations.
    """

    input: str
    output: str
    attention: NativeAttention | StoredAttention
    rotation: int = 0


@dataclass(frozen=True, eq=False)
class StoreLatents:
    """Writes a key to the sequence's KV, of the latent and the rotary part in input, which stays; output is the input.

    Args:
        latents: norms and rotates.
    """

    input: str
    output: str
    latents: NativeLatents


@dataclass(frozen=True, eq=False)
class LatentQueries:
    """output = queries in the form of stored keys, of the queries in input.

    Args:
        latents: multiplies with each head's matrix, and rotates.
    """

    input: str
    output: str
    latents: NativeLatents


@dataclass(frozen=True, eq=False)
class LatentValues:
    """output = sums of values, of the sums of keys in input.

    Args:
        latents: multiplies with each head's matrix.
    """

    input: str
    output: str
    latents: NativeLatents


@dataclass(frozen=True, eq=False)
class DeltaNet:
    """output = results of a gated delta net, of the projections in input; the sequence's state changes.

    Args:
        net: convolves, computes the recurrence, norms and gates.
    """

    input: str
    output: str
    net: NativeDeltaNet


@dataclass(frozen=True, eq=False)
class ShortConv:
    """output = results of a gated short convolution, of the projections in input; the sequence's state changes.

    Args:
        conv: multiplies, convolves and gates.
    """

    input: str
    output: str
    conv: NativeShortConv


@dataclass(frozen=True, eq=False)
class StateSpace:
    """output = results of a selective state space, of the projections in input; the sequence's state changes.

    Args:
        space: convolves, computes the recurrence, gates and norms.
    """

    input: str
    output: str
    space: NativeStateSpace


@dataclass(frozen=True, eq=False)
class Apply:
    """output = function(input).

    Args:
        values: bf16 [65536], the function's value for each bf16 number (kernels.native.functions.values_of).
    """

    input: str
    output: str
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Activate:
    """output [N] = function(first half of input) * second half of input [2 N].

    Args:
        values: [65536], the function's value for each bf16 number: bf16, or float32 where the product alone is rounded.
    """

    input: str
    output: str
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Scale:
    """output [N] *= function(input), for an input [N], [1], or one number for each head of the output.

    Args:
        values: [65536], the function's value for each bf16 number, in the types of Activate's.
    """

    input: str
    output: str
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Add:
    """output += factor input.

    Args:
        factor: is multiplied with the input, which is then rounded and added; 0: no product.
    """

    input: str
    output: str
    factor: float = 0.0


@dataclass(frozen=True, eq=False)
class Place:
    """Writes the input [N] to a part of the output [cols], which other parts complete.

    Args:
        at, cols: the first number of the part, and numbers of the output's row.
    """

    input: str
    output: str
    at: int
    cols: int


@dataclass(frozen=True, eq=False)
class Multiply:
    """output = factor input.

    Args:
        factor: the number; None: the row's own, the cosine of a rotation of one number.
        rotation: index of that rotation in the list of the step's rotations.
    """

    input: str
    output: str
    factor: float | None
    rotation: int = 0


@dataclass(frozen=True, eq=False)
class Experts:
    """Computes the experts of the state in NORMED: adds their weighted sum to HIDDEN, or writes it to another buffer.

    Args:
        router: chooses the experts.
        activation: the function between the products of each expert; None: silu(gate) up, without biases.
    """

    output: str
    router: NativeRouter
    activation: NativeExpertActivation | None = None
    input: str = NORMED
    routed: str = NORMED
    """The buffer that the router reads: NORMED or HIDDEN."""


@dataclass(frozen=True, eq=False)
class Call:
    """output [1, rows, M] = function(step, input [1, rows, N]), for all that is of no other kind.

    Args:
        function: takes the step's context and the input.
        cols: M.
    """

    input: str
    output: str
    function: Callable[[Any, torch.Tensor], torch.Tensor]
    cols: int


Latents = StoreLatents | LatentQueries | LatentValues
Recurrent = DeltaNet | ShortConv | StateSpace

Simple = Apply | Activate | Scale | Add | Multiply | Place
Operation = Norm | Linear | Attend | Recurrent | Simple | Experts | Call | Latents


@dataclass(frozen=True, eq=False)
class LayerProgram:
    """A decoder layer's list.

    Args:
        operations: the operations in their order; at most one is Attend or of Recurrent, and one Experts.
        window: latest tokens that its attention sees; 0: all.
    """

    operations: tuple[Operation, ...]
    window: int

    @property
    def router(self) -> NativeRouter | None:
        """The router of its experts; None: it has no experts that are an operation."""
        return next((each.router for each in self.operations if isinstance(each, Experts)), None)

    @property
    def activation(self) -> NativeExpertActivation | None:
        """The activation of its experts, as Experts has it."""
        return next((each.activation for each in self.operations if isinstance(each, Experts)), None)

    @property
    def experts_at(self) -> int:
        """The index of Experts among its operations; -1: there is none."""
        return next((i for i, each in enumerate(self.operations) if isinstance(each, Experts)), -1)
