"""Every path of the compiled kernel, bit for bit against the same arithmetic in plain C."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import plain_c
import pytest
import torch
from availability import needs_native
from native_paths import PATHS, forced, running
from pairwise import pairwise
from record_codec import encode
from records import KEY, MemoryReader, blocks_for

from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import quantize
from edgemoe.storage.store import dense_groups
from edgemoe.storage.store.dense import quantize_rows

pytestmark = needs_native

SHAPES = [(96, 64, 64), (200, 100, 64), (64, 576, 64), (48, 128, 32), (80, 256, 128)]
"""Rows, columns and group of a matrix: with a last block of 16 rows, with padding, of more chunks than a strip has."""

ROWS = (1, 3, 12, 13, 16, 31, 33, 64, 130)


@pytest.fixture(params=PATHS)
def path(request):
    with forced(request.param):
        yield request.param


def test_a_processor_has_the_paths_of_its_flags():
    """The system lists the features that programs may use; AMX needs its permission in addition."""
    if platform.machine() != "x86_64":
        pytest.skip("test_neon.py has the processors of aarch64")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split())
    avx512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"} <= flags
    wanted = {
        "avx2": {"avx2", "fma"} <= flags,
        "avx-vnni": "avx_vnni" in flags or avx512,
        "avx512-vnni": avx512,
        "avx512-bf16": avx512 and "avx512_bf16" in flags,
    }
    available = paths.available()
    assert {path: path in available for path in wanted} == wanted
    assert "amx" not in available or {"amx_tile", "amx_int8", "amx_bf16"} <= flags


class Experts:
    """A first matrix of an expert, and its codes and parameters as the reference takes them."""

    def __init__(self, rows: int, cols: int, group: int) -> None:
        specs = MatrixSpec.of("gate_up", rows, cols, group), MatrixSpec.of("down", cols, rows // 2, 32)
        self.geometry = RecordGeometry(specs, 8)
        generator = torch.Generator().manual_seed(rows)
        weights = [torch.randn(spec.rows, spec.cols, generator=generator) for spec in specs]
        self.record = encode(self.geometry, native.LAYOUT, weights)
        self.form = PlaneForm(self.geometry, native.LAYOUT, native.LAYOUT)
        self.blocks = blocks_for(self.form, 8)
        self.form.fill(MemoryReader(self.record, self.geometry), KEY, 8, self.blocks, None)
        self.kernel = NativeExpertKernel(self.geometry, native.LAYOUT)

    def reference(self, x: torch.Tensor, level: int) -> torch.Tensor:
        """The first product of rows x."""
        spec, parameters_at, codes_at = self.geometry.matrix_offsets()[0]
        base, d4, d8 = (
            torch.frombuffer(self.blocks[label], dtype=torch.uint8) for label in ("base", "d4", "d8")
        )
        pairs = base[parameters_at : parameters_at + spec.parameter_bytes].view(torch.bfloat16)
        base = base[self.geometry.parameter_bytes :]

        def codes(plane: torch.Tensor) -> torch.Tensor:
            pieces = native.LAYOUT.cut(plane, codes_at, spec.nibble_bytes)
            return native.LAYOUT.unpack(pieces, spec.padded_rows, spec.padded_cols)

        low = d4 if level > 2 else torch.zeros_like(d4)
        upper = codes(torch.cat(((base & 0x33) << 2 | low & 0x33, base & 0xCC | (low >> 2) & 0x33)))
        upper = upper << 4 | codes(d8) if level == 8 else upper
        x = torch.nn.functional.pad(x, (0, spec.padded_cols - spec.cols))
        return plain_c.expert(upper.contiguous(), pairs.contiguous(), level, spec.group, x)[:, : spec.rows]

    def product(self, x: torch.Tensor, level: int) -> torch.Tensor:
        """The kernel's first product, which an activation that it does not fuse sees."""
        seen = []

        def look(both: torch.Tensor) -> torch.Tensor:
            seen.append(both.clone())
            return both[:, : both.shape[1] // 2].contiguous()

        out = x.new_empty(len(x), self.geometry.matrices[1].rows)
        self.kernel.forward(Rows(x), [Part(self.blocks, 8, level, len(x))], Activation(CUSTOM, look), out)
        return seen[0]


@pytest.mark.e2e
@pairwise(path=running(PATHS), shape=SHAPES, level=[8, 4, 2], indirect=["path"])
def test_products_of_experts_are_the_reference_bit_for_bit(path, shape, level):
    """For every shape, group, level and number of rows."""
    experts = Experts(*shape)
    generator = torch.Generator().manual_seed(level)
    x = (torch.randn(ROWS[-1], shape[1], generator=generator) * 10).bfloat16()
    x[:, 7] *= 100
    x[3], x[4] = 0, 1e-37  # whose inverse times 127 is no number
    want = experts.reference(x, level)
    for rows in ROWS:
        assert torch.equal(experts.product(x[:rows], level), want[:rows]), rows


@pytest.mark.e2e
@pytest.mark.parametrize("shape", [(64, 256), (33, 304), (100, 64), (5, 100), (64, 17), (70, 1024)])
def test_dense_products_are_the_reference_bit_for_bit(path, shape):
    """Columns that tiles and vectors divide and others give the reference's bits, with rows after the last tile."""
    generator = torch.Generator().manual_seed(shape[1])
    codes, scales = quantize_rows(torch.randn(shape, generator=generator))
    x = (torch.randn(300, shape[1], generator=generator) * 10).bfloat16()
    x[3], x[4] = 0, 1e-37
    want = plain_c.dense(codes, scales, x)
    # A weight is read once for 256 rows.
    for rows in (*ROWS, 257, 300):
        assert torch.equal(native.dense_product(x[:rows], codes, scales), want[:rows]), rows


@pytest.mark.e2e
@pytest.mark.parametrize(("bits", "shape"), [(4, (64, 320)), (4, (96, 64)), (5, (96, 320)), (6, (96, 320))])
def test_dense_products_in_groups_are_the_reference_bit_for_bit(path, bits, shape):
    """A token's numbers are the same alone and among any others, and NaN stays in its row."""
    generator = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=generator)
    x = (torch.randn(300, shape[1], generator=generator) * 10).bfloat16()
    x[3], x[4] = 0, 1e-37
    codes, parameters = quantize(weight, 64)
    want = plain_c.expert((codes >> (8 - bits)).contiguous(), parameters, bits, 64, x)
    matrix = dense_groups.quantize_groups(weight, bits)
    for rows in (*ROWS, 257, 300):
        assert torch.equal(native.dense_product(x[:rows], matrix, None), want[:rows]), rows
    x[1, 5] = float("nan")
    finite = native.dense_product(x[:3], matrix, None).isfinite().all(dim=1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump reads the compiled instructions")
def test_avx_vnni_is_compiled_in_both_encodings():
    """Every one of the 256-bit products exists as AVX-VNNI's and as AVX-512's instruction.

    A processor has seldom both, so that the tests above run one of them: this one shows that the other differs in its
    encoding alone.
    """
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", native.library()._name],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = Counter(re.findall(r"\t(\{vex\} )?(vpdp(?:busd|wssd)) %ymm", code))
    assert found["{vex} ", "vpdpbusd"] == found["", "vpdpbusd"] > 20
    assert found["{vex} ", "vpdpwssd"] == found["", "vpdpwssd"] > 10


@pytest.mark.e2e
def test_the_reference_is_the_format_s_product():
    """The reference itself equals the decoded weights' product, to the error of 8-bit and 14-bit activations."""
    experts = Experts(96, 64, 64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    spec, _, _ = experts.geometry.matrix_offsets()[0]
    assert spec.rows == 96

    for level, most in ((8, 0.005), (4, 0.02), (2, 0.02)):
        want = x.float() @ decode(experts.record, experts.geometry, native.LAYOUT, level)[0].T
        got = experts.reference(x, level).float()
        assert (got - want).norm() / want.norm() < most
