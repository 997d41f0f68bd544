"""The operations of multi-head latent attention, made of transformers' module."""

from __future__ import annotations

from typing import Any

from edgemoe.kernels.native.attention import StoredAttention, kernel_fits
from edgemoe.kernels.native.latents import HALVES, PAIRS, WIDE_PAIRS, NativeLatents
from edgemoe.kernels.program import (
    NORMED,
    Attend,
    LatentQueries,
    LatentValues,
    Linear,
    Norm,
    Operation,
    StoreLatents,
)
from edgemoe.layers.dense import DenseLinear, DenseNorm
from edgemoe.layers.mla import CompiledLatents


class LatentList:
    """Makes the list of an attention module that attends to latents.

    Args:
        module: transformers' module, with `latents` of layers.mla.

    Attributes:
        out: its last product.
    """

    def __init__(self, module: Any) -> None:
        self._module, self.out = module, module.o_proj

    @classmethod
    def try_from(cls, module: Any) -> LatentList | None:
        """A list of a module whose parts have native forms; None for others."""
        if not isinstance(getattr(module, "latents", None), CompiledLatents):
            return None
        names = ["kv_a_proj_with_mqa", "o_proj"]
        names += ["q_proj"] if module.q_lora_rank is None else ["q_a_proj", "q_b_proj"]
        norms = [module.kv_a_layernorm] + ([] if module.q_lora_rank is None else [module.q_a_layernorm])
        known = all(type(getattr(module, name)) is DenseLinear for name in names)
        known = known and all(type(norm) is DenseNorm for norm in norms)
        size = module.kv_lora_rank + module.qk_rope_head_dim
        return cls(module) if known and kernel_fits(module.num_heads, 1, size) else None

    def operations(self) -> list[Operation]:
        """The operations between the normed state and the input of the last product."""
        own, latents = self._module, self._latents()
        attention = StoredAttention(latents.heads, 1, latents.stored, own.scaling)
        return [
            *self._queries(),
            Linear(NORMED, "compressed", own.kv_a_proj_with_mqa.parts),
            StoreLatents("compressed", "compressed", latents),
            LatentQueries("queries", "as_keys", latents),
            Attend("as_keys", "summed", attention),
            LatentValues("summed", "attended", latents),
        ]

    def _queries(self) -> list[Operation]:
        own = self._module
        if own.q_lora_rank is None:
            return [Linear(NORMED, "queries", own.q_proj.parts)]
        norm = own.q_a_layernorm
        return [
            Linear(NORMED, "low", own.q_a_proj.parts),
            Norm("low", "low", norm.weight.data, norm.variance_epsilon),
            Linear("low", "queries", own.q_b_proj.parts),
        ]

    def _latents(self) -> NativeLatents:
        own, norm = self._module, self._module.kv_a_layernorm
        interleaved = getattr(own.config, "rope_interleave", None)
        # Where no config says so, DeepSeek-V2's positions are complex numbers.
        pairing = WIDE_PAIRS if interleaved is None else PAIRS if interleaved else HALVES
        weights = norm.weight.data, norm.variance_epsilon
        return NativeLatents(own.latents.matrices, own.qk_rope_head_dim, weights, pairing)
