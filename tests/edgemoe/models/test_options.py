"""Options without effect are refused where settings are made of them, and --study is read."""

from __future__ import annotations

import pytest
from device_double import DoubleDevice
from engine_rig import in_planes, limited

from edgemoe.errors import UserError
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.study import parse_studies
from edgemoe.models.plans.division import Division, plan_levels
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings

RANKING = ({"depth": "equal"}, {"critical": "ceil"}, {"importance": "load"}, {"retention": 0.9})


def flags(option: dict[str, object]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in option.items())


@pytest.mark.parametrize(
    "levels", [{"levels": "8/4/2/0"}, {"levels": "4/2", "bits": 3.5}, {"tpot_target": "50ms"}]
)
@pytest.mark.parametrize("option", RANKING[:3], ids=flags)
def test_rules_for_two_levels_are_refused_where_levels_go_by_damage(levels, option):
    """With three or more levels, with bits or a time; the option is named, and without it nothing is refused."""
    with pytest.raises(UserError, match=f"for {flags(option)}, got .* which goes by damage: leave it out"):
        run_settings(8, **levels, **option)
    run_settings(8, **levels)
    run_settings(8, levels="4/2", **option)


def test_the_papers_rule_is_the_paper():
    """--rule paper stands for all of DyMoE's rules, of which options replace single ones."""
    paper = run_settings(8, levels="8/4/2/0", rule="paper", retention=0.75)
    assert not paper.priced
    assert (paper.importance, paper.critical, paper.depth) == ("heavy-hitters", "ceil", "cosine")
    assert (paper.eviction, paper.promotion, paper.scan) == ("lru-pool", "whole", "off")
    assert paper.name == "8/4/2/0 r 0.75 by paper"
    other = run_settings(8, levels="8/4/2/0", rule="paper", importance="load", eviction="lfru")
    assert (other.importance, other.critical, other.eviction) == ("load", "ceil", "lfru")
    damage = run_settings(8, levels="4/2", rule="damage")
    assert (damage.priced, damage.mean_bits) == (True, 3.5)
    assert run_settings(8, levels="4/2").rule is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"levels": "8/4/2/0", "rule": "paper", "bits": 3.5},
            "levels by retention, for --rule paper, got --bits",
        ),
        ({"rule": "paper", "tpot_target": "50ms"}, "for --rule paper, got --tpot-target"),
        ({"levels": "4", "rule": "paper"}, "two or more levels for --rule paper"),
        ({"levels": "4/2", "rule": "paper", "policy": "hotness"}, "--policy dymoe for --rule paper"),
        ({"levels": "4/2", "rule": "other"}, "--rule damage or paper, got 'other'"),
        (
            {"levels": "4/2", "rule": "damage", "importance": "load"},
            "for --importance load, got .* by damage",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_rules_that_contradict_other_options_are_refused(options, said):
    """The message names the option that contradicts the rule."""
    with pytest.raises(UserError, match=said):
        run_settings(8, **options)


def test_critical_look_ahead_counts_critical_experts():
    """There --depth and --critical have an effect, whatever decides the levels."""
    for option in RANKING[:2]:
        settings = run_settings(8, levels="8/4/2/0", speculate="critical", **option)
        assert {name: getattr(settings, name) for name in option} == option


@pytest.mark.parametrize("option", RANKING, ids=flags)
def test_ranking_is_refused_next_to_hotness(option):
    """Levels follow use alone there; the message says which option to leave out."""
    wanted = (
        f"--policy dymoe for {flags(option)}, got --policy hotness, which ranks by use alone: leave it out"
    )
    with pytest.raises(UserError, match=wanted):
        run_settings(8, policy="hotness", levels="4/2", **option)


def test_copies_into_a_device_need_one(tiny_store):
    """--in-place off is refused on a CPU, by every command that plans memory; `on`, the default, is not."""
    store, settings = StoreModel.open(tiny_store), RunSettings()
    with pytest.raises(UserError, match="a GPU, for --in-place off, got --device cpu: leave it out"):
        store.plan(vram_limit=None, settings=settings.with_(in_place="off"))
    store.plan(vram_limit=None, settings=settings)


@pytest.mark.parametrize("mode", ["base", "full", "critical"])
def test_look_ahead_needs_reads(tiny_store, mode):
    """On a device whose second tier has every expert nothing is read ahead; with fewer, or copied first, it is."""
    store = in_planes(tiny_store, DoubleDevice())
    for dram, others, refused in ((16, {}, True), (3, {}, False), (16, {"in_place": "off"}, False)):
        plan = limited(store, RunSettings.uniform(4), 6, dram)
        division = Division(plan.vram_limit_bytes, plan.dram_limit_bytes, plan.context)

        def choose(level, mode=mode, others=others, **fits):
            return run_settings(level, exact=4, speculate=mode, **others)

        if refused:
            with pytest.raises(UserError, match=f"for --speculate {mode}, got a --dram-limit that has all"):
                plan_levels(store, choose, division)
        else:
            assert plan_levels(store, choose, division)[1].speculate == mode
    plan_levels(store, lambda level, **fits: run_settings(level, exact=4), division)


def test_studies_are_read():
    """Each value has the type of its option; options that are not given stay None."""
    read = parse_studies(["depth=equal", "heavy-hitters=0.25", "hot-warmup=3", "renormalise=on"])
    assert (read.depth, read.heavy_hitters, read.hot_warmup, read.renormalise) == ("equal", 0.25, 3, True)
    assert (read.critical, read.hotness) == (None, None)
    assert not parse_studies(["renormalise=off"]).renormalise
