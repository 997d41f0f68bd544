"""Engines whose sequences agree on experts (--lynx): changes of a step, parts that may not change, and counts."""

from __future__ import annotations

import pytest
import torch
from steps import decoded_together

import edgemoe
from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.experts.step import Study
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.remapping import Remapping

PROMPTS = [[5, 9, 200], [17, 3, 88, 41, 250], [60], [7, 7, 120, 33, 2, 90]]
DECODED = [[11, 250, 42], [99, 7, 180], [64, 12, 5], [201, 31, 77]]
"""Of each prompt, the tokens after it. No prompt has as many tokens as there are sequences."""


def together(engine: Engine) -> torch.Tensor:
    """Logits of the prompts' next tokens, one of each in a step. The engine's use of experts is theirs alone."""
    return decoded_together(engine, PROMPTS, DECODED, engine.take_use)


def alone(engine: Engine) -> torch.Tensor:
    """Logits [sequences, steps, vocabulary] of the last prompt's end and of single tokens."""
    rows = []
    for prompt, tokens in zip(PROMPTS, DECODED, strict=True):
        sequence = engine.sequences.new()
        of = [engine.prefill(sequence, prompt)]
        of += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in tokens]
        engine.sequences.end(sequence)
        rows.append(torch.stack(of))
    return torch.stack(rows)


def test_prompts_and_single_sequences_keep_every_bit(open_engine, tiny_store):
    """Steps of one token and steps of a prompt are not remapped, and nothing of them is counted."""
    engine = open_engine(tiny_store, level=4, parallel=4, remapping=Remapping())
    assert torch.equal(alone(engine), alone(open_engine(tiny_store, level=4, parallel=4)))
    assert engine.take_use().agreement == {"active_before": 0, "active": 0, "remapped": 0}


@pytest.mark.e2e
@pytest.mark.parametrize("limits", [{"experts": 3}, {"experts": 5, "dram_experts": 4, "speculate": "full"}])
def test_limits_do_not_change_a_bit(open_engine, tiny_store, limits):
    """The agreement of tokens does not depend on resident experts or look-ahead."""
    how = {"level": 4, "parallel": 4, "remapping": Remapping(8, 4)}
    assert torch.equal(
        together(open_engine(tiny_store, **how, **limits)), together(open_engine(tiny_store, **how))
    )


def test_fewer_experts_are_used_and_counted(open_engine, tiny_store):
    """Experts of a step before and after, and pairs that changed, agree with the choices that a watcher sees."""
    seen: list[torch.Tensor] = []

    def run(remapping: Remapping | None) -> tuple[list[torch.Tensor], dict[str, int]]:
        engine = open_engine(tiny_store, level=4, parallel=4, remapping=remapping)
        seen.clear()
        engine.watch(
            lambda layer, chosen: seen.append(chosen.clone()) if len(chosen) == len(PROMPTS) else None
        )
        together(engine)
        return list(seen), engine.take_use().agreement

    before, nothing = run(None)
    after, counts = run(Remapping(8, 4))
    assert nothing == {"active_before": 0, "active": 0, "remapped": 0}
    assert counts["active"] == sum(len(chosen.unique()) for chosen in after)
    assert all(len(set(row)) == 2 for chosen in after for row in chosen.tolist())
    # The first layer of the first step has the same inputs in both.
    first = sum(
        len(set(new) - set(old)) for old, new in zip(before[0].tolist(), after[0].tolist(), strict=True)
    )
    assert 0 < first <= counts["remapped"]
    assert counts["active"] < counts["active_before"]


def test_modules_agree_as_the_kernel_does(open_engine, tiny_store):
    """Through modules a step's choices are Remapping.choose of their routers' logits, with weights of these."""
    remapping = Remapping(8, 4)
    engine = open_engine(tiny_store, level=4, parallel=4, remapping=remapping)
    fused = together(engine)
    engine.by_modules()
    seen = []

    def check(module: object, inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        logits, gates, chosen = output
        if len(chosen) == len(PROMPTS):
            assert torch.equal(chosen, remapping.choose(logits, 2))
            weights = logits.float().softmax(1).gather(1, chosen)
            torch.testing.assert_close(
                gates.float(), weights / weights.sum(1, keepdim=True), rtol=0.01, atol=0
            )
            seen.append(chosen)

    for layer in engine.model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(check)
    through = together(engine)
    assert len(seen) == 2 * len(DECODED[0])
    assert engine.take_use().agreement["active_before"] > 0
    assert (through - fused).norm() < 0.03 * fused.norm()


def test_settings_can_turn_it_on_and_off(open_engine, tiny_store):
    engine = open_engine(tiny_store, level=4, parallel=4)
    off, settings = together(engine), engine.settings
    engine.configure(settings.with_(remapping=Remapping(8, 4)))
    assert not torch.equal(together(engine), off)
    engine.configure(settings)
    assert torch.equal(together(engine), off)


def test_one_sequence_alone_is_refused(tiny_store):
    with pytest.raises(UserError, match="several sequences"):
        edgemoe.load(tiny_store, lynx=True)


def test_an_answer_counts_its_steps(tiny_store):
    """Answers that ran together say how many experts their steps would have used, and used."""
    with edgemoe.load(tiny_store, lynx=True, lynx_alpha=8, lynx_beta=4, parallel=3, exact=4) as model:
        futures = [model.submit(prompt, max_new_tokens=6, temperature=0) for prompt in ("fox", "dog", "over")]
        answers = [future.result() for future in futures]
    assert all(answer.lynx for answer in answers)
    assert max(answer.lynx["active_before"] for answer in answers) > 0
    with edgemoe.load(tiny_store, exact=4) as model:
        assert model.generate("fox", max_new_tokens=2).lynx is None


def test_a_rule_chooses_in_the_routers_place(open_engine, tiny_store):
    """Inside the block every step has the rule's experts, of one token too; after it the bits are as before."""
    engine, seen = open_engine(tiny_store, level=4, parallel=4), []
    before = alone(engine)

    def last(layer: int, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        seen.append((layer, len(logits)))
        return logits.float().argsort(dim=1)[:, :top_k]

    chosen: list[torch.Tensor] = []
    engine.watch(lambda layer, experts: chosen.append(experts.clone()))
    with engine.studied(Study(reroute=last)):
        assert not torch.equal(alone(engine), before)
        assert {layer for layer, _ in seen} == {0, 2}
        assert {rows for _, rows in seen} == {1, *map(len, PROMPTS)}
        assert len(chosen) == len(seen)
    assert engine.take_use().agreement["remapped"] > 0
    assert torch.equal(alone(engine), before)


def test_a_rule_that_is_the_routers_own_keeps_the_modules_bits(open_engine, tiny_store):
    """Gate weights of the same experts are made as the routers make them."""
    engine = open_engine(tiny_store, level=4, parallel=4)
    fused = together(engine)
    with engine.studied(Study(reroute=lambda layer, logits, top_k: logits.float().topk(top_k).indices)):
        own = together(engine)
    assert (own - fused).norm() < 0.03 * fused.norm()


def test_only_routers_with_scores_can_be_ruled(open_engine, tiny_store, monkeypatch):
    engine = open_engine(tiny_store, level=4)
    monkeypatch.setitem(engine.store.config, "model_type", "phimoe")
    with pytest.raises(UserError, match="for --study"), engine.studied(Study(reroute=lambda *step: step[1])):
        pass
