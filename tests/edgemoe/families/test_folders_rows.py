"""Families of `make test-folders` under exact levels: a token's bits do not depend on what else is computed with it."""

from __future__ import annotations

import random

import pytest
import torch
from family_models import SMALL, VOCABULARY
from folder_models import folder_model, save_folder_model
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from ways import FORMATS, TOKENS, WAYS

from edgemoe.families.table import TEXT_HALVES
from edgemoe.families.traits import TRAITS
from edgemoe.kernels.registry import compute
from edgemoe.models.conversion.run import convert_checkpoint

pytestmark = [
    *(pytest.mark.e2e, pytest.mark.folders, pytest.mark.filterwarnings("ignore")),
    pytest.mark.skipif(compute().name != "native", reason="other kernels sum by the rows of a call"),
]

OTHERS = [
    name
    for name in (*TRAITS, *TEXT_HALVES)
    if name not in SMALL and (name in TEXT_HALVES or CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING)
]
"""Families without a test of their own in test_families_rows.py."""


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_token_has_the_same_bits_however_it_is_computed(open_engine, tmp_path, model_type):
    """In every way, with each format of keys and values and of dense weights once."""
    source = save_folder_model(folder_model(model_type), tmp_path / "model")
    wrong = []
    for kv, bits in FORMATS:
        store = tmp_path / f"store{bits}"
        convert_checkpoint(source, store, max_level=8, layout="auto", dense_bits=bits)
        engine = open_engine(store, kv=kv, context=TOKENS + 8, parallel=3)
        for way in WAYS:
            rng = random.Random(f"{model_type} {kv} {bits} {way.__name__}")
            tokens = [rng.randint(3, VOCABULARY - 1) for _ in range(TOKENS)]
            got, want = way(engine, tokens, rng)
            if not torch.equal(got, want):
                wrong.append((kv, bits, way.__name__, float((got - want).abs().max())))
    assert wrong == []
