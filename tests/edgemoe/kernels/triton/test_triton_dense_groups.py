"""Triton's products with dense weights of 4 to 6 bits against float64: on a GPU if present, else interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu

from edgemoe.kernels.triton.decode_groups import decoded_rows
from edgemoe.kernels.triton.dense import Matrix, multiply
from edgemoe.layers import dense
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.row_products import RowProducts
from edgemoe.storage.record.planes import quantize
from edgemoe.storage.store.dense_groups import quantize_groups

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(rows: int, cols: int, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix's bytes on the device, and its weights, float64 [rows, cols], by the definition of codes."""
    weight = numbers(rows, cols, seed=seed) * (1 + torch.arange(rows) % 3)[:, None] + 0.25
    codes, parameters = quantize(weight, 64)
    scale, centre = parameters.double().repeat_interleave(64, 0).unbind(-1)
    lost = 1 << (8 - bits)
    middle = (codes.double() // lost * lost + (lost - 1) / 2 - 135.5) / 16
    return quantize_groups(weight, bits).to(DEVICE), middle * scale.T + centre.T


def difference(result: torch.Tensor, want: torch.Tensor) -> float:
    return float((result.cpu().double() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("bits", "sizes", "cols", "biased"),
    [(4, (64, 32, 32), 192, True), (5, (96,), 64, False), (6, (32, 64), 2112, True)],
)
def test_products_of_a_row_match_float64(bits, sizes, cols, biased):
    """Up to three matrices; groups fill no tile, or take two turns; biases are added to rounded products."""
    x = numbers(cols, seed=9).bfloat16()
    matrices, want = list[Matrix](), list[torch.Tensor]()
    for seed, rows in enumerate(sizes, start=1):
        weight, exact = grouped(rows, cols, bits, seed)
        bias = numbers(rows, seed=seed + 5).bfloat16() if biased else None
        product = exact @ x.double()
        want.append(product if bias is None else (product.bfloat16() + bias).double())
        matrices.append(Matrix(weight, None, None if bias is None else bias.to(DEVICE)))
    out = torch.full((sum(sizes),), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    multiply(x.to(DEVICE), matrices, out)
    assert difference(out, torch.cat(want)) < 0.003


def test_a_row_that_is_not_finite_gives_no_numbers():
    """An infinite input makes every product NaN, as it makes the whole row wrong."""
    weight, _ = grouped(32, 128, 6, seed=1)
    x = numbers(128).bfloat16().to(DEVICE)
    x[70] = torch.inf
    out = torch.zeros(32, dtype=torch.bfloat16, device=DEVICE)
    multiply(x, [Matrix(weight)], out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("cols", [64, 320])
def test_weights_are_decoded_to_the_bits_of_their_definition(bits, cols):
    """All rows, and blocks of rows in the middle of a matrix, rounded to bf16."""
    weight, exact = grouped(128, cols, bits, seed=bits)
    assert torch.equal(decoded_rows(weight, 0, 128).cpu(), exact.float().bfloat16())
    assert torch.equal(decoded_rows(weight, 32, 96).cpu(), exact[32:96].float().bfloat16())


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_a_dense_layer_on_a_device_multiplies_one_row_and_several(bits, monkeypatch):
    """One row takes the row's kernel, several take decoded slices; both match float64, with a bias."""
    monkeypatch.setattr(dense, "triton_runs", lambda place: True)
    monkeypatch.setattr(dense, "SLICE_BYTES", 32 * 128 * 4)  # two slices
    monkeypatch.setattr(dense.native, "available", lambda: False)
    weight, exact = grouped(64, 128, bits, seed=3)
    bias = numbers(64, seed=4).bfloat16()
    layer = DenseLinear(weight, None, bias.to(DEVICE))
    for rows in (1, 3):
        x = numbers(rows, 128, seed=rows).bfloat16()
        want = ((x.double() @ exact.T).bfloat16() + bias).double()
        assert difference(layer(x.to(DEVICE)), want) < 0.005


def test_products_with_several_layers_take_a_launch_for_each_type(monkeypatch):
    """Layers of 5 bits and of bf16 next to each other give the products of each."""
    monkeypatch.setattr(dense, "triton_runs", lambda place: True)
    weight, exact = grouped(32, 64, 5, seed=1)
    plain = numbers(24, 64, seed=2).bfloat16()
    layers = [DenseLinear(weight, None, None), DenseLinear(plain.to(DEVICE), None, None)]
    products = RowProducts.try_from([*layers, layers[0]])
    assert products
    assert RowProducts.try_from([SimpleNamespace()]) is None
    x = numbers(1, 64, seed=3).bfloat16()
    first, second, third = products(x.to(DEVICE))
    assert difference(first, x.double() @ exact.T) < 0.003
    assert difference(second, x.double() @ plain.double().T) < 0.003
    assert torch.equal(third, first)


@pytest.mark.folders
def test_every_launch_fits_a_gpu(tmp_path):
    """Compiled for 8.0 to 9.0 in a process of its own: within shared memory, without spilled registers."""
    root, more = Path(__file__).parents[4], {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, root / "tests/support/device/compile_dense_groups.py", "4", "5", "6"],
        env=os.environ | more | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    table = json.loads(child.stdout.splitlines()[-1])
    assert len(table) == 24
    assert {name for name, (shared, room, spills) in table.items() if shared > room or spills} == set()
