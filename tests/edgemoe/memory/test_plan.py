"""The plan: limits divided to the byte, or refused with the smallest sufficient limit."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest
import torch
from availability import needs_native
from damages import a_damage, random_gates
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.console.sizes import format_least, format_size, parse_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import DoesNotFit
from edgemoe.kv.blocks import BLOCK_ROWS
from edgemoe.kv.formats import KVFormat
from edgemoe.kv.shape import KVShape, LinearState
from edgemoe.machine import process
from edgemoe.memory.block_counts import count_blocks, fraction_at
from edgemoe.memory.describe import plan_lines, start_line
from edgemoe.memory.limits import Limits
from edgemoe.memory.make_plan import make_plan
from edgemoe.memory.model_shape import ModelShape, PlannedModel
from edgemoe.memory.split import MINIMUM_EXPERTS
from edgemoe.memory.workspace import long_step_bytes, scored_rows, workspace_bytes
from edgemoe.models.options.groups import LimitOptions
from edgemoe.models.plans.division import Division, parse_limits, plan_levels, within_memory
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import BLOCK, BlockKind
from edgemoe.storage.record.forms import MergedForm
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.store.calibration import CALIBRATION_NAME

GEOMETRY = RecordGeometry((MatrixSpec.of("gate_up", 1536, 2048), MatrixSpec.of("down", 2048, 768)), 8)
FORM = MergedForm(GEOMETRY, LAYOUTS["cpu-avx2"], LAYOUTS["cpu-avx2"])
SHAPE = ModelShape(
    layers=16,
    experts=2048,
    experts_per_layer=128,
    top_k=8,
    hidden=2048,
    intermediate=768,
    heads=32,
    kv=KVShape(tuple(range(16)), heads=4, key_dim=128, value_dim=128),
    widest=4096,
    vocab=32000,
    dense_bytes=875_000_000,
)

MODEL = PlannedModel(SHAPE, GEOMETRY, FORM)

DEMO_FRACTIONS = {0.5: (0.545, 0.088), 0.75: (0.590, 0.106), 0.9: (0.650, 0.141)}
"""Retention -> fractions at 4 bits or more and at 8, of unskipped experts on the demo calibration's 2,048 tokens."""


def plan(**changes):
    settings = RunSettings(levels=changes.pop("levels", (4,)), retention=changes.pop("retention", 1.0))
    limits = Limits(**{"vram": 3_000_000_000, "context": 1024} | changes)
    return make_plan(MODEL, limits, settings)


def table(plan):
    return "\n".join(plan_lines(plan, RunSettings(levels=plan.levels)))


def workspace_of(shape, context):
    return workspace_bytes(PlannedModel(shape, GEOMETRY, FORM), Limits(None, context))


@given(
    limit=st.integers(1, 20_000_000_000),
    level=st.sampled_from([8, 4, 2]),
    context=st.integers(2, 8192),
)
def test_a_plan_adds_up_or_is_refused_with_a_minimum_that_works(limit, level, context):
    """Purposes add up to the limit and experts fit; a refusal's minimum is sufficient, one byte less is not."""
    try:
        made = plan(vram=limit, levels=(level,), context=context)
    except DoesNotFit as refused:
        assert limit < refused.minimum
        assert refused.exit_code == 3
        named = str(refused).partition(" ")[2].split()[1]  # expected --vram-limit SIZE or more
        assert refused.minimum <= parse_size(named) <= 1.01 * refused.minimum + 1
        smallest = plan(vram=refused.minimum, levels=(level,), context=context)
        assert smallest.vram_experts == MINIMUM_EXPERTS
        with pytest.raises(DoesNotFit):
            plan(vram=refused.minimum - 1, levels=(level,), context=context)
        return
    parts = (
        made.dense_bytes
        + made.kv_bytes
        + made.workspace_bytes
        + made.long_step_bytes
        + made.staging_bytes
        + made.plane_bytes
    )
    assert parts == made.vram_limit_bytes == limit
    assert MINIMUM_EXPERTS <= made.vram_experts <= SHAPE.experts
    assert made.vram_experts * FORM.bytes_at(level) <= made.plane_bytes
    assert made.minimum_vram_bytes <= limit


def test_a_step_has_memory_for_what_a_head_projects():
    """More heads of queries: each row has their numbers and their results, bf16, and the product's float32 copies."""
    few = dataclasses.replace(SHAPE, compiled_attention=True, top_k=1, vocab=1000)
    heads, rows = 32, 2048
    taken = [workspace_of(dataclasses.replace(few, heads=few.heads * times), rows) for times in (2, 3)]
    row_bytes = heads * few.kv.key_dim * (2 + 2 + 4 + 2)
    assert taken[1] - taken[0] == min(rows, BLOCK_ROWS) * row_bytes


def test_kv_bytes_by_hand():
    """Keys and values, 16 layers, 4 heads of 128, bf16, 1024 tokens."""
    assert plan().kv_bytes == 2 * 16 * 4 * 128 * 2 * 1024


@pytest.mark.parametrize("parallel", [2, 8, 32])
def test_a_plan_for_several_sequences(parallel):
    """KV, rows of logits and fused decode's rows grow with the sequences; the purposes still add up to the limit."""
    one, many = plan(), plan(parallel=parallel)
    assert many.kv_bytes == parallel * one.kv_bytes
    logits, rows = (parallel - 1) * SHAPE.vocab * 6, parallel * SHAPE.top_k * SHAPE.hidden * 4
    assert many.workspace_bytes == one.workspace_bytes + logits + rows
    parts = many.dense_bytes + many.kv_bytes + many.workspace_bytes + many.long_step_bytes + many.plane_bytes
    assert parts == many.vram_limit_bytes
    assert f"{parallel} conversations of 1024 tokens" in table(many)
    with pytest.raises(DoesNotFit, match=f"1024 tokens of context of {parallel} sequences"):
        plan(parallel=parallel, vram=1_000_000)


def test_rows_that_are_scored_at_once_fit_the_workspace():
    """Their logits are below the workspace, and so is what sampling one of them takes; never fewer than one."""
    made = plan()
    assert 1 < made.scored_rows <= 512
    assert made.scored_rows * SHAPE.vocab * 6 < made.workspace_bytes
    assert plan(context=2).scored_rows >= 1


def test_a_small_head_leaves_room_for_scored_rows():
    """No more of the head is float32 at a time than it has: rows share a step where the workspace has their logits."""
    small = dataclasses.replace(
        SHAPE,
        hidden=256,
        heads=4,
        kv=KVShape((0,), heads=2, key_dim=64, value_dim=64),
        vocab=4096,
        widest=768,
    )
    assert scored_rows(PlannedModel(small, GEOMETRY, FORM), Limits(None, 512), 0) >= 64


@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
def test_the_workspace_grows_with_the_context_by_text_and_sums_of_attention_alone(kv):
    """No copy of keys, no scores of all tokens: two float32 a layer and token, eight for ranks, 256 bytes of text."""
    shape = dataclasses.replace(SHAPE, kv=dataclasses.replace(SHAPE.kv, format=KVFormat(kv, kv)))
    many = dataclasses.replace(shape, hidden=64, intermediate=64, widest=64, heads=256)  # attention dominates
    short, long = (workspace_of(many, context) for context in (1 << 17, 1 << 18))
    assert long - short == (1 << 17) * (256 + 4 * (2 * 16 + 8))
    assert short > 3 * 256 * 64 * 256 * 4  # three copies of a tile of scores


@pytest.mark.parametrize(
    ("state", "peak"),
    [
        (LinearState((0,), 8448, 4, 128, 64, 128), 105 << 20),
        (LinearState((0,), 12288, 4, 32, 128, 128), 120 << 20),
        (LinearState((0,), 8192, 4, 32, 128, 128), 92 << 20),
    ],
    ids=["Granite-4.0-H-Small", "Kimi-Linear", "Qwen3-Next"],
)
def test_the_workspace_of_a_recurrence_holds_what_a_layer_has_taken(state, peak):
    """Peaks measured over 512 rows of one layer of published sizes."""
    few = dataclasses.replace(SHAPE, hidden=64, intermediate=64, widest=64, vocab=1, top_k=1)
    shape = dataclasses.replace(few, kv=dataclasses.replace(SHAPE.kv, linear=state), compiled_states=True)
    assert peak < workspace_of(shape, 512) < 1.6 * peak + (8 << 20)


def test_the_workspace_has_room_for_an_index():
    """Its keys twice in float32 and 64 scores per token, four times, where a context has many tokens."""
    index = KVShape(tuple(range(16)), 1, 128, 0)
    shape = dataclasses.replace(SHAPE, kv=dataclasses.replace(SHAPE.kv, index=index), index_topk=2048)
    short, long = (workspace_of(shape, context) for context in (1 << 17, 1 << 18))
    plain, other = (workspace_of(SHAPE, context) for context in (1 << 17, 1 << 18))
    assert (long - short) - (other - plain) == (1 << 17) * (2 * 128 * 4 + 64 * 4 * 4)
    long_step = (SHAPE, shape)
    few, many = (long_step_bytes(each, 4096) for each in long_step)
    assert many - few == (4096 - BLOCK_ROWS) * 2048 * 4


@needs_native
@pytest.mark.parametrize("kv", ["bf16", "q8_0"])
def test_compiled_attention_takes_sums_and_integers_of_its_threads(kv):
    """No copy of keys and no scores in any format: text and sums as above, and 8 bytes per token for each thread."""
    form = dataclasses.replace(SHAPE.kv, format=KVFormat(kv, kv))
    shape = dataclasses.replace(SHAPE, kv=form, compiled_attention=True)
    short, long = (workspace_of(shape, context) for context in (1 << 22, 1 << 23))
    assert long - short == (1 << 22) * (256 + 4 * (2 * 16 + 8) + 8 * torch.get_num_threads())
    copied = workspace_of(dataclasses.replace(shape, compiled_attention=False), 1 << 13)
    assert workspace_of(shape, 1 << 13) < copied


def test_experts_resident_by_hand():
    """p4 has 2.36 MB of nibbles and 0.29 MB of parameters; level 8 adds the same amount of nibbles."""
    made = plan()
    p4, p0 = 2_359_296 + 294_912, 2_359_296
    assert made.experts_resident == {
        "8": made.plane_bytes // (p4 + p0),
        "4": made.plane_bytes // p4,
        "2": made.plane_bytes // p4,
    }


def test_without_a_limit_everything_is_resident_where_memory_allows(monkeypatch):
    """Without --vram-limit all experts fit, and the limit is exactly what they take."""
    monkeypatch.setattr("edgemoe.memory.make_plan.available_memory", lambda: 10**12)
    made = plan(vram=None)
    assert made.vram_experts == SHAPE.experts
    assert made.plane_bytes == SHAPE.experts * FORM.bytes_at(4)


def test_what_experts_leave_is_said_to_be_unused():
    """Under a limit above all that a model takes the line has the bytes of its experts, not the free ones."""
    text = table(plan(vram=40_000_000_000))
    whole = MODEL.bytes_of_all(4)
    assert re.search(
        f"experts +{format_size(whole)}: all 2048 experts fit at 4 bits; .* of the limit stays unused", text
    )
    assert "unused" not in table(plan(vram=3_000_000_000))


@pytest.mark.parametrize(
    ("levels", "vram", "text"),
    [
        (
            (4,),
            40_000_000_000,
            r"memory limit 40 GB: all 2048 experts fit at 4 bits; each is read from the disk once",
        ),
        (
            (4,),
            3_000_000_000,
            r"memory limit 3 GB: room for \d+ of 2048 experts at 4 bits; the others are read from .*",
        ),
        (
            (8, 4, 2, 0),
            3_000_000_000,
            r"memory limit 3 GB: room for \d+ of 2048 experts at 8 bits or \d+ at 4 bits; .*",
        ),
    ],
)
def test_one_line_says_what_the_limit_holds(levels, vram, text):
    """The start of a chat has the limit, and the experts that fit at the highest level and at the next one."""
    made = plan(levels=levels, retention=0.9, vram=vram)
    assert re.fullmatch(text, start_line(made))
    if vram < 40_000_000_000:
        assert str(made.experts_resident[str(levels[0])]) in start_line(made)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            RunSettings(levels=(8, 4, 2, 0), bits=3.5),
            "8, 4, 2 or 0, 3.5 on average for experts from the disk; more where",
        ),
        (
            RunSettings(levels=(4, 2), retention=0.75),
            "4 for the 75 % of experts that matter most to a token, 2 for the",
        ),
        (
            RunSettings(levels=(8, 4, 2, 0), rule="paper", retention=0.75),
            "2 for the 75 % of experts that matter most to a token, 0 for the others; 4 for about 75 % of the "
            "experts that have 2 or more; 8 for about 75 % of the experts that have 4 or more; 0 leaves an expert out",
        ),
        (RunSettings(levels=(4, 2), tpot_target=0.05), "4 or 2, as many as a token in 50 ms allows"),
        (RunSettings.uniform(4), "4"),
    ],
)
def test_the_table_says_what_chooses_bits(settings, text):
    """A mean, a share of experts, a time per token, or one level for all."""
    assert re.search(f"bits per weight +{re.escape(text)}", "\n".join(plan_lines(plan(), settings)))


def test_without_a_limit_free_memory_is_the_limit(monkeypatch):
    """Without --vram-limit on a small machine: the free memory less PROCESS_BYTES."""
    monkeypatch.setattr("edgemoe.memory.make_plan.available_memory", lambda: 4_000_000_000)
    assert plan(vram=None).vram_limit_bytes == 3_500_000_000


def test_a_dram_tier_smaller_than_an_expert_is_refused():
    """A DRAM limit that cannot hold one expert is an error instead of an option without effect."""
    with pytest.raises(DoesNotFit) as caught:
        plan(dram=1_000_000)
    assert caught.value.minimum == FORM.bytes_at(4)


def test_a_second_tier_in_ram_counts_and_costs(tiny_store, caplog):
    """Without a GPU a peak may reach both limits together, and a warning names one limit for the same memory."""
    store = StoreModel.open(tiny_store)

    def choose(max_level, *, fits):
        return RunSettings(levels=(8,))

    few = store.plan(vram_limit=None, context=64).minimum_vram_bytes
    made, _ = plan_levels(store, choose, Division(few, 100_000, 64))
    assert made.dram_blocks != {}
    assert (
        f"--vram-limit {format_least(few + 100_000)} alone takes the same memory and is faster" in caplog.text
    )
    assert made.limit_bytes(None) == few + 100_000
    assert made.limit_bytes(object()) == few  # a GPU's memory is its own
    caplog.clear()
    assert plan_levels(store, choose, Division(None, 100_000, 64))[0].dram_blocks == {}
    assert caplog.text == ""


def test_dram_holds_only_experts_missing_in_vram():
    """Tiers in RAM are exclusive: DRAM has at most the blocks for the experts that VRAM lacks."""
    made = plan(dram=10**11)
    assert made.vram_experts + made.dram_experts == SHAPE.experts


@given(
    limit=st.integers(1_500_000_000, 20_000_000_000),
    levels=st.sampled_from([(8, 4), (8, 2), (8, 4, 2, 0), (8, 0)]),
    retention=st.floats(0.5, 1),
)
def test_blocks_of_mixed_levels_fill_the_limit_but_for_one_expert(limit, levels, retention):
    """A fraction of the experts has the blocks of 8 bits; all blocks fit, and less than one expert stays free."""
    made = plan(vram=limit, levels=levels, retention=retention)
    sizes = {kind.name: kind.size for kind in FORM.kinds}
    used = sum(sizes[name] * count for name, count in made.vram_blocks.items())
    assert used <= made.plane_bytes
    assert MINIMUM_EXPERTS <= made.vram_blocks["p0"] <= made.vram_blocks["p4"] <= SHAPE.experts
    if made.vram_blocks["p0"] < SHAPE.experts:
        assert made.plane_bytes - used < sum(sizes.values())


def test_blocks_by_hand():
    """8/4 at r = 0.75: for every three p0 (2.36 MB each) four p4 (2.65 MB each), 17.7 MB for four experts."""
    made = plan(levels=(8, 4), retention=0.75)
    fours = made.plane_bytes / (4 * 2_654_208 + 3 * 2_359_296)
    assert made.vram_blocks["p4"] == pytest.approx(4 * fours, abs=2)
    assert made.vram_blocks["p0"] == pytest.approx(3 * fours, abs=2)


@pytest.mark.parametrize(
    ("levels", "critical", "want"),
    [
        ((4, 2), "carry", 18 / 24),
        ((4, 2), "ceil", 20 / 24),
        ((4, 0), "ceil", 1),
        ((8, 4), "ceil", 20 / 24),
        ((8, 2), "ceil", 20 / 24),
    ],
)
def test_two_levels_split_by_the_schedules_own_mean(levels, critical, want):
    """Top-4, six layers, r = 0.75: r(l) M is 4, 3.8, 3.3, 2.7, 2.2 and 2, which ceil makes 20 and carry 18 of 24."""
    settings = RunSettings(levels=levels, retention=0.75, critical=critical)
    assert fraction_at(settings, levels[0], layers=6, experts=32, top_k=4) == want
    assert fraction_at(settings, 2, layers=6, experts=32, top_k=4) == 1
    if levels == (8, 2):  # the planes of 4 bits lie between the two levels
        assert fraction_at(settings, 4, layers=6, experts=32, top_k=4) == want


def test_the_papers_levels_split_by_its_thresholds():
    """Top-4, one layer, r = 0.5: ceil of 0.5, 1 and 2 experts are at 8, 4 and 2, as parts of the 2 that are kept."""
    settings = RunSettings(levels=(8, 4, 2, 0), rule="paper", retention=0.5, critical="ceil")
    got = [fraction_at(settings, level, layers=1, experts=32, top_k=4) for level in (8, 4, 2)]
    assert got == [0.5, 0.5, 1]


@pytest.mark.parametrize(("retention", "measured"), DEMO_FRACTIONS.items())
def test_four_levels_split_as_on_text(retention, measured):
    """With four levels the sample's fractions are within 0.05 of the demo model's on a text."""
    settings = RunSettings(levels=(8, 4, 2, 0), retention=retention)
    got = [fraction_at(settings, level, layers=6, experts=32, top_k=4) for level in (2, 4, 8)]
    assert got == pytest.approx([1, *measured], abs=0.05)


def test_measured_damage_splits_by_its_own_sample():
    """Known damage gives the fractions of other tokens' levels, not of typical errors."""
    settings, damage = RunSettings(levels=(8, 4, 2, 0), bits=3.4), a_damage(3, 16, tokens=2000)
    sizes = {"layers": 3, "experts": 16, "top_k": 4}
    policy, counts = LevelPolicy(settings, range(3), 16, damage), Counter[int]()
    for layer in range(3):
        chosen, gates = random_gates(4, 4000 + layer, 2000)
        counts.update(policy.levels(layer, chosen, gates, None, decode=True).flatten().tolist())
    kept = counts.total() - counts[0]
    want = [(counts[8] + counts[4] + counts[2]) / kept, (counts[8] + counts[4]) / kept, counts[8] / kept]
    got = [fraction_at(settings, level, **sizes, damage=damage) for level in (2, 4, 8)]
    assert got == pytest.approx(want, abs=0.03)
    typical = [fraction_at(settings, level, **sizes) for level in (2, 4, 8)]
    assert got != pytest.approx(typical, abs=0.03)


@pytest.mark.e2e
def test_a_calibrated_store_is_split_by_it(damageable):
    """A calibration next to the store changes the split of levels by damage; a damaged one, or two levels, does not."""
    store, by_damage = StoreModel.open(damageable), RunSettings(levels=(8, 4, 2, 0), bits=3.0)

    def blocks(settings):
        limit = store.plan(vram_limit=None, settings=settings, context=64).minimum_vram_bytes
        return store.plan(
            vram_limit=limit + 6 * store.form.bytes_at(8), settings=settings, context=64
        ).vram_blocks

    plain, ranked = blocks(by_damage), blocks(RunSettings(levels=(8, 4)))
    calibrate(store, CalibrationRequest(None, 512))
    assert blocks(by_damage) != plain
    assert blocks(RunSettings(levels=(8, 4))) == ranked
    (damageable / CALIBRATION_NAME).write_bytes(b"no calibration")
    assert blocks(by_damage) == plain


@pytest.mark.e2e
@given(
    levels=st.sampled_from([(8, 4), (4, 2, 0), (8, 4, 2), (8, 4, 2, 0)]),
    retention=st.floats(0.05, 1),
    top_k=st.integers(1, 8),
)
def test_fractions_fall_with_the_level(levels, retention, top_k):
    """A higher level never has more experts, and at r = 1 all have the highest."""
    settings = RunSettings(levels=levels, retention=retention)
    got = [fraction_at(settings, level, layers=3, experts=8, top_k=top_k) for level in (2, 4, 8)]
    assert 1 == got[0] >= got[1] >= got[2] >= 0
    full = settings.with_(retention=1)
    assert fraction_at(full, levels[0], layers=3, experts=8, top_k=top_k) == 1


def test_leftover_bytes_go_to_every_kind():
    """Where all experts fit at the highest level, every kind has a block for each, whatever the fractions."""
    kinds = [
        BlockKind(name, size * BLOCK, level) for name, size, level in (("a", 5, 2), ("b", 4, 4), ("c", 8, 8))
    ]
    fractions = dict(zip(kinds, (1.0, 0.5, 0.1), strict=True))
    assert count_blocks(17 * BLOCK * 10, fractions, 10, 2) == {"a": 10, "b": 10, "c": 10}
    assert count_blocks(17 * BLOCK * 10 - 1, fractions, 10, 2) == {"a": 10, "b": 10, "c": 9}


def test_a_plan_above_the_free_memory_shrinks(tiny_store, monkeypatch, caplog):
    """The blocks of the smaller plan fit into free memory, and a warning is logged."""
    store, settings = StoreModel.open(tiny_store), RunSettings.uniform(8)
    plan = store.plan(vram_limit=None, settings=settings, context=64)
    used, expert = plan.used_bytes(store.form), store.form.bytes_at(8)
    monkeypatch.setattr(process, "resident_bytes", lambda: 10**12)
    monkeypatch.setattr(process, "available_memory", lambda: used)
    assert within_memory(store, plan, settings) is plan
    monkeypatch.setattr(process, "available_memory", lambda: used - 3 * expert + 1)
    smaller = within_memory(store, plan, settings)
    assert smaller.vram_experts == plan.vram_experts - 3
    assert smaller.context == plan.context
    assert "fewer experts" in caplog.text
    monkeypatch.setattr(process, "available_memory", lambda: plan.dense_bytes)
    with pytest.raises(DoesNotFit):
        within_memory(store, plan, settings)


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_refusal_names_the_longest_context_that_fits(parallel):
    """The context in the message works under the limit, and 64 tokens more do not; none is named where none works."""
    limit = plan(context=2048, parallel=parallel).minimum_vram_bytes + 1
    with pytest.raises(DoesNotFit) as refused:
        plan(vram=limit, context=8192, parallel=parallel)
    named = int(re.search(r" or --context (\d+)", str(refused.value))[1])
    assert 2048 <= named < 8192
    assert plan(vram=limit, context=named, parallel=parallel).context == named
    with pytest.raises(DoesNotFit):
        plan(vram=limit, context=named + 64, parallel=parallel)
    with pytest.raises(DoesNotFit) as hopeless:
        plan(vram=SHAPE.dense_bytes, context=8192, parallel=parallel)
    assert str(hopeless.value).endswith(f"use --vram-limit {format_least(hopeless.value.minimum)}")


def test_a_refusal_names_the_most_sequences_that_fit():
    """So many sequences work, and one more does not."""
    limit = plan(context=1024, parallel=5).minimum_vram_bytes
    with pytest.raises(DoesNotFit, match=r" or --parallel 5\b"):
        plan(vram=limit, context=1024, parallel=8)


def test_a_limit_above_the_machine_gives_a_warning(monkeypatch, caplog):
    """It says what the machine has and has free, and a limit that fits; a limit within the machine gives none."""
    monkeypatch.setattr(process, "total_memory", lambda: 23_600_000_000)
    monkeypatch.setattr(process, "available_memory", lambda: 20_000_000_000)
    assert parse_limits(LimitOptions("23GB", None, "cpu")) == (23 * 10**9, 0)
    assert not caplog.messages
    assert parse_limits(LimitOptions("30GB", "31GB", "cpu")) == (30 * 10**9, 31 * 10**9)
    for option, message in zip(("--dram-limit 31", "--vram-limit 30"), caplog.messages, strict=True):
        assert message.startswith(
            f"{option} GB is more than the 23.6 GB of RAM that this machine has, of which 20 GB"
        )
        assert message.endswith("limit 17.5GB")  # nine tenths of what is free, less 500 MB of the program


def test_a_pool_has_the_bytes_of_whole_experts():
    """Under lru-pool no kind of block has a fraction: the limit is divided into experts at the highest level."""
    settings = RunSettings(levels=(8, 4, 2, 0), eviction="lru-pool")
    made = make_plan(MODEL, Limits(3_000_000_000, context=1024, dram=10**9), settings)
    for blocks, size in ((made.vram_blocks, made.plane_bytes), (made.dram_blocks, 10**9)):
        assert set(blocks) == {kind.name for kind in FORM.kinds}
        assert set(blocks.values()) == {size // FORM.bytes_at(8)}
