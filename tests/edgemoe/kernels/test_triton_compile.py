"""Triton's compiler on the kernels: it needs no GPU and rejects code that its interpreter accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

INNER = """
import json, re, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from edgemoe.kernels.triton.experts import FEW, OPTIONS, VECTOR, launch_shape
from edgemoe.kernels.triton.products import matmul, matvec
from storage.record import MatrixSpec

product = launch_shape(MatrixSpec.of("down", 2048, 768), 2048, "custom")
signature = {"items": "*i64", "x": "*bf16", "x_stride": "i32", "y": "*bf16", "P": "constexpr", "T": "constexpr"}
found = {}
for kernel, tile, more in ((matvec, VECTOR, {}), (matmul, FEW, {"OPERAND": tl.bfloat16})):
    source = ASTSource(
        kernel,
        signature | dict.fromkeys(more, "constexpr"),
        {"P": product, "T": tile} | more,
        {(i,): [["tt.divisibility", 16]] for i in range(4)},
    )
    options = OPTIONS | {"num_warps": tile.warps}
    ptx = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options).asm["ptx"]
    found[kernel.__name__] = {
        "bytes": len(re.findall(r"ld\\.global(?:\\.\\w+)*\\.[bsu]8", ptx)),
        "sixteen": len(re.findall(r"ld\\.global(?:\\.\\w+)*\\.v4\\.b32", ptx)),
        "spilled": len(re.findall(r"(?:ld|st)\\.local", ptx)),
        "tensor": len(re.findall(r"mma\\.sync", ptx)),
    }
print(json.dumps(found))
"""


@pytest.mark.triton
def test_planes_are_loaded_sixteen_bytes_at_a_time(tmp_path):
    """Both kernels compile for an RTX 40's architecture, without byte loads of planes and without register spills."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    inner = subprocess.run(
        [sys.executable, "-c", INNER],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert inner.returncode == 0, inner.stderr
    found = json.loads(inner.stdout.splitlines()[-1])
    assert [kernel["bytes"] for kernel in found.values()] == [0, 0]
    assert [kernel["spilled"] for kernel in found.values()] == [0, 0]
    assert found["matvec"]["sixteen"] > 0
    assert found["matmul"]["tensor"] > 0
