"""A synthetic store's dense tensors: names, shapes, and at 8 bits and fewer their codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgemoe.bench.synthetic.workload import Shape
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.dense import quantize_rows
from edgemoe.storage.store.manifest import SCALE_SUFFIX

_OUTER = ("embed_tokens.weight", "lm_head.weight")

Dense = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Makes a dense tensor in bf16 from transformers' name and the shape."""


def dense_specs(shape: Shape, bits: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (element type, shape) of the tensors of dense_tensors, in order; routers keep 16 bits."""
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, size in shape.dense().items():
        matrix = bits < 16 and len(size) == 2 and not name.endswith("mlp.gate.weight")
        if matrix and bits in dense_shapes.BITS and dense_shapes.fits(size) and not name.endswith(_OUTER):
            out[name] = (dense_shapes.DTYPE, dense_shapes.stored_shape(size, bits))
        elif matrix:
            out |= {name: ("I8", size), name + SCALE_SUFFIX: ("BF16", size[:1])}
        else:
            out[name] = ("BF16", size)
    return out


def dense_tensors(shape: Shape, dense: Dense, bits: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of dense_specs one at a time."""
    specs = dense_specs(shape, bits)
    for name, size in shape.dense().items():
        tensor = dense(name, size)
        if specs[name][0] == dense_shapes.DTYPE:
            yield name, dense_groups.quantize_groups(tensor, bits)
        elif specs[name][0] == "I8":
            codes, scales = quantize_rows(tensor)
            yield name, codes
            yield name + SCALE_SUFFIX, scales
        else:
            yield name, tensor
