"""Triton's compiler on the kernels: it needs no GPU and rejects code that its interpreter accepts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import run_forked

pytest.importorskip("triton")

INNER = """
import json, re, sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from compile_launches import spills, translate
from edgemoe.kernels.triton.experts import FEW, VECTOR, launch_shape
from edgemoe.kernels.triton.matvec import matvec
from edgemoe.kernels.triton.products import OPTIONS, matmul
from edgemoe.storage.record.offsets import MatrixSpec

product = launch_shape(MatrixSpec.of("gate_up", 1536, 2048), 768, "silu")
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
    if kernel.__name__ not in sys.argv[1:]:
        translate(source, 89, options)
        continue
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
from edgemoe.kernels.triton.choice import report_rows, sum_rows
from edgemoe.kernels.triton.dense import add_norm, gemv
from edgemoe.kernels.triton.decode_groups import decode_groups
from edgemoe.kernels.triton.router import choose
from edgemoe.kernels.triton.token import advance, compare, look_up, look_up_groups

from edgemoe.kernels.triton.draw import count, match, point, take, weigh

third = dict.fromkeys(("s0", "b0", "s1", "b1", "w2", "s2", "b2"))
kernels = {
    gemv: third | {"n2": 0, "ROWS": 2, "COLS": 1024, "INTEGERS": False},
    add_norm: {"COUNT": 8, "SIZE": 2048},
    choose: {"EXPERTS": 128, "EXPERTS_PADDED": 128, "K": 8, "K_PADDED": 8, "NORMALISE": True, "ROUNDED": True},
    look_up: {"BLOCK": 4096},
    look_up_groups: {"BITS": 6, "BLOCK": 1024},
    compare: {"BLOCK": 4096},
    advance: {"PARTS": 64},
    count: {"BLOCK": 4096},
    weigh: {"PARTS": 64},
    point: {"PARTS": 64},
    match: {"BLOCK": 4096},
    take: {"PARTS": 64, "BLOCK": 4096},
    report_rows: {"K": 8, "K_PADDED": 8},
    sum_rows: {"K": 8, "BLOCK": 1024},
    decode_groups: {"BITS": 6, "SIDE": 4},
}
others = dict.fromkeys(("choice", "predicted", "token"), "*i64") | {"likeliest": "*i32"}
others |= dict.fromkeys(("highest", "numbers"), "*fp32")
others |= dict.fromkeys(("count", "groups", "first"), "i32")
others |= {"report": "*i32", "state": "*i64", "gates": "*fp32", "scratch": "*fp32"}
others |= dict.fromkeys(("rule", "powers", "sums", "pointed"), "*i64")
others |= dict.fromkeys(("counts", "matches", "result"), "*i32")
others |= dict.fromkeys(("n0", "n1", "cols", "size", "layer", "window", "vocab", "parts"), "i32")
others |= dict.fromkeys(("epsilon", "q_epsilon", "k_epsilon", "scaling"), "fp32")
spilled = {}
for kernel, constants in kernels.items():
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else others.get(name, "*bf16") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    if kernel in (decode_groups, look_up_groups):
        signature["weight"] = "*u8"
    if not {kernel.__name__, "all"} & {*sys.argv[1:]}:
        translate(source, 89, OPTIONS)
        continue
    code = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=OPTIONS).asm
    spilled[kernel.__name__] = spills(code["cubin"])
print(json.dumps(spilled))
"""


ROOT = Path(__file__).parents[4]

pytestmark = [pytest.mark.triton, pytest.mark.e2e]


@pytest.fixture
def compiled(tmp_path) -> Callable[..., list[Any]]:
    """Runs a program in a process of its own, with Triton's compiler, and returns the lines that it prints."""

    def run(program: str, *kernels: str) -> list[Any]:
        more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
        more["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support/device")))
        child = run_forked("-c", program, *kernels, env=os.environ | more)
        assert child.returncode == 0, child.stderr
        return [json.loads(line) for line in child.stdout.splitlines()]

    return run


def test_a_new_tokens_kernels_compile(compiled):
    """Triton accepts a token's kernels, and products and router compile for an RTX 40's architecture, without spills.

    Sizes are Qwen3-30B-A3B's. A row's product loads planes sixteen bytes at a time.
    """
    found, spilled = compiled(INNER + ROW, "matvec", "gemv", "choose")
    assert [*spilled] == ["gemv", "choose"]
    assert not any(spilled.values())
    assert [*found] == ["matvec"]
    assert (found["matvec"]["bytes"], found["matvec"]["spilled"]) == (0, 0)
    assert found["matvec"]["sixteen"] > 0


@pytest.mark.folders
def test_every_kernel_of_a_new_token_compiles(compiled):
    """Norms, embedding and choice of a token compile too, without spills."""
    _, spilled = compiled(INNER + ROW, "all")
    assert len(spilled) == 15
    assert not any(spilled.values())


@pytest.mark.folders
def test_a_product_of_few_rows_takes_tensor_cores(compiled):
    """It compiles for an RTX 40's architecture, without byte loads of planes and without register spills."""
    (found,) = compiled(INNER, "matmul")
    assert (found["matmul"]["bytes"], found["matmul"]["spilled"]) == (0, 0)
    assert found["matmul"]["tensor"] > 0
