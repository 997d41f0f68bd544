"""Instructions per weight of the product of one row, as Triton's compiler makes them: it needs no GPU."""

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


found = []
cases = [(up, 2, 90), (up, 4, 90), (down, 8, 90), *((up, 8, target) for target in (80, 86, 89, 120))]
for product, level, target in cases:
    constants = {"P": product, "T": VECTOR, "LEVEL": level}
    source = ASTSource(at_level, types, constants, {(i,): [["tt.divisibility", 16]] for i in range(3)})
    options = OPTIONS | {"num_warps": VECTOR.warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    code, loops = instructions(compiled.asm["cubin"])
    turns = -(-product.slabs // VECTOR.side)
    run = sum(turns if any(at in loop for loop in loops) else 1 for at in range(len(code)))
    weights = 2 * VECTOR.rows * product.slabs * 4 * product.run / (32 * VECTOR.warps)
    barriers = sum("BAR.SYNC" in each for each in code)
    spilled = sum(bool(re.search(r"\\b(LDL|STL)\\b", each)) for each in code)
    found.append((level, target, round(run / weights, 2), barriers, spilled))
print(json.dumps(found))
"""


@pytest.mark.triton
def test_a_weight_takes_few_instructions(tmp_path):
    """At most 6 per weight, few barriers and no spilled registers, at the sizes of Qwen3-30B-A3B.

    The levels are compiled for compute capability 9.0, and level 8, which takes the most, from 8.0 to 12.0.
    """
    root = Path(__file__).parents[4]
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (root, root / "tests/support/device")))
    inner = subprocess.run(
        [sys.executable, "-c", INNER], env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert inner.returncode == 0, inner.stderr
    counts = json.loads(inner.stdout.splitlines()[-1])
    assert len(counts) == 7
    for level, target, per_weight, barriers, spilled in counts:
        assert per_weight <= 6, (level, target)
        assert (barriers <= 8, spilled) == (True, 0)
