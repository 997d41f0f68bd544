"""storage/record/layout.py against orders written out byte by byte, and against torch's operator."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from edgemoe.errors import UserError
from edgemoe.storage.record import layout as layout_module
from edgemoe.storage.record.layout import LAYOUTS, detect
from edgemoe.storage.record.probes import PROBES

SHAPES = [(16, 32), (32, 32), (48, 64), (64, 32), (80, 64), (112, 96), (200 // 16 * 16, 128)]


def pack_slowly(name: str, nibbles: np.ndarray) -> bytes:
    """Packs in the order of the module's docstring, one byte at a time."""
    rows, cols = nibbles.shape
    if name == "cuda":
        slab = 32 if cols % 64 else 64
        return bytes(
            int(row[start + (first * slab // 4) + j] | row[start + (first + 2) * slab // 4 + j] << 4)
            for first in (0, 1)
            for start in range(0, cols, slab)
            for row in nibbles
            for j in range(slab // 4)
        )
    block = 64 if name == "cpu-avx512" else 32
    halves = [], []
    for start in range(0, rows, block):
        height = min(block, rows - start)
        half = height // 2
        for k in range(cols):
            for d in range(half):
                split_in_halves = height == block and name != "cpu-generic"
                low, high = (d, d + half) if split_in_halves else (2 * d, 2 * d + 1)
                second = name == "cpu-avx2-paired" and k % 4 >= 2
                halves[second].append(int(nibbles[start + low, k] | nibbles[start + high, k] << 4))
    return bytes(halves[0] + halves[1])


def a_matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.randint(0, 16, (rows, cols), generator=torch.Generator().manual_seed(rows * cols)).to(
        torch.uint8
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_pack_is_the_described_order_and_unpack_its_inverse(name, shape):
    """Every layout packs bytes to their described places, incomplete blocks included, and unpacks them."""
    matrix = a_matrix(*shape)
    packed = LAYOUTS[name].pack(matrix)
    assert packed.numpy().tobytes() == pack_slowly(name, matrix.numpy())
    pieces = packed.view(LAYOUTS[name].pieces, -1)
    assert torch.equal(LAYOUTS[name].unpack(pieces, *shape), matrix)
    out = torch.full(shape, 255, dtype=torch.uint8)
    assert LAYOUTS[name].unpack(pieces, *shape, out) is out
    assert torch.equal(out, matrix)


@pytest.mark.parametrize("name", ["cpu-avx512", "cpu-avx2", "cpu-generic", "cpu-avx2-paired"])
def test_a_matrix_is_unpacked_some_blocks_at_a_time(monkeypatch, name):
    """Pieces of one block, and a last one of fewer blocks than the others, give the same matrix."""
    matrix = a_matrix(5 * 64 + 16, 64)
    pieces = LAYOUTS[name].pack(matrix).view(LAYOUTS[name].pieces, -1)
    for piece in (1, 2 * 64 * 64):
        monkeypatch.setattr(layout_module, "_PIECE", piece)
        assert torch.equal(LAYOUTS[name].unpack(pieces, *matrix.shape), matrix)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_detected_layout_is_the_operators_own(shape):
    """torch's operator packs every shape exactly as the detected layout."""
    matrix = a_matrix(*shape)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(matrix.to(torch.int32), 1)
    assert torch.equal(detect().pack(matrix), packed.reshape(-1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["cpu-avx512", "cpu-avx2", "cpu-generic"])
def test_add_to_adds_every_nibble_transposed(name, shape):
    """Every weight's nibble is added to the value at its column and row."""
    matrix = a_matrix(*shape)
    out = torch.full((shape[1], shape[0]), 0.5)
    LAYOUTS[name].add_to(LAYOUTS[name].pack(matrix), out)
    assert torch.equal(out, matrix.T + 0.5)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("lengths", [(1024, 3072), (256, 512, 1280), (8192,)])
def test_cut_takes_every_byte_once(name, lengths):
    """The views of all matrices have the matrices' lengths and no byte in common, and leave only padding."""
    nibbles = torch.zeros(8192, dtype=torch.uint8)
    for at, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        view = LAYOUTS[name].cut(nibbles, at, length)
        assert view.shape == (LAYOUTS[name].pieces, length // LAYOUTS[name].pieces)
        view += 1
    assert int(nibbles.max()) == 1
    assert int(nibbles.sum()) == sum(lengths)


INNER = """
import sys, pytest
from edgemoe.storage.record.layout import detect
print(detect().name, flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("capability", "name"),
    [
        pytest.param("default", "cpu-generic", marks=pytest.mark.folders),
        ("avx2", "cpu-avx2"),
        ("avx512", "cpu-avx512"),
    ],
)
def test_the_kernel_computes_at_every_vector_width(capability, name):
    """With torch limited to a vector width, its layout is detected and the kernel's tests pass."""
    widths = ["default", "avx2", "avx512"]
    own = torch.backends.cpu.get_cpu_capability().lower()
    if widths.index(capability) > widths.index(own):
        pytest.skip(f"this processor has no {capability}")
    if capability == own:
        assert detect().name == name  # its tests run in this process
        return
    here = Path(__file__)
    tests = [
        f"{here}::test_the_detected_layout_is_the_operators_own",
        str(here.with_name("test_encode.py")),
    ]
    inner = subprocess.run(
        [sys.executable, "-c", INNER, "--noconftest", "-k", "operator or kernel", *tests],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(here.parents[3])},
        cwd=here.parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert inner.returncode == 0, inner.stdout + inner.stderr
    assert inner.stdout.startswith(f"{name}\n")
    assert "passed" in inner.stdout


def test_probes_are_distinct_and_fixed():
    """Probes are fixed and distinct, so that existing stores keep matching."""
    known = np.array([(i * 2654435761 >> 13) % 16 for i in range(80 * 64)], np.uint8).reshape(80, 64)
    assert {
        name: xxhash.xxh3_64_hexdigest(LAYOUTS[name].pack(torch.from_numpy(known)).numpy().data)
        for name in LAYOUTS
    } == PROBES
    assert {name: xxhash.xxh3_64_hexdigest(pack_slowly(name, known)) for name in LAYOUTS} == PROBES
    assert len(set(PROBES.values())) == len(LAYOUTS)


@pytest.mark.parametrize(
    "answer", [AttributeError("no such operator"), torch.zeros(80, 32, dtype=torch.uint8)]
)
def test_a_kernel_that_is_missing_or_unknown_is_refused(monkeypatch, answer):
    """Without a kernel of a known order, the message names a torch version to install."""

    def convert(matrix: torch.Tensor, tiles: int) -> torch.Tensor:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(layout_module.torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", convert)
    with pytest.raises(UserError, match="install"):
        detect.__wrapped__()
