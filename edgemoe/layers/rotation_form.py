"""How transformers' attention modules rotate queries and keys, found by trying them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch

from edgemoe.kernels.native.rotation import ROTATE_HALVES, ROTATE_WIDE_HALVES, ROTATE_WIDE_PAIRS

Tables = tuple[torch.Tensor, torch.Tensor] | torch.Tensor
"""Cosine and sine of positions, as a model's rotary embedding gives them, or complex numbers of both."""

_FUNCTION = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in transformers' files."""

_TRIED = 5
"""Positions of the trial."""


class RotationForm(NamedTuple):
    """How numbers of a head are rotated together.

    Attributes:
        pairing: ROTATE_HALVES, ROTATE_WIDE_HALVES or ROTATE_WIDE_PAIRS of native.rotation.
        repeated: whether the model's tables have each number twice in succession, instead of twice the half of a row.
        queries_alone: whether keys are not rotated.
    """

    pairing: int = ROTATE_HALVES
    repeated: bool = False
    queries_alone: bool = False

    def tables(self, rotation: Tables, rotated: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of positions as the kernel reads them, [1, rows, rotated], contiguous.

        Args:
            rotation: [1, rows, rotated] or [1, rows, rotated / 2] each; or complex numbers [1, rows, rotated / 2],
                whose parts are returned in float32.
            rotated: leading numbers of each head that are rotated.
        """
        if isinstance(rotation, torch.Tensor):
            return rotation.real.contiguous(), rotation.imag.contiguous()
        cosine, sine = (self._table(table, rotated) for table in rotation)
        return cosine, sine

    def _table(self, table: torch.Tensor, rotated: int) -> torch.Tensor:
        if self.repeated:
            table = table[..., ::2]
        if 2 * table.shape[-1] == rotated:
            table = torch.cat((table, table), -1)
        return table.bfloat16() if self.pairing == ROTATE_HALVES else table.float()

    def rotate(self, x: torch.Tensor, rotation: Tables) -> torch.Tensor:
        """Rotates heads bf16 [1, heads, rows, D] with torch's operators, with the bits of the kernel."""
        cosine, sine = self.tables(rotation, x.shape[-1])
        half, pairs = x.shape[-1] // 2, self.pairing == ROTATE_WIDE_PAIRS
        low, high = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., :half], x[..., half:])
        if self.pairing != ROTATE_HALVES:
            low, high = low.float(), high.float()
        cosine, sine = cosine[..., :half].unsqueeze(1), sine[..., :half].unsqueeze(1)
        parts = low * cosine - high * sine, high * cosine + low * sine
        whole = torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)
        return whole.to(x.dtype)


_FORMS = (
    RotationForm(),
    RotationForm(ROTATE_WIDE_HALVES),
    RotationForm(ROTATE_WIDE_PAIRS),
    RotationForm(ROTATE_WIDE_PAIRS, repeated=True),
)


def rotation_form(module: Any, rotary: Any) -> RotationForm | None:
    """The form of an attention module; None: another one.

    A module whose file does not have the function has the form of most families.

    Args:
        module: transformers' attention module.
        rotary: the model's rotary embedding, with frequencies for one kind of layer.
    """
    function = getattr(sys.modules[type(module).__module__], _FUNCTION, None)
    if function is None:
        return RotationForm()
    with torch.inference_mode():
        rotation = rotary(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.arange(1, _TRIED + 1)[None])
        rotated = 2 * rotary.inv_freq.numel()
        noise = torch.randn(1, 2, _TRIED, rotated, generator=torch.Generator().manual_seed(0)).bfloat16()
        want = function(noise, noise, *rotation)[0]
        return next((form for form in _FORMS if torch.equal(form.rotate(noise, rotation), want)), None)
