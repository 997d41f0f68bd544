"""Launches of a token's kernels: the program's, and older ones that a folder has."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from edgemoe.kernels.triton import dense
from edgemoe.kernels.triton.matvec import matvec, rows_per_program
from edgemoe.kernels.triton.products import OPTIONS, Tile
from tools.gpu.kernel_data import Experts


def launch_experts(experts: Experts, table: torch.Tensor, tile: Tile, before: str | None) -> None:
    """Launches the products of one token; `before` is the folder of the older kernel, None for the program's."""
    for items, x, stride, y, shape in experts.arguments(table):
        if before is None:
            kernel, rows = matvec, rows_per_program(shape, tile)
        else:
            kernel, rows = (
                (sys.modules.get("before_products") or load_before(before, "products")).matvec,
                tile.rows,
            )
        grid = triton.cdiv(shape.out, rows), len(items)
        kernel[grid](items, x, stride, y, shape, tile, num_warps=tile.warps, **OPTIONS)


def launch_dense(
    copies: list[list[dense.Matrix]],
    x: torch.Tensor,
    out: torch.Tensor,
    tile: tuple[int, int],
    before: str | None,
) -> None:
    """Launches the products of the first copy of a layer, by the kernel of the folder `before` or the program's."""
    module: Any = dense
    if before:
        module = sys.modules.get("before_dense") or load_before(before, "dense")
    module.ROWS, module.COLS = tile
    module.multiply(x, copies[0], out)


def load_before(folder: str, name: str) -> ModuleType:
    """The older kernels' module edgemoe/kernels/triton/NAME.py of a folder."""
    path = Path(folder, "edgemoe/kernels/triton", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"before_{name}", path)
    assert spec
    assert spec.loader
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
