"""Multi-head latent attention over cached latents, without expanding them.

Head h has k = W_k c and v = W_v c for a token's latent c, so q k = (W_k^T q) c, and the sum of p v is W_v times the sum
of p c. So queries and results are multiplied instead of each token's latent, and the cache has latents only.
"""

from __future__ import annotations

from typing import Any

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.latents import HeadMatrices
from edgemoe.layers.dense import SLICE_BYTES, padded_rows
from edgemoe.machine.cpu import fast_bf16


class LatentHeads:
    """Multiplies with the key and the value half of kv_b_proj, [heads, key + value, latent].

    Args:
        module: an attention module with kv_b_proj, qk_nope_head_dim, v_head_dim, kv_lora_rank.
    """

    def __init__(self, module: Any) -> None:
        self._key, self._latent = module.qk_nope_head_dim, module.kv_lora_rank
        linear = module.kv_b_proj
        shape = -1, self._key + module.v_head_dim, self._latent
        self._weight = linear.weight.view(shape)
        self._scale = None if linear.scale is None else linear.scale.view(*shape[:2], 1)

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """Maps queries [heads, R, key + rotary] to [heads, R, latent + rotary], the form of a cached key."""
        plain, rotary = query.split((self._key, query.shape[-1] - self._key), dim=-1)
        return torch.cat((self._product(plain, slice(0, self._key), transposed=False), rotary), dim=-1)

    def value(self, sums: torch.Tensor) -> torch.Tensor:
        """Maps sums of latents [heads, R, latent] to sums of values [heads, R, value]."""
        return self._product(sums, slice(self._key, None), transposed=True)

    def _product(self, x: torch.Tensor, part: slice, *, transposed: bool) -> torch.Tensor:
        """Multiplies x with one half of each head's matrix; converts the weights of a few heads at a time."""
        dtype = torch.bfloat16 if x.device.type != "cpu" or fast_bf16() else torch.float32
        half, rows = self._weight[:, part], x.shape[1]
        if dtype == torch.bfloat16:
            x = padded_rows(x)
        step = max(SLICE_BYTES // (4 * half[0].numel()), 1)
        out = []
        for start in range(0, len(half), step):
            heads = slice(start, start + step)
            weight = half[heads].to(dtype)
            if self._scale is not None:
                weight = weight * self._scale[heads, part].to(dtype)
            out.append((x[heads].to(dtype) @ (weight.mT if transposed else weight)).to(x.dtype)[:, :rows])
        return torch.cat(out)


class CompiledLatents:
    """LatentHeads by the compiled kernel: the bits of a row do not depend on the number of rows.

    The key halves of the weights are transposed in their place, where the kernel reads them. Nothing else may use
    kv_b_proj afterwards.

    Args:
        module: an attention module with kv_b_proj, qk_nope_head_dim, v_head_dim and kv_lora_rank. Its weights lie in
            RAM.

    Attributes:
        matrices: the weights as the kernel reads them.
    """

    def __init__(self, module: Any) -> None:
        self._key, latent = module.qk_nope_head_dim, module.kv_lora_rank
        linear = module.kv_b_proj
        weight = linear.weight.data.view(-1, self._key + module.v_head_dim, latent)
        scale = None if linear.scale is None else linear.scale.bfloat16().view(*weight.shape[:2])
        keys = weight.as_strided((len(weight), latent, self._key), (weight.stride(0), self._key, 1))
        for head, own in zip(keys, weight[:, : self._key], strict=True):
            head.copy_(own.mT.contiguous())
        self.matrices = HeadMatrices(keys, weight[:, self._key :], scale)

    def query(self, query: torch.Tensor) -> torch.Tensor:
        """Maps queries as LatentHeads.query does."""
        plain, rotary = query.split((self._key, query.shape[-1] - self._key), dim=-1)
        keys, _, scale = self.matrices
        of_keys = None if scale is None else scale[:, : self._key]
        found = native.head_products(plain.contiguous(), keys, of_keys, by_column=True)
        return torch.cat((found, rotary), dim=-1)

    def value(self, sums: torch.Tensor) -> torch.Tensor:
        """Maps sums as LatentHeads.value does."""
        _, values, scale = self.matrices
        return native.head_products(
            sums.contiguous(), values, None if scale is None else scale[:, self._key :]
        )


def use_compiled_latents(module: Any) -> None:
    """Makes an attention module with kv_b_proj attend to latents alone, where the compiled kernel runs in RAM."""
    if not native.available() or module.kv_b_proj.weight.device.type != "cpu":
        return
    module.latents, module.expand_kv = CompiledLatents(module), lambda latents, rotary: (latents, rotary)
