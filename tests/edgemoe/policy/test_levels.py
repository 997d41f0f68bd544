"""Levels per token and expert, and the experts that an engine reads and computes at them."""

from __future__ import annotations

import pytest
import torch
from damages import a_damage
from integrity import check_integrity
from pairwise import pairwise

from edgemoe.errors import UserError
from edgemoe.experts.assignments import without_skipped
from edgemoe.experts.use import ExpertUse, fraction_at, mean_bits
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.importance import expert_importance
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings

INDEX = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]])
WEIGHTS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(4)).tolist()


def policy(levels, retention=0.5, **changes):
    settings = RunSettings(levels=levels, retention=retention, **changes)
    return LevelPolicy(settings, layers=range(3), experts=8, damage=a_damage(3, 8))


def test_decode_goes_by_each_tokens_own_gates():
    """Last layer at r = 0.75: r(l) = 0.5, so each token's two largest of four gates are critical (eq. 3)."""
    got = policy((4, 2), 0.75).levels(2, INDEX, WEIGHTS, None, decode=True)
    assert got.tolist() == [[4, 4, 2, 2], [2, 2, 4, 4]]
    first = policy((4, 2), 0.75).levels(0, INDEX, WEIGHTS, None, decode=True)
    assert set(first.flatten().tolist()) == {4}


def test_prefill_gives_an_expert_one_level():
    """Six distinct experts, r(l) = 0.5: the three with most gate weight (0, 1, 5) are critical for every token."""
    got = policy((4, 0), 0.75, importance="gate").levels(2, INDEX, WEIGHTS, None, decode=False)
    assert got.tolist() == [[4, 4, 0, 0], [4, 4, 0, 4]]


def test_heavy_hitters_decide_before_gate_weights():
    """Only token 1 is a heavy hitter: its experts 0, 1, 4, 5 come before 2 and 3 (eq. 2)."""
    chosen = policy((4, 2), 0.8, importance="heavy-hitters", heavy_hitters=0.5, critical="ceil")
    got = chosen.levels(1, INDEX, WEIGHTS, torch.tensor([0.5, 0.0]), decode=False)
    assert got[1].tolist() == [4, 4, 4, 4]
    assert got[0].tolist() == [4, 4, 4, 2]  # ceil(0.8 * 6) = 5: expert 2's gate breaks the tie with 3


def test_the_papers_rule_has_a_threshold_for_each_level():
    """Last layer at r = 0.75: r(l) = 0.5. Of four experts half are above 0, a quarter above 2 and an eighth, so one, at
    8; of a prompt's six experts 3, 2 and 1, by its only heavy hitter."""
    rule = policy((8, 4, 2, 0), 0.75, rule="paper", critical="ceil", importance="heavy-hitters")
    assert rule.levels(2, INDEX, WEIGHTS, None, decode=True).tolist() == [[8, 2, 0, 0], [0, 0, 2, 8]]
    assert rule.levels(0, INDEX, WEIGHTS, None, decode=True).unique().tolist() == [8]
    got = rule.levels(2, INDEX, WEIGHTS, torch.tensor([0.9, 0.0]), decode=False)
    assert got.tolist() == [
        [8, 4, 0, 0],
        [8, 4, 0, 2],
    ]  # experts 0, 1 and 5, by their gates where hits are equal
    assert rule.decode_rule(2, 4).by_place(4) == [8, 2, 0, 0]


def test_the_papers_look_ahead_reads_its_levels():
    """Predicted experts have the levels of their order, but never 8; the ones at 0 are not read."""
    rule = policy((8, 4, 2, 0), 0.75, rule="paper", critical="ceil", speculate="full")
    assert rule.predicted(2, [[5, 1, 0, 7]]) == {5: 4, 1: 2}
    alone = policy((4,), 0.75, rule="paper", critical="ceil", speculate="full")
    assert alone.predicted(2, [[5, 1]]) == {5: 4, 1: 4}


@pytest.mark.parametrize("critical", ["ceil", "carry"])
def test_a_layer_keeps_an_expert(critical):
    """At r = 0.5 the cosine ends at 0: one expert of the last layer stays high, in decode and in prefill."""
    last = policy((4, 0), 0.5, critical=critical)
    assert last.levels(2, INDEX, WEIGHTS, None, decode=True).tolist() == [[4, 0, 0, 0], [0, 0, 0, 4]]
    assert last.levels(2, INDEX, WEIGHTS, None, decode=False).tolist() == [[4, 0, 0, 0], [4, 0, 0, 0]]
    low = policy((4, 2), 0.01, critical=critical)
    for layer in range(3):
        assert (low.levels(layer, INDEX, WEIGHTS, None, decode=True) == 4).sum(1).tolist() == [1, 1]


def test_the_rest_is_carried_over_layers():
    """Top-2, r = 0.75 over three layers: 2, 1.5 and 1 critical experts; ceil gives the middle layer 2, carry 1."""
    chosen, gates = torch.tensor([[3, 6]]), torch.tensor([[0.6, 0.4]])
    for critical, want in (("ceil", [2, 2, 1]), ("carry", [2, 1, 1])):
        rule = policy((4, 2), 0.75, critical=critical)
        levels = [rule.levels(layer, chosen, gates, None, decode=True) for layer in range(3)]
        assert [int((one == 4).sum()) for one in levels] == want
        assert [rule.decode_rule(layer, 2).counts for layer in range(3)] == [(count,) for count in want]


@pytest.mark.parametrize("layers", [range(1, 5), range(3, 12), range(0, 8, 2)])
@pytest.mark.parametrize("depth", ["cosine", "equal"])
def test_the_mean_is_over_layers_with_experts(layers, depth):
    """Dense layers before or between others change neither the mean retention nor the first one's."""
    rule = LevelPolicy(RunSettings(levels=(4, 2), retention=0.75, depth=depth), layers, experts=64)
    critical = [rule.decode_rule(layer, 8).counts[0] for layer in layers]
    assert sum(critical) / len(critical) / 8 == pytest.approx(0.75, abs=1 / 8 / len(critical))
    assert critical[0] == (8 if depth == "cosine" else 6)


def test_four_levels_skip_only_the_negligible():
    """A gate far below the mean is skipped, one far above it gets the most bits."""
    weights = torch.tensor([[0.94, 0.05, 0.0099, 0.0001]])
    got = policy((8, 4, 2, 0), 0.9).levels(1, INDEX[:1], weights, None, decode=True)[0].tolist()
    assert got[0] == 8
    assert got[3] == 0
    assert got == sorted(got, reverse=True)


def test_predicted_experts_have_the_levels_of_the_schedule():
    """The likeliest experts get the high level, the rest the low one or none; 8 is never predicted next to 4."""
    experts = [5, 2, 7, 0]
    assert policy((4, 2), 0.75).predicted(2, [experts]) == {5: 4, 2: 4, 7: 2, 0: 2}
    assert policy((4, 0), 0.75).predicted(2, [experts]) == {5: 4, 2: 4}
    assert policy((4,), 1.0).predicted(2, [experts]) == dict.fromkeys(experts, 4)
    assert set(policy((8, 4, 2, 0), 0.75).predicted(2, [experts]).values()) == {4, 2}
    rows = policy((4, 2), 0.75).predicted(2, [[5, 2, 7, 0], [7, 1, 5, 3]])
    assert rows == {5: 4, 7: 4, 2: 4, 1: 4, 0: 2, 3: 2}
    assert list(rows)[:4] == [5, 7, 2, 1]


def test_the_rules_own_levels_are_read_ahead():
    """Levels of the rule replace levels by order: at most the highest that is read ahead, the higher of two rows."""
    rows, levels = [[5, 2, 7, 0], [7, 1, 5, 3]], [[8, 2, 0, 2], [2, 4, 4, 0]]
    found = policy((8, 4, 2, 0), 0.75).predicted(2, rows, levels)
    assert found == {5: 4, 7: 2, 2: 2, 1: 4, 0: 2}
    assert list(found) == [5, 7, 2, 1, 0]


def test_critical_look_ahead_takes_the_top_t():
    """Eq. 7 and 8: of four predicted, t = ceil(0.5 * 4) = 2 in the last layer; with one level, all."""
    experts = [5, 2, 7, 0]
    for levels, critical in (((4, 2), 2), ((4, 0), 2), ((4,), 4)):
        rule = policy(levels, 0.75, speculate="critical", critical="ceil")
        assert rule.predicted(2, [experts]) == dict.fromkeys(experts[:critical], 4)
        assert list(rule.taken(2, experts)) == experts[:critical]
    assert list(policy((4, 2), 0.75).taken(2, experts)) == experts


def test_skipped_weights_by_hand():
    """Two of four are skipped: 0.6 of 1.0 is left, or scaled back to 1.0."""
    weights, levels = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[4, 0, 4, 0]])
    plain = without_skipped(weights, levels, renormalise=False)
    assert plain[0].tolist() == pytest.approx([0.4, 0, 0.2, 0])
    scaled = without_skipped(weights, levels, renormalise=True)
    assert scaled[0].tolist() == pytest.approx([0.4 / 0.6, 0, 0.2 / 0.6, 0])
    nothing = without_skipped(weights, torch.zeros_like(levels), renormalise=True)
    assert nothing[0].tolist() == [0, 0, 0, 0]


def test_use_by_hand():
    """Three pairs at 4 and one skipped: 3.375 bits per weight, three quarters critical."""
    use = ExpertUse()
    use.add([(4, 8, 3), (0, 0, 1)])
    both = use + use
    assert mean_bits(both.scheduled) == mean_bits(use.scheduled) == 3 * 4.5 / 4
    assert fraction_at(both.scheduled, 4) == 0.75
    assert mean_bits({}) is fraction_at({}, 4) is None
    assert (both.reused, both.experts) == (2, {8: 2, 0: 2})
    assert mean_bits(use.experts) == 8.5 / 2


def run(engine, tokens=PROMPT, *, rest=()):
    sequence = engine.sequences.new()
    logits = engine.prefill(sequence, tokens)
    for token in rest:
        logits = engine.step(Step((Segment(sequence, (token,)),)))[0]
    engine.sequences.end(sequence)
    return logits


def test_skipped_experts_are_neither_read_nor_computed(open_engine, tiny_store):
    """At 4/0 the requests and the resident experts are the ones computed at level 4 alone."""
    engine = open_engine(tiny_store, levels=(4, 0), retention=0.5)
    run(engine)
    counts, use = engine.take_counts(), engine.take_use()
    assert use.experts[0] > 0
    assert counts.requests == use.experts[4]
    assert set(engine.vram.resident().values()) == {4}
    assert len(engine.vram.resident()) == use.experts[4]


@pytest.mark.e2e
@pairwise(levels=[(4, 2), (4, 0), (8, 4, 2, 0)], speculate=["off", "full"], limit=[(2, 0), (3, 4), (7, 0)])
def test_scheduled_levels_give_the_same_bits_under_every_limit(
    open_engine, tiny_store, levels, speculate, limit
):
    """An exact engine's bits do not depend on residency, eviction or look-ahead."""
    how = {"levels": levels, "retention": 0.6, "exact": True}
    want = run(open_engine(tiny_store, **how), rest=(5, 9, 5))
    experts, dram = limit
    engine = open_engine(tiny_store, experts=experts, dram_experts=dram, speculate=speculate, **how)
    assert torch.equal(run(engine, rest=(5, 9, 5)), want)
    for tier in (engine.vram, engine.dram):
        if tier is not None:
            check_integrity(tier)


def test_retention_one_is_the_high_level(open_engine, tiny_store):
    """At r = 1 nothing is sub-critical: the answer is as at the high level alone."""
    want = run(open_engine(tiny_store, level=4), rest=(5, 9))
    assert torch.equal(run(open_engine(tiny_store, levels=(4, 0), retention=1.0), rest=(5, 9)), want)
    lower = run(open_engine(tiny_store, levels=(4, 0), retention=0.5), rest=(5, 9))
    assert not torch.equal(lower, want)


def test_tokens_under_the_decode_policy_equal_single_steps(open_engine, tiny_store):
    """all_logits(decode=True) chooses levels by token: logits equal single steps', to rounding."""
    how = {"levels": (4, 0), "retention": 0.75, "exact": True}
    engine = open_engine(tiny_store, **how)
    sequence = engine.sequences.new()
    singly = torch.stack([engine.step(Step((Segment(sequence, (t,)),)))[0] for t in PROMPT])
    single_use = engine.take_use()
    sequence.crop(0)
    at_once = engine.all_logits(sequence, PROMPT, decode=True)
    together = engine.take_use()
    assert together.scheduled == single_use.scheduled
    assert (at_once - singly).norm() / singly.norm() < 0.02
    sequence.crop(0)
    prefilled = engine.all_logits(sequence, PROMPT, decode=False)
    assert (prefilled - singly).norm() / singly.norm() > 0.02


def test_levels_change_between_steps(open_engine, tiny_store):
    """configure: from 8 to 4/0 and back gives the first answer again; above the plan is refused."""
    engine = open_engine(tiny_store, levels=(8,))
    first = run(engine)
    settings = engine.settings
    engine.configure(settings.with_(levels=(4, 0), retention=0.5))
    assert not torch.equal(run(engine), first)
    engine.configure(settings)
    assert torch.equal(run(engine), first)
    small = open_engine(tiny_store, levels=(4,))
    with pytest.raises(UserError, match="levels of at most 4 bits"):
        small.configure(small.settings.with_(levels=(8,)))
    with pytest.raises(UserError, match="readers"):
        small.configure(small.settings.with_(readers=1))


def test_heavy_hitters_change_what_is_critical(open_engine, tiny_store):
    """Every signal leads to an answer of its own."""
    answers = [
        run(open_engine(tiny_store, levels=(4, 0), retention=0.75, importance=signal, heavy_hitters=0.2))
        for signal in ("heavy-hitters", "load", "random")
    ]
    assert len({tuple(answer.tolist()) for answer in answers}) == len(answers)


@pytest.fixture
def judged(monkeypatch):
    """The arguments and results of every choice of levels: (layer, chosen, ranks, decode, levels)."""
    calls, choose = [], LevelPolicy.levels

    def levels(self, layer, choice, gates, ranks, *, decode):
        got = choose(self, layer, choice, gates, ranks, decode=decode)
        calls.append((layer, choice, ranks, decode, got))
        return got

    monkeypatch.setattr(LevelPolicy, "levels", levels)
    return calls


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_prompts_last_token_alone_is_judged_as_a_prompt(open_engine, tiny_store, judged, tokens):
    """A prompt's step of one token ranks experts by the prompt's signal; the new token after it by its gates."""
    how = {"levels": (4, 2), "retention": 0.5, "depth": "equal", "importance": "random"}
    engine = open_engine(tiny_store, exact=True, prefill_rows=8, **how)
    judged.clear()
    sequence = engine.sequences.new()
    engine.prefill(sequence, PROMPT[:tokens])
    assert [(len(chosen), decode) for _, chosen, _, decode, _ in judged[-2:]] == [(1, False)] * 2
    for _, chosen, _, _, levels in judged[-2:]:
        order = expert_importance("random", chosen, torch.zeros(1, 2), None, 0.5, 8)[chosen[0]]
        assert levels[0].tolist() == ([4, 2] if order[0] > order[1] else [2, 4])
    engine.take_use()
    before = len(judged)
    engine.step(Step((Segment(sequence, (5,)),)))
    assert engine.take_use().scheduled == {4: 2, 2: 2}
    assert all(decode and levels[0].tolist() == [4, 2] for *_, decode, levels in judged[before:])


@pytest.mark.e2e
@pytest.mark.parametrize("signal", ["heavy-hitters", "heavy-hitters-mean"])
def test_a_long_prompt_is_ranked_over_all_its_steps(open_engine, tiny_store, judged, signal):
    """The last step's ranks are as where the whole prompt is one step, after earlier turns too.

    At r = 1 levels are the same however the prompt is cut, so attention is too, to rounding.
    """
    how = {"levels": (4, 2), "retention": 1.0, "importance": signal}
    ranks = []
    for rows in (32, 8):
        engine = open_engine(tiny_store, prefill_rows=rows, **how)
        sequence = engine.sequences.new()
        engine.prefill(sequence, PROMPT[:4])
        engine.step(Step((Segment(sequence, (7,)),)))
        judged.clear()
        engine.prefill(sequence, PROMPT)
        assert len(judged) == 2 * -(-len(PROMPT) // rows)
        ranks.append([given[-5:] for _, _, given, _, _ in judged[-2:]])
        engine.sequences.end(sequence)
    of_all = len(PROMPT) + 5
    for whole, cut in zip(*ranks, strict=True):
        assert ((whole - cut).abs() * of_all).max() <= 1.01  # two nearly equal tokens may change places
        alone = torch.arange(5) / 5
        assert not torch.equal(cut, alone)
