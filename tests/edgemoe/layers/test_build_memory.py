"""Memory that building a model takes in addition to its weights."""

from __future__ import annotations

import sys

import pytest
from family_models import random_model, save
from programs import programs

from edgemoe.kernels.native import library as native
from edgemoe.models.conversion.run import convert_checkpoint

LAYERS, HIDDEN, WIDTH = 4, 1024, 2048

PROGRAM = """
import sys
from pathlib import Path
from edgemoe.layers import build
from edgemoe.machine.process import peak_resident_bytes, reset_peak, resident_bytes
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.engine import load_model as module
from edgemoe.engine.engine import Engine

def measured(*arguments):
    reset_peak()
    before = resident_bytes()
    model = built(*arguments)
    print(peak_resident_bytes() - before)
    return model

built, module.build_model = build.build_model, measured
store = StoreModel.open(Path(sys.argv[1]))
settings = RunSettings.uniform(8)
for _ in range(2):  # the first one also loads code
    with Engine(store, store.plan(vram_limit=1 << 30, settings=settings, context=16), settings) as engine:
        dense = engine.plan.dense_bytes
print(dense)
"""


@pytest.mark.e2e
@pytest.mark.skipif(
    sys.platform != "linux" or not native.available(), reason="needs glibc's malloc and the kernel"
)
def test_parts_that_are_joined_leave_no_holes(tmp_path):
    """The peak while q, k and v are joined is above the dense weights by one layer's parts, not by all layers'."""
    model = random_model(
        "qwen3_moe",
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=WIDTH // 32,
    )
    source, store = save(model, tmp_path / "source", fused=True), tmp_path / "store"
    convert_checkpoint(source, store, max_level=8, layout="auto", dense_bits=16)
    with programs() as start:
        out, err = start("-c", PROGRAM, store).communicate(timeout=300)
    _, peak, dense = (int(line) for line in out.split() or pytest.fail(err))
    parts = 3 * HIDDEN * WIDTH * 2
    assert dense > LAYERS * parts
    assert peak < dense + 2 * parts
