"""Random experts at published models' sizes, in a GPU's memory or in pinned memory, and the items that name them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgemoe.kernels.triton import dense
from edgemoe.kernels.triton.experts import launch_shape
from edgemoe.kernels.triton.products import ITEM, Product
from edgemoe.storage.record.offsets import MatrixSpec

LEVELS = (4, 2, 8)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's experts: hidden and inner columns, columns per group, experts of a token."""

    hidden: int
    inner: int
    group: int
    top_k: int


MODELS = {
    "qwen3-30b-a3b": Sizes(2048, 768, 64, 8),
    "qwen3.6-35b-a3b": Sizes(2048, 512, 64, 8),
    "gpt-oss-20b": Sizes(2880, 2880, 32, 4),
}


DENSE = {"qkv": ((4096, 512, 512), 2048), "o": ((2048,), 4096), "head": ((151936,), 2048)}
"""Rows of the matrices, and columns, of Qwen3-30B-A3B's dense layers."""


class Experts:
    """Random planes of both matrices of `sets` times top_k experts, and rows to multiply.

    Args:
        sizes: the model's sizes.
        sets: numbers of tokens whose experts differ.
        pinned: planes lie in pinned memory instead of the GPU's.
        device: where the rest lies.
    """

    def __init__(self, sizes: Sizes, sets: int, *, pinned: bool, device: str = "cuda") -> None:
        self.sizes, self.sets = sizes, sets
        specs = (
            MatrixSpec.of("gate_up", 2 * sizes.inner, sizes.hidden, sizes.group),
            MatrixSpec.of("down", sizes.hidden, sizes.inner, sizes.group),
        )
        self.shapes = (
            launch_shape(specs[0], sizes.inner, "silu"),
            launch_shape(specs[1], sizes.hidden, "custom"),
        )
        count = sets * sizes.top_k
        self._bytes = [(spec.parameter_bytes, spec.nibble_bytes // 2) for spec in specs]
        self.blocks = [
            (_placed(_parameters(count, spec, device), pinned), _placed(_planes(count, spec, device), pinned))
            for spec in specs
        ]
        self.x = torch.randn(1, sizes.hidden, device=device).bfloat16()
        self.inner = torch.zeros(sizes.top_k, sizes.inner, dtype=torch.bfloat16, device=device)
        self.out = torch.zeros(sizes.top_k, sizes.hidden, dtype=torch.bfloat16, device=device)

    def items(self, level: int) -> torch.Tensor:
        """int64 [sets, 2, top_k, ITEM] on the device: the items of each token, of gate_up and of down."""
        table = torch.zeros(self.sets, 2, self.sizes.top_k, ITEM, dtype=torch.int64)
        for matrix, (parameters, planes) in enumerate(self.blocks):
            for expert in range(self.sets * self.sizes.top_k):
                at, slot = divmod(expert, self.sizes.top_k)
                addresses = [parameters[expert].data_ptr(), *(each.data_ptr() for each in planes[expert])]
                table[at, matrix, slot] = torch.tensor([*addresses, level, slot, 1])
        return table.to(self.x.device)

    def token_bytes(self, level: int) -> int:
        """Bytes that the experts of one token take at a level."""
        planes = {2: 1, 4: 2, 8: 4}[level]
        return self.sizes.top_k * sum(parameters + planes * plane for parameters, plane in self._bytes)

    def arguments(
        self, table: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor, int, torch.Tensor, Product]]:
        """The arguments of a token's two launches, without a tile."""
        up, down = self.shapes
        return [
            (table[0], self.x, 0, self.inner, up),
            (table[1], self.inner, self.sizes.inner, self.out, down),
        ]


def _planes(count: int, spec: MatrixSpec, device: str) -> torch.Tensor:
    """uint8 [count, 4, bytes]: base, d4 and d8's halves."""
    return torch.randint(0, 256, (count, 4, spec.nibble_bytes // 2), dtype=torch.uint8, device=device)


def _parameters(count: int, spec: MatrixSpec, device: str) -> torch.Tensor:
    """bf16 [count, groups, rows, 2]: scales of about .003, and centres around 0."""
    pairs = torch.randn(count, spec.padded_cols // spec.group, spec.padded_rows, 2, device=device) * 0.001
    pairs[..., 0] += 0.003
    return pairs.bfloat16()


def _placed(numbers: torch.Tensor, pinned: bool) -> torch.Tensor:
    return numbers.cpu().pin_memory() if pinned else numbers


def dense_layer(
    name: str, bits: int, copies: int
) -> tuple[list[list[dense.Matrix]], torch.Tensor, torch.Tensor]:
    """Random matrices of a layer, some copies, a row x and a row of results."""
    sizes, cols = DENSE[name]
    matrices = [[_matrix(rows, cols, bits) for rows in sizes] for _ in range(copies)]
    x = torch.randn(cols, device="cuda").bfloat16()
    return matrices, x, torch.zeros(sum(sizes), dtype=torch.bfloat16, device="cuda")


def _matrix(rows: int, cols: int, bits: int) -> dense.Matrix:
    if bits == 16:
        return dense.Matrix(torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16))
    weight = torch.randint(-127, 128, (rows, cols), device="cuda", dtype=torch.int8)
    return dense.Matrix(weight, torch.full((rows,), 0.01, device="cuda", dtype=torch.bfloat16))
