"""A KV on the device of the Triton tests, and attention to it in float32."""

from __future__ import annotations

import torch
from interpreter import DEVICE

from edgemoe.kernels.triton.attention import PLACE, STATE, StoredRowAttention, scratch_size
from edgemoe.kv.rows import decode, encode, rotate
from edgemoe.layers.attend import attend_tiles

LAYERS = 2


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random bf16 numbers on the device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def close(result: torch.Tensor, want: torch.Tensor, error: float) -> bool:
    """Whether the norm of the difference is at most `error` of the norm of `want`."""
    result, want = result.float(), want.float()
    return bool((result - want).norm() <= error * want.norm())


class Stored:
    """Random keys and values of LAYERS layers, in a shape's format, and the state of the token after `past` others."""

    def __init__(self, shape: StoredRowAttention, past: int) -> None:
        self.shape, self.past = shape, past
        context, form = past + 3, shape.form
        size = LAYERS, shape.kv_heads, context
        keys = rotate(numbers(*size, shape.dim, seed=1).cpu(), shape.keys.turned)
        self.parts = [encode(form.keys, keys).to(DEVICE)]
        if not shape.latent:
            values = numbers(*size, shape.value_dim, seed=2).cpu()
            self.parts.append(encode(form.values, values).to(DEVICE))
        places = [
            [self.parts[0][layer].data_ptr(), self.parts[-1][layer].data_ptr(), context]
            for layer in range(LAYERS)
        ]
        self.state = torch.tensor([past, 0, *(number for place in places for number in place)], device=DEVICE)
        assert len(self.state) == STATE + PLACE * LAYERS

    def attend(self, queries: torch.Tensor) -> torch.Tensor:
        """The kernels' result, bf16 [heads, value_dim], for queries bf16 [heads, dim]."""
        shape = self.shape
        size = scratch_size(shape.heads, max(shape.dim, shape.value_dim))
        scratch = torch.full((size,), torch.nan, device=DEVICE)
        out = torch.full((shape.heads, shape.value_dim), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        shape.attend(queries, self.state, scratch, out)
        return out

    def want(self, queries: torch.Tensor) -> torch.Tensor:
        """The result of layers.attend in float32, [heads, value_dim]."""
        shape, end = self.shape, self.past + 1
        keys = decode(shape.form.keys, self.parts[0][shape.layer].cpu(), shape.dim)
        if shape.latent:
            values = keys[..., : shape.latent]
        else:
            values = decode(shape.form.values, self.parts[1][shape.layer].cpu(), shape.value_dim)
        turned = rotate(queries.cpu().float(), shape.keys.turned)
        sinks = None if shape.sinks is None else shape.sinks.cpu()
        summed = attend_tiles(
            turned[:, None],
            lambda first, last: (keys[:, first:last], values[:, first:last]),
            end,
            shape.scaling,
            shape.window or None,
            sinks,
        )
        back = rotate(summed[:, 0], shape.keys.turned if shape.latent else 0)
        return back.to(DEVICE)
