"""Every family under exact levels: the bits of a token do not depend on what else is computed with it."""

from __future__ import annotations

import random

import pytest
import torch
from family_models import SMALL, VOCABULARY
from ways import FORMATS, TOKENS, WAYS

from edgemoe.engine.engine import Engine
from edgemoe.kernels.registry import compute

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(compute().name != "native", reason="other kernels sum by the rows of a call"),
]


@pytest.mark.parametrize("model_type", SMALL)
def test_a_token_has_the_same_bits_however_it_is_computed(case_of, open_engine, model_type, request):
    """Logits in chunks, as an answer, in batches, after kept tokens and next to answers equal one step's.

    Each family has three of the ways, and one format of KV and of dense weights; `--configurations 42` computes all
    ways in every format.
    """
    number = list(SMALL).index(model_type)
    engines: dict[tuple[str, int], Engine] = {}
    for seed in range(request.config.getoption("--configurations")):
        rng = random.Random(f"{model_type} {seed}")
        kv, bits = FORMATS[(number + seed // len(WAYS)) % len(FORMATS)]
        if (kv, bits) not in engines:
            store = case_of(model_type).store(dense_bits=bits)
            parallel = 1 if model_type == "phimoe" else 3  # longrope positions run one sequence at a time
            engines[kv, bits] = open_engine(store, kv=kv, context=TOKENS + 8, parallel=parallel)
        tokens = [rng.randint(3, VOCABULARY - 1) for _ in range(TOKENS)]
        way = WAYS[(3 * number + seed) % len(WAYS)]
        got, want = way(engines[kv, bits], tokens, rng)
        assert torch.equal(got, want), (seed, kv, bits, way.__name__)
