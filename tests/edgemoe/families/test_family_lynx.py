"""Every family's routers, remapped: gate weights as transformers makes them, and choices within a token's groups."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native
from family_models import SMALL, blocks_of, random_model, router_of
from steps import decoded_together

from edgemoe.families.traits import TRAITS
from edgemoe.kernels.native.decode_layers import NativeDecodeLayers
from edgemoe.layers.remapped_router import remapped
from edgemoe.policy.remapping import Remapping

AGREEING = [name for name in SMALL if TRAITS[name].gate]


def choices(model_type: str, rows: torch.Tensor, **changes: object):
    """(router, its choice, the choice after the rows have agreed) of each block."""
    model, traits = random_model(model_type, **changes), TRAITS[model_type]
    for block in blocks_of(model):
        router = router_of(block)
        with torch.no_grad():
            router.weight.mul_(20)
            own = router(rows)
            normalise = bool(traits.gate.normalise(model.config))
            yield router, own, remapped(Remapping(1, 2).choose, traits.gate, router, own, normalise=normalise)


def rows(count: int) -> torch.Tensor:
    """bf16 [count, 64]."""
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(4)).bfloat16()


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", AGREEING)
def test_tokens_that_are_alike_change_nothing(model_type):
    """Equal tokens keep their own experts with transformers' own weights: the two are the same function."""
    for x in rows(12):
        for _, (_, gates, chosen), (_, our_gates, ours) in choices(model_type, x.expand(5, -1)):
            order, our_order = chosen.sort(1), ours.sort(1)
            if not torch.equal(order.values, our_order.values):
                continue  # two experts of one logit
            theirs, mine = gates.gather(1, order.indices), our_gates.gather(1, our_order.indices)
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine.float(), theirs.float(), rtol=0.02, atol=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", AGREEING)
def test_weights_of_new_experts_keep_the_routers_rule(model_type):
    """Different tokens agree on fewer experts; the likeliest stays, and a normalised token's weights keep their sum."""
    for router, (logits, gates, own), (_, made, chosen) in choices(model_type, rows(24)):
        assert len(chosen.unique()) <= len(own.unique())
        assert all(len(set(row)) == own.shape[1] for row in chosen.tolist())
        assert (made > 0).all()
        if TRAITS[model_type].gate.normalise(router_config(model_type)):
            torch.testing.assert_close(made.float().sum(1), gates.float().sum(1), rtol=0.02, atol=1e-3)
        groups = getattr(router, "num_group", None) or 1
        size = logits.shape[1] // groups
        for before, after in zip((own // size).tolist(), (chosen // size).tolist(), strict=True):
            assert groups == 1 or set(after) <= set(before)


def router_config(model_type: str):
    return random_model(model_type).config


def test_an_unnormalised_weight_is_a_part_of_the_whole_softmax():
    """With norm_topk_prob off, as OLMoE's, a new expert's weight is its probability among all experts."""
    changed = 0
    for _, (logits, _, own), (_, made, chosen) in choices("qwen3_moe", rows(24), norm_topk_prob=False):
        want = logits.float().softmax(1).gather(1, chosen)
        torch.testing.assert_close(made.float(), want, rtol=0.02, atol=1e-4)
        changed += int((own.sort(1).values != chosen.sort(1).values).sum())
    assert changed > 0


def test_a_router_of_its_own_kind_is_declared():
    """phimoe's second expert comes from masked scores, so its choice cannot be made again from one score each."""
    assert [name for name in SMALL if TRAITS[name].gate is None] == ["phimoe"]


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize("model_type", ["glm4_moe", "gpt_oss", "lfm2_moe"])
def test_tokens_of_every_router_agree_in_the_compiled_call(case_of, open_engine, monkeypatch, model_type):
    """Routers by sigmoids, in groups and with biases: the experts that modules and their hook choose, in one call."""
    engine = open_engine(case_of(model_type).store(), parallel=3, remapping=Remapping(64, 8))
    prompts, decoded = [[5, 9, 20], [17, 3], [60]], [[11, 25, 42], [9, 7, 18], [64, 12, 5]]
    calls, run = [], NativeDecodeLayers.run

    def counted(self, *how):
        calls.append(1)
        return run(self, *how)

    monkeypatch.setattr(NativeDecodeLayers, "run", counted)
    compiled = decoded_together(engine, prompts, decoded, engine.take_use)
    agreement = engine.take_use().agreement
    engine.by_modules()
    modules = decoded_together(engine, prompts, decoded, engine.take_use)
    assert len(calls) >= len(decoded[0])  # more where experts are read
    assert agreement == engine.take_use().agreement
    assert agreement["remapped"] > 0
    assert (modules - compiled).norm() < 0.03 * compiled.norm()
