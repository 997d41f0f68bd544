"""Triton's compiler on the kernels of layers with a state, without a GPU: no registers spill."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from programs import run_forked

pytest.importorskip("triton")

ROOT = Path(__file__).parents[4]

PROGRAM = """
import json, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from compile_launches import spills, translate
from edgemoe.kernels.triton.delta_net import StepForm, delta_step
from edgemoe.kernels.triton.delta_rows import convolve_rows, norm_rows, recur_rows
from edgemoe.kernels.triton.norm import rms_norm
from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.kernels.triton.scored_router import ChoiceForm, choose_scored, score
from edgemoe.kernels.triton.short_conv import short_conv
from edgemoe.kernels.triton.state_space import SpaceForm, space_norm, space_step

net = StepForm(16, 32, 128, 128, 128, 128, 4, 1, 1e-6, 0.0, False, False, True, (128, 128, 256, 256, 2, 2))
channel = StepForm(32, 32, 128, 128, 128, 128, 4, 128, 1e-6, -5.0, True, True, False, (128,) * 4 + (1, 128))
space = SpaceForm(8, 64, 64, 128, 4, 512, 0.001, float("inf"), 1e-5, 64, 128, 512)
choice = ChoiceForm(256, 256, 8, 8, True, False, True, False, False, 8, 4, 2, 2.5, 1e-20)
kernels = {
    "delta_step": (delta_step, 4, {"F": net}),
    "channel_delta": (delta_step, 4, {"F": channel}),
    "convolve_rows": (convolve_rows, 1, {"NORMALISED": True, "SHARING": 1, "TAPS": 4, "SIZE": 128}),
    "recur_rows": (recur_rows, 1, {"F": net, "COLS": 16}),
    "norm_rows": (norm_rows, 1, {"F": net}),
    "short_conv": (short_conv, 4, {"TAPS": 3, "CHANNELS": 128, "bias": None}),
    "space_step": (space_step, 8, {"F": space}),
    "space_norm": (space_norm, 2, {"F": space}),
    "score": (score, 4, {"ROUNDED": False, "ROWS": 2, "COLS": 1024, "bias": None}),
    "choose_scored": (choose_scored, 1, {"F": choice, "expert_scale": None}),
    "rms_norm": (rms_norm, 8, {"COLS": 2048, "PLUS_ONE": True, "ROUNDED": False}),
}
integers = "cols", "count", "channels", "rows", "row_stride", "stride", "first", "size", "b_row", "a_row", "z_stride"
types = dict.fromkeys(("state0", "state1", "convolved", "mixed", "logits", "gates"), "*fp32") | {"experts": "*i64"}
types |= dict.fromkeys(integers, "i32") | dict.fromkeys(("epsilon", "factor"), "fp32")
spilled = {}
for name, (kernel, warps, constants) in kernels.items():
    names = kernel.arg_names
    signature = {each: "constexpr" if each in constants else types.get(each, "*bf16") for each in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(each),): value for each, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, each in enumerate(names) if signature[each][0] == "*"},
    )
    # A program that holds a state takes the most registers.
    for capability in (80, 90) if "state0" in names else (90,):
        options = OPTIONS | {"num_warps": warps}
        if f"{name} {capability}" not in sys.argv[1:] and f"all {capability}" not in sys.argv[1:]:
            translate(source, capability, options)
            continue
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["cubin"]
        spilled[f"{name} {capability}"] = spills(code)
print(json.dumps(spilled))
"""


@pytest.mark.e2e
@pytest.mark.triton
@pytest.mark.parametrize(
    ("programs", "count"),
    [
        (("delta_step 90", "space_step 90"), 2),
        pytest.param(("all 90",), 11, marks=pytest.mark.folders),
        pytest.param(("all 80",), 4, marks=pytest.mark.folders),
    ],
    ids=["few", "90", "80"],
)
def test_the_kernels_of_layers_compile(tmp_path, programs, count):
    """All compile for capability 9.0, and with a state for 8.0, at sizes of real models, without register spills.

    `make test` has two of them compiled, and all others translated by Triton's front end.
    """
    more = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    more["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests/support/device")))
    run = run_forked("-c", PROGRAM, *programs, env=os.environ | more)
    assert run.returncode == 0, run.stderr
    spilled = json.loads(run.stdout.splitlines()[-1])
    assert len(spilled) == count
    assert not any(spilled.values()), spilled
