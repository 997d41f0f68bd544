"""The parts of transformers' models and decoder layers, whatever a family calls them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import nn

from edgemoe.kernels.program import Operation
from edgemoe.layers.dense import DenseLinear

_EMBEDDINGS = ("embed_tokens", "embeddings")
_LAST_NORMS = ("norm", "embedding_norm", "norm_f")
_POSITIONS = ("rotary_embs", "rotary_emb", "pos_emb")

_OF_LOGITS = ("logits_scaling", "logit_scale")
"""Names of what logits are divided by, and of what they are multiplied with, in configs."""

_MIXERS = ("self_attn", "linear_attn", "conv", "mamba", "mixer")
"""Names of modules that take the results of other tokens: attention, or a module with a state."""

_NUMBERS = ("layer_idx", "layer")
"""Attributes of such modules: the layer's number, under which a sequence keeps what they need."""

_BLOCKS = ("mlp", "feed_forward", "block_sparse_moe")
_SHARED = "shared_mlp"
"""Experts that every token has, in some families next to the block."""

_NOTHING = "nothing"
"""Stands for the name of a norm before a part that takes the state as it is."""

_NORMS = (
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("operator_norm", "", "ffn_norm", ""),
    ("norm", "", "", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    (
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    (_NOTHING, "post_attention_layernorm", _NOTHING, "post_feedforward_layernorm"),
    ("input_layernorm", "", "input_layernorm", ""),
)
"""Names of a layer's norms: before and after its mixer, and before and after its block; "": there is none. Where one is
before both, the block has the mixer's input."""

_PARALLEL = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
"""Names of further norms of layers with experts parallel to a dense block, in the order of ParallelExperts."""

_WIDE_CAPS = ("beam",)
"""Families that compute the cap of logits in float32; others round to bf16."""

_SUMS = ("attn_residual_add_idx", "mlp_residual_add_idx")
"""Attributes with the numbers of a model's sums that add a layer's mixer and its block: Beam weighs sums by them."""

_MULTIPLIER = "layer_scalar"
"""Tensor of a layer by whose one number its result is multiplied."""


@runtime_checkable
class Mixer(Protocol):
    """The part of a module that knows earlier tokens which the compiled kernel computes.

    Attributes:
        out: its last product, of what its operations leave in the buffer `attended`.
    """

    out: DenseLinear

    def operations(self) -> list[Operation]:
        """From the normed state to what the last product takes."""


class OuterParts(NamedTuple):
    """The parts of a model around its decoder layers.

    Attributes:
        embedding, norm, head: its embedding, last norm and head.
        positions: its rotary embedding; None: it has none.
        factor: is multiplied with embeddings.
        divisor: logits are divided by it.
        cap: logits become cap tanh(logits / cap); 0: they stay.
        multiplier: logits are multiplied with it.
        wide_cap: whether the cap is computed in float32.
    """

    embedding: Any
    norm: Any
    head: Any
    positions: Any
    factor: float
    divisor: float
    cap: float
    multiplier: float
    wide_cap: bool


class ParallelExperts(NamedTuple):
    """Experts that take the same state as a dense block, and whose result is added to its result (Gemma 4).

    Attributes:
        block: the module that has them and their router, which takes the state itself.
        norm: the norm of the state before the experts.
        after: the norm of their result.
        after_dense: the norm of the dense block's result, before the sum.
    """

    block: Any
    norm: Any
    after: Any
    after_dense: Any


class LayerPart(NamedTuple):
    """A part of a decoder layer, whose result is added to the state.

    Attributes:
        norm: the norm of the state before it, nn.Identity where there is none; None: none of a known name.
        name: its name in the layer.
        module: attention or another module that knows earlier tokens; or experts, or a dense block.
        mixes: whether it knows earlier tokens.
        shared: a module of the same state whose result is added to the block's; None: no module.
        factor: is multiplied with the part's result, which is then rounded and added to the state; 0: no product.
        after: the norm of the part's result; None: there is none.
        parallel: experts next to a dense block; None: there are none.
        residual: the state is multiplied with it, and rounded, before the result is added.
    """

    norm: Any
    name: str
    module: Any
    mixes: bool
    shared: Any
    factor: float
    after: Any
    parallel: ParallelExperts | None = None
    residual: float = 1.0

    @property
    def block(self) -> Any:
        """The module that has the part's router and experts, where it has any."""
        return self.parallel.block if self.parallel else self.module


def outer_parts(model: Any) -> OuterParts:
    """The parts of transformers' causal model around its decoder layers."""
    inner = model.model
    embedding, norm, positions = (
        _one_of(inner, names)[1] for names in (_EMBEDDINGS, _LAST_NORMS, _POSITIONS)
    )
    scale: Any = getattr(embedding, "factor", None)
    factor = getattr(inner, "embedding_multiplier", 1) if scale is None else scale
    if getattr(model.config, "mup_enabled", False):  # afmoe
        factor = model.config.hidden_size**0.5
    divisor, multiplier = (getattr(model.config, name, None) or 1 for name in _OF_LOGITS)
    cap = getattr(model.config, "final_logit_softcapping", None) or 0
    numbers = float(factor), float(divisor), float(cap), float(multiplier)
    wide = model.config.model_type in _WIDE_CAPS
    return OuterParts(embedding, norm, model.lm_head, positions, *numbers, wide)


def parts_of(layer: nn.Module) -> list[LayerPart]:
    """The parts of a decoder layer in the order in which they are computed: two, or one where a layer has one."""
    norms = _norms(layer)
    found = list[LayerPart]()
    for first, names in ((0, _MIXERS), (2, _BLOCKS)):
        name, module = _one_of(layer, names)
        if module is not None:
            mixes = not first and any(hasattr(module, number) for number in _NUMBERS)
            shared = getattr(layer, _SHARED, None) if first else None
            before, after = norms[first : first + 2]
            parallel, (factor, residual) = (
                _parallel(layer) if first else None,
                _factors(layer, block=first > 0),
            )
            found.append(LayerPart(before, name, module, mixes, shared, factor, after, parallel, residual))
    return found


def _factors(layer: Any, *, block: bool) -> tuple[float, float]:
    """The factors of a part's result, 0 for none, and of the state to which it is added."""
    number = getattr(layer, _SUMS[block], None)
    if number is not None:
        return 1 / math.sqrt(number), math.sqrt((number - 1) / number)
    factor = float(getattr(layer, "residual_multiplier", 1))
    return 0.0 if factor == 1 else factor, 1.0


def multiplier_of(layer: Any) -> float:
    """The number by which a layer's result is multiplied."""
    return float(getattr(layer, _MULTIPLIER, 1.0))


def _parallel(layer: Any) -> ParallelExperts | None:
    """The experts parallel to a layer's dense block, where it has any."""
    if not hasattr(layer, _PARALLEL[0]):
        return None
    return ParallelExperts(layer, *(getattr(layer, name) for name in _PARALLEL))


def _norms(layer: nn.Module) -> list[Any]:
    """A layer's norms in the order of _NORMS; None where it has no such norm."""
    own = {name for name, _ in layer.named_children() if "norm" in name} - {*_PARALLEL}
    names = next((names for names in _NORMS if {*names} - {"", _NOTHING} == own), ("", "", "", ""))
    return [nn.Identity() if name == _NOTHING else getattr(layer, name) if name else None for name in names]


def _one_of(module: Any, names: tuple[str, ...]) -> tuple[str, Any]:
    """The first of some attributes that a module has, and its name; None: it has none of them."""
    return next(
        ((name, found) for name in names if (found := getattr(module, name, None)) is not None), ("", None)
    )
