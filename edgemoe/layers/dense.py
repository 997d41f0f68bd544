"""Linear layers and norms, whose weights stay in memory.

They replace torch's modules, which support neither 8-bit weights with a scale per output row nor weights in groups.
On a CPU without bf16 instructions torch's bf16 product of several rows is also slower than a float32 product with
converted slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels import torch_rules
from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import triton_runs
from edgemoe.layers.device_norm import TritonNorm
from edgemoe.machine.cpu import fast_bf16
from edgemoe.storage.store import dense_groups

SLICE_BYTES = 1 << 25
"""Most bytes of float32 that a weight is converted to at a time. Part of the workspace."""

_INT8_KERNEL_UP_TO = 16
"""Rows up to which torch's 8-bit kernel is faster than converting the weight (docs/decisions/0003)."""

_BLOCK = 32
"""Rows of a slice are a multiple of this."""

_ROWS_STEP = 64
"""Rows of a bf16 product of torch on a CPU are a multiple of this."""


def padded_rows(x: torch.Tensor) -> torch.Tensor:
    """Appends zero rows to [..., R, K] on a CPU, up to a multiple of _ROWS_STEP where R is above 1.

    For bf16 products of torch, of which oneDNN keeps code, up to a megabyte, for each shape that it has met.
    """
    rows = x.shape[-2]
    return x if rows == 1 or x.device.type != "cpu" else F.pad(x, (0, 0, 0, -rows % _ROWS_STEP))


class DenseLinear(nn.Module):
    """y = x W^T + b for a weight in bf16, int8 with a scale per row, or 4 to 6 bits (storage.store.dense_groups).

    Attributes:
        grouped: the weight has 4 to 6 bits: uint8 of dense_shapes.stored_shape, and not [N, K].
        out_features, in_features: N and K.

    Args:
        weight, scale, bias: the tensors; None: there is none.
        names: the model's names of the matrices whose rows make up the weight.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        names: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale, self.bias, self.names = scale, bias, names
        self.grouped = weight.dtype == torch.uint8
        self.out_features, self.in_features = len(weight), dense_groups.columns_of(weight)

    @classmethod
    def joined(cls, parts: Sequence[DenseLinear]) -> DenseLinear:
        """Joins layers into one layer that returns their results one after another: [..., sum of N].

        The parts stay usable. Their weights become views of the joined one, but weights in groups keep theirs.

        Args:
            parts: weights of one type; all with a bias or all without.
        """

        def concatenated(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
            present = [tensor for tensor in tensors if tensor is not None]
            assert len(present) in (0, len(parts))
            return torch.cat(present) if present else None

        weights = [part.weight.data for part in parts]
        whole = cls(
            dense_groups.joined(weights) if parts[0].grouped else torch.cat(weights),
            concatenated([part.scale for part in parts]),
            concatenated([part.bias for part in parts]),
            tuple(name for part in parts for name in part.names),
        )
        if whole.grouped:
            return whole
        sizes = [part.out_features for part in parts]
        for part, view in zip(parts, whole.weight.data.split(sizes), strict=True):
            part.weight.data = view
        return whole

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Weight, scale and bias: kernels.program.Weights."""
        return self.weight.data, self.scale, self.bias

    def rows(self, order: torch.Tensor) -> DenseLinear:
        """A layer of some of the rows, in another order: int64 [n] of their numbers gives [..., n]."""
        scale, bias = (None if each is None else each[order] for each in (self.scale, self.bias))
        weight = self.weight.data
        rows = dense_groups.rows_of(weight, order) if self.grouped else weight[order]
        return DenseLinear(rows, scale, bias, self.names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiplies bf16 [..., K] with the weight to bf16 [..., N]; `rows_alike` and the number of rows choose how."""
        flat = x.reshape(-1, self.in_features)
        rows, quantized = flat.shape[0], self.grouped or self.scale is not None
        single = rows == 1 and x.dtype == torch.bfloat16
        if single and triton_runs(x.device):
            return self.one_row(flat).view(*x.shape[:-1], self.out_features)
        if x.device.type != "cpu":
            y = self._by_slices(flat) if quantized else F.linear(flat, self.weight)
        elif native.available() and (
            quantized or torch_rules.are_rows_alike() or rows <= native.dense_bf16_up_to()
        ):
            y = native.dense_product(flat.contiguous(), self.weight, self.scale)
        elif self.scale is not None and rows <= _INT8_KERNEL_UP_TO:
            y = torch.ops.aten._weight_int8pack_mm(flat.contiguous(), self.weight, self.scale)
        elif not quantized and (rows == 1 or fast_bf16()):
            y = F.linear(padded_rows(flat), self.weight)[:rows]
        else:
            y = self._by_slices(flat)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def one_row(self, flat: torch.Tensor) -> torch.Tensor:
        """Multiplies one row bf16 [1, K] by Triton's kernel, which reads 4 to 8 bits as they lie: bf16 [1, N]."""
        from edgemoe.kernels.triton.dense import Matrix, multiply

        y = flat.new_empty(1, self.out_features)
        multiply(flat[0].contiguous(), [Matrix(self.weight.data, self.scale, self.bias)], y)
        return y

    def _by_slices(self, flat: torch.Tensor) -> torch.Tensor:
        dtype = torch.bfloat16 if flat.device.type != "cpu" or fast_bf16() else torch.float32
        x = flat if dtype == torch.float32 else padded_rows(flat)
        x, rows = x.to(dtype), flat.shape[0]
        y = flat.new_empty(rows, self.out_features)
        step = max(SLICE_BYTES // (4 * self.in_features * _BLOCK), 1) * _BLOCK
        with torch_rules.threads_for(rows * self.out_features * self.in_features):
            for start in range(0, self.out_features, step):
                part = slice(start, min(start + step, self.out_features))
                product = (x @ self._weights(part).to(dtype).t())[:rows]
                if self.scale is not None:
                    product.mul_(self.scale[part])
                y[:, part] = product
        return y

    def _weights(self, rows: slice) -> torch.Tensor:
        """Weights of some rows, without their scales."""
        weight = self.weight.data
        if not self.grouped:
            return weight[rows]
        if triton_runs(weight.device):
            from edgemoe.kernels.triton.decode_groups import decoded_rows

            return decoded_rows(weight, rows.start, rows.stop)
        return dense_groups.slice_of(weight, rows.start, rows.stop)


Watch = Callable[[DenseLinear, torch.Tensor], None]
"""Takes a layer and its input, bf16 [..., K]."""


@contextmanager
def watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Calls `watch` with each linear layer of a model and its input, while modules run in the block."""
    found = (each for each in model.modules() if isinstance(each, DenseLinear))
    hooks = [
        each.register_forward_pre_hook(lambda module, inputs: watch(module, inputs[0])) for each in found
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


_ROUNDED = 2**-7
"""Relative difference of two bf16 numbers next to each other."""


def is_rms_norm(module: Any) -> bool:
    """Whether a module is a bf16 norm that Family.rms_norm describes: weight * x / sqrt(mean(x^2) + epsilon)."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if isinstance(module, TritonNorm):
        plain = module.rounded and not module.plus_one
    else:
        plain = type(module).__name__.endswith("RMSNorm") and epsilon is not None
    return plain and weight is not None and weight.dtype == torch.bfloat16


class DenseNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + epsilon), or the same of x minus its mean, in one kernel call.

    Args:
        weight: bf16 [K], where what it is multiplied by is rounded before; or float32 [K], where the product alone is;
            or float32 [2, K] where the mean is subtracted: factors, and numbers that are added.
        epsilon: the number that is added to the mean.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.variance_epsilon = epsilon

    @classmethod
    def try_from(cls, module: Any) -> DenseNorm | None:
        """Makes a norm of a norm in RAM (Traits.rms_norm); None for other modules or without the kernel.

        A norm by 1 + weight, or one whose product alone is rounded, has a float32 weight here, and so has a LayerNorm.
        It is recognised by trying it.
        """
        weight, epsilon = getattr(module, "weight", None), getattr(module, "eps", None)
        if not native.available() or weight is None or weight.device.type != "cpu":
            return None
        if type(module).__name__.endswith("LayerNorm"):
            return cls._centred(module)
        if is_rms_norm(module):
            forms = [cls(each, module.variance_epsilon) for each in (weight.data, weight.data.float())]
            return min(forms, key=partial(_differing, module))
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
            return None
        wide = weight.data.float()
        tried = (cls(each, epsilon) for each in (wide, 1 + wide))
        return next((own for own in tried if own._computes(module)), None)

    @classmethod
    def _centred(cls, module: Any) -> DenseNorm | None:
        """Makes a norm of a LayerNorm over the last dimension; None: it computes something else."""
        factors, added = module.weight.data.float(), getattr(module, "bias", None)
        epsilon = getattr(module, "eps", getattr(module, "variance_epsilon", None))
        if factors.ndim != 1 or not isinstance(epsilon, float):
            return None
        added = torch.zeros_like(factors) if added is None else added.data.float()
        made = cls(torch.stack((factors, added)), epsilon)
        return made if made._computes(module) else None

    def _computes(self, module: Any) -> bool:
        """Whether it gives the numbers of transformers' module, but for rounding."""
        x = _trial_rows(self.weight.shape[-1])
        with torch.inference_mode():
            want = module(x)
            return torch.allclose(self(x), want, rtol=_ROUNDED, atol=_ROUNDED * float(want.abs().mean()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises [..., K] along its last dimension to bf16 [..., K].

        x has bf16 numbers, though perhaps in float32: blocks of Nemotron-H convert it to the dtype of the norm's
        weight, which is float32 here where the product alone is rounded.
        """
        return native.rms_norm(x.bfloat16().contiguous(), self.weight, self.variance_epsilon)


def _differing(module: Any, own: DenseNorm) -> int:
    """How many numbers of a trial's rows two norms round differently."""
    x = _trial_rows(own.weight.shape[-1])
    with torch.inference_mode():
        return int((own(x) != module(x)).sum())


def _trial_rows(cols: int) -> torch.Tensor:
    """Three different rows, bf16 [3, cols]."""
    return torch.linspace(-2, 2, 3 * cols).bfloat16().view(3, -1)
