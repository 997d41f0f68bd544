"""Triton's compiler on the kernels: it needs no GPU and rejects code that its interpreter accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

INNER = """
import json, re, subprocess, tempfile, triton, triton.language as tl
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from edgemoe.kernels.triton.experts import FEW, VECTOR, launch_shape
from edgemoe.kernels.triton.matvec import matvec
from edgemoe.kernels.triton.products import OPTIONS, matmul
from edgemoe.storage.record.offsets import MatrixSpec

product = launch_shape(MatrixSpec.of("gate_up", 1536, 2048), 768, "silu")
disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def spills(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"\\b(?:LDL|STL)\\b", code))


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
    code = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=options).asm
    ptx = code["ptx"]
    found[kernel.__name__] = {
        "bytes": len(re.findall(r"ld\\.global(?:\\.\\w+)*\\.[bsu]8", ptx)),
        "sixteen": len(re.findall(r"ld\\.global(?:\\.\\w+)*\\.v4\\.b32", ptx)),
        "spilled": spills(code["cubin"]),
        "tensor": len(re.findall(r"mma\\.sync", ptx)),
    }
print(json.dumps(found))
"""


ROW = """
import json, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from edgemoe.kernels.triton.choice import report_rows, sum_rows
from edgemoe.kernels.triton.dense import add_norm, gemv
from edgemoe.kernels.triton.decode_groups import decode_groups
from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.kernels.triton.router import choose
from edgemoe.kernels.triton.token import advance, compare, look_up

third = dict.fromkeys(("s0", "b0", "s1", "b1", "w2", "s2", "b2"))
kernels = {
    gemv: third | {"n2": 0, "ROWS": 2, "COLS": 1024, "INTEGERS": False},
    add_norm: {"COUNT": 8, "SIZE": 2048},
    choose: {"EXPERTS": 128, "EXPERTS_PADDED": 128, "K": 8, "K_PADDED": 8, "NORMALISE": True, "ROUNDED": True},
    look_up: {"BLOCK": 4096},
    compare: {"BLOCK": 4096},
    advance: {"PARTS": 64},
    report_rows: {"K": 8, "K_PADDED": 8},
    sum_rows: {"K": 8, "BLOCK": 1024},
    decode_groups: {"BITS": 6, "SIDE": 4},
}
others = dict.fromkeys(("choice", "predicted", "token"), "*i64") | {"likeliest": "*i32"}
others |= dict.fromkeys(("highest", "numbers"), "*fp32")
others |= dict.fromkeys(("count", "groups", "first"), "i32")
others |= {"report": "*i32", "state": "*i64", "gates": "*fp32", "scratch": "*fp32"}
others |= dict.fromkeys(("n0", "n1", "cols", "size", "layer", "window", "vocab", "parts"), "i32")
others |= dict.fromkeys(("epsilon", "q_epsilon", "k_epsilon", "scaling"), "fp32")
spilled = {}
for kernel, constants in kernels.items():
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else others.get(name, "*bf16") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    if kernel is decode_groups:
        signature["weight"] = "*u8"
    code = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=OPTIONS).asm
    spilled[kernel.__name__] = spills(code["cubin"])
print(json.dumps(spilled))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[dict[str, Any], dict[str, int]]:
    """The output of INNER and ROW in a process of its own, with Triton's compiler."""
    cache = tmp_path_factory.mktemp("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    inner = subprocess.run(
        [sys.executable, "-c", INNER + ROW],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert inner.returncode == 0, inner.stderr
    found, spilled = map(json.loads, inner.stdout.splitlines()[-2:])
    return found, spilled


@pytest.mark.triton
def test_a_new_tokens_kernels_compile(compiled):
    """Products, norms, router, embedding and choice of a token compile for an RTX 40's architecture, without spills.

    Sizes are Qwen3-30B-A3B's.
    """
    _, spilled = compiled
    assert len(spilled) == 9
    assert not any(spilled.values())


@pytest.mark.triton
def test_planes_are_loaded_sixteen_bytes_at_a_time(compiled):
    """Both kernels compile for an RTX 40's architecture, without byte loads of planes and without register spills."""
    found, _ = compiled
    assert [kernel["bytes"] for kernel in found.values()] == [0, 0]
    assert [kernel["spilled"] for kernel in found.values()] == [0, 0]
    assert found["matvec"]["sixteen"] > 0
    assert found["matmul"]["tensor"] > 0
