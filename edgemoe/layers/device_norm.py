"""RMS norms on a device, each in one launch of Triton's kernel instead of some ten operators of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.registry import triton_runs

_FORMS = ((False, True), (False, False), (True, False))
"""(plus_one, rounded) of kernels.triton.norm.normalise that families have."""

_CLOSE = 2**-7
"""Relative difference of two bf16 numbers next to each other."""


class TritonNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + epsilon), or the product with 1 + weight.

    Args:
        weight: bf16 or float32 [K], on a device where Triton's kernels run.
        epsilon: the number that is added to the mean.
        plus_one: whether the factor is 1 + weight.
        rounded: whether x is rounded to bf16 before it is multiplied by the weight as well as after it.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, *, plus_one: bool, rounded: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon, self.plus_one, self.rounded = epsilon, plus_one, rounded

    @classmethod
    def try_from(cls, module: Any) -> TritonNorm | None:
        """Makes a norm of transformers' *RMSNorm on a device where Triton's kernels run; None for other modules.

        Its form is recognised by the results of the module for rows of a trial.
        """
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            return None
        if weight is None or weight.ndim != 1 or not triton_runs(weight.device):
            return None
        form = _form_of(module, weight.data, epsilon)
        return None if form is None else cls(weight.data, epsilon, plus_one=form[0], rounded=form[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises [..., K] along its last dimension to bf16 [..., K].

        x has bf16 numbers, though perhaps in float32, as in blocks of Nemotron-H.
        """
        from edgemoe.kernels.triton.norm import normalise

        rows = x.bfloat16().reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(rows)
        if len(rows):
            normalise(
                rows, self.weight, self.variance_epsilon, out, plus_one=self.plus_one, rounded=self.rounded
            )
        return out.view(x.shape)


def _form_of(module: Any, weight: torch.Tensor, epsilon: float) -> tuple[bool, bool] | None:
    """The form whose results differ least from a module's; None: they are other numbers, or of another type."""
    x = torch.linspace(-2, 2, 3 * len(weight), device=weight.device).bfloat16().view(3, -1)
    with torch.inference_mode():
        want = module(x)
        if want.dtype != torch.bfloat16:
            return None
        made = {form: _normalised(x, weight.float(), epsilon, *form) for form in _FORMS}
        form = min(made, key=lambda each: int((made[each] != want).sum()))
        close = torch.allclose(made[form], want, rtol=_CLOSE, atol=_CLOSE * float(want.abs().mean()))
    return form if close else None


def _normalised(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, plus_one: bool, rounded: bool
) -> torch.Tensor:
    """The norm of bf16 [R, K] by torch's operators."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    if rounded:
        scaled = scaled.bfloat16().float()
    return (scaled * (1 + weight if plus_one else weight)).bfloat16()
