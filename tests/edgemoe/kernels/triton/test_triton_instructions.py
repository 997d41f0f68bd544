"""Instructions per weight of products of one row, as Triton's compiler makes them: it needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

INNER = """
import json, re, subprocess, tempfile, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from edgemoe.kernels.triton import dense, dense_groups
from edgemoe.kernels.triton.experts import VECTOR, launch_shape
from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.storage.record.offsets import MatrixSpec
from level_kernel import at_level

up = launch_shape(MatrixSpec.of("gate_up", 1536, 2048), 768, "silu")
down = launch_shape(MatrixSpec.of("down", 2048, 768), 2048, "custom")
disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
types = {"items": "*i64", "x": "*bf16", "y": "*bf16"} | dict.fromkeys(("P", "T", "LEVEL"), "constexpr")


def instructions(cubin):
    # Instructions that a thread runs; bodies of loops count once per turn.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout
    code, labels, loops = [], {}, []
    for line in text.splitlines():
        label = re.match(r"\\s*(\\.L_x_\\d+):", line)
        if label:
            labels[label[1]] = len(code)
        instruction = re.match(r"\\s+/\\*[0-9a-f]{4,}\\*/\\s+(.*?);", line)
        if instruction:
            code.append(instruction[1])
    for at, each in enumerate(code):
        target = re.search(r"\\bBRA\\b.*?(\\.L_x_\\d+)", each)
        if target and labels[target[1]] < at:
            loops.append(range(labels[target[1]], at + 1))
    last = max(at for at, each in enumerate(code) if "EXIT" in each)
    return code[: last + 1], loops


def counted(kernel, types, constants, warps, target, turns, weights):
    # Instructions per weight, barriers in the code and spilled registers.
    divisible = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind != "constexpr"}
    source = ASTSource(kernel, types, constants, divisible)
    options = OPTIONS | {"num_warps": warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    code, loops = instructions(compiled.asm["cubin"])
    run = sum(turns if any(at in loop for loop in loops) else 1 for at in range(len(code)))
    barriers = sum("BAR.SYNC" in each for each in code)
    spilled = sum(bool(re.search(r"\\b(LDL|STL)\\b", each)) for each in code)
    return round(run * 32 * warps / weights, 2), barriers, spilled


found = []
cases = [(up, 2, 90), (up, 4, 90), (down, 8, 90), *((up, 8, target) for target in (86, 120))]
for product, level, target in cases:
    turns = -(-product.slabs // VECTOR.side)
    weights = 2 * VECTOR.rows * product.slabs * 4 * product.run
    constants = {"P": product, "T": VECTOR, "LEVEL": level}
    found.append(counted(at_level, types, constants, VECTOR.warps, target, turns, weights))
rows = dense.INTEGER_ROWS * dense.ROWS
constants = dict.fromkeys(("b0", "w1", "s1", "b1", "w2", "s2", "b2")) | dict.fromkeys(("n1", "n2"), 0)
constants |= {"ROWS": rows, "COLS": dense.COLS, "INTEGERS": True}
types = {"w0": "*i8", "n0": "i32", "cols": "i32"}
types = {name: types.get(name, "*bf16") for name in dense.gemv.arg_names} | dict.fromkeys(constants, "constexpr")
found.append(counted(dense.gemv, types, constants, 4, 90, 2048 // dense.COLS, rows * 2048))
constants = dict.fromkeys(("b0", "w1", "b1", "w2", "b2")) | dict.fromkeys(("n1", "n2"), 0)
constants |= {"BITS": 6, "SIDE": 32}
types = {"w0": "*u8", "n0": "i32", "groups": "i32"}
types = {name: types.get(name, "*bf16") for name in dense_groups.grouped_gemv.arg_names}
types |= dict.fromkeys(constants, "constexpr")
found.append(counted(dense_groups.grouped_gemv, types, constants, 8, 90, 1, 32 * 2048))
print(json.dumps(found))
"""


@pytest.mark.folders
@pytest.mark.triton
def test_a_weight_takes_few_instructions(tmp_path):
    """At most 6 per weight, few barriers and no spilled registers, at the sizes of Qwen3-30B-A3B.

    The levels are compiled for compute capability 9.0, and level 8, which takes the most, for 8.6 and 12.0 too. Dense
    weights take at most 5, of 8 bits and of 6, which take more than 4 and 5 bits do.
    """
    root = Path(__file__).parents[4]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "tests/support/device")))
    inner = subprocess.run(
        [sys.executable, "-c", INNER], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert inner.returncode == 0, inner.stderr
    *experts, dense, grouped = json.loads(inner.stdout.splitlines()[-1])
    assert len(experts) == 5
    for per_weight, barriers, spilled in experts:
        assert (per_weight <= 6, barriers <= 8, spilled) == (True, True, 0)
    assert max(dense[0], grouped[0]) <= 5
    assert dense[2] == grouped[2] == 0
