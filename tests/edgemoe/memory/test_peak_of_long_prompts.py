"""A prompt in a long context under the smallest limit: the plan has all memory of attention."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from availability import needs_native
from family_models import random_model, save
from programs import programs

from edgemoe.kv.formats import KVFormat
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel

WIDE = {"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 32, "num_hidden_layers": 1}
"""Keys and values in float32 would take more than all else."""

DEEP = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 24}
"""Sums of attention, two numbers per layer and token, take more than all else but keys and values."""

WINDOWS = WIDE | {"sliding_window": 64}
"""Keys and values of all tokens would take more than all else."""

CHILD = """
import json, sys
from pathlib import Path
from edgemoe.engine.engine import Engine
from edgemoe.kv.formats import KVFormat
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
directory, kv, context, prefill_rows = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
settings = RunSettings(levels=(8, 4), importance="heavy-hitters")
store = StoreModel.open(Path(directory)).with_kv(KVFormat(kv, kv))
given = dict(settings=settings, context=context, prefill_rows=prefill_rows)
limit = store.plan(vram_limit=None, **given).minimum_vram_bytes
with Engine(store, store.plan(vram_limit=limit, **given), settings) as engine:
    engine.prefill(engine.sequences.new(), [(7 * i) % 290 + 5 for i in range(context - 2)])
    print(json.dumps((engine.peak.bytes, limit)))
"""


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize(
    ("sizes", "kv", "context", "prefill_rows", "copies"),
    [
        pytest.param(WIDE, "bf16", 2048, 512, 30_000_000, marks=pytest.mark.folders),
        (WIDE, "q8_0", 2048, 1024, 30_000_000),
        pytest.param(DEEP, "bf16", 3072, 512, 0, marks=pytest.mark.folders),
        (WINDOWS, "bf16", 16384, 4096, 30_000_000),
    ],
    ids=["wide", "wide, q8_0, long steps", "deep", "windows"],
)
def test_a_long_prompt_stays_within_the_smallest_limit(tmp_path, sizes, kv, context, prefill_rows, copies):
    """A prompt that fills its context, with the attention that tokens receive, peaks below the smallest limit.

    That limit has no bytes for torch's copies of keys, where a model has as many heads as to notice.
    """
    model_type = "mixtral" if sizes is WINDOWS else "qwen3_moe"
    model = random_model(model_type, max_position_embeddings=context, **sizes)
    source = save(model, tmp_path / "source", fused=False)
    convert_checkpoint(source, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    arguments = ("-c", CHILD, tmp_path / "store", kv, context, prefill_rows)
    for _ in range(3):  # what malloc keeps of small parts differs by a tenth from process to process
        with programs() as start:
            process = start(*arguments, fresh=sizes is DEEP)
            out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        peak, limit = json.loads(out)
        if peak <= limit:
            break
    assert 0 < peak <= limit
    store = StoreModel.open(tmp_path / "store").with_kv(KVFormat(kv, kv))
    if sizes is WINDOWS:
        assert limit < store.shape.kv.without_windows().bytes_for(context)
    copied = replace(store, shape=replace(store.shape, compiled_attention=False))
    with_copies = copied.plan(vram_limit=None, context=context, prefill_rows=prefill_rows).minimum_vram_bytes
    assert with_copies - limit > copies
