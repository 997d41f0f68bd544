"""The options of `--policy hotness`: settings that they reach, refusals, and the commands' messages."""

from __future__ import annotations

import json
import re

import pytest

import edgemoe
from edgemoe.chat.set_command import Tuning, changed
from edgemoe.engine.engine import StoreModel
from edgemoe.engine.sampling import Sampling
from edgemoe.errors import UserError
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.plans.division import HOT_SEQUENCES, Division, plan_levels
from edgemoe.policy.hotness import Hotness
from edgemoe.policy.settings import RunSettings

HOT = {"policy": "hotness", "levels": "4/2"}


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, {}),
        ({"hotness": "count"}, {"signal": "count"}),
        ({"hot_half_life": 32.0}, {"half_life": 32.0}),
        ({"hot_interval": "8t"}, {"interval": 8}),
        ({"hot_interval": "2s"}, {"interval": 0, "seconds": 2.0}),
        ({"hot_interval": "500ms"}, {"interval": 0, "seconds": 0.5}),
        ({"hot_margin": 0.0}, {"margin": 0.0}),
        ({"hot_slack": 2}, {"slack": 2}),
        ({"hot_trend": 0.5}, {"trend": 0.5}),
        ({"hot_warmup": 0}, {"warmup": 0}),
        ({"hot_prompt_weight": 0.125}, {"prompt_weight": 0.125}),
        ({"hot_experts": 0}, {"experts": 0}),
        ({"migration_rate": "200MB"}, {"rate": 200e6}),
    ],
)
def test_every_option_reaches_its_setting(options, want):
    """And no other setting changes."""
    settings = run_settings(8, **HOT, **options)
    assert settings.hotness == Hotness(**want)
    assert (settings.levels, settings.scheduled, settings.exact) == ((4, 2), (2,), False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hotness": "use"}, "--hotness mass or count"),
        ({"hot_half_life": 0.0}, "--hot-half-life"),
        ({"hot_interval": "0t"}, "--hot-interval"),
        ({"hot_interval": "8"}, "a time such as 50ms"),
        ({"hot_interval": "-8t"}, "a time such as 50ms"),
        ({"hot_margin": -1.0}, "--hot-margin"),
        ({"hot_slack": -1}, "--hot-slack"),
        ({"hot_trend": float("inf")}, "--hot-trend"),
        ({"hot_warmup": -1}, "--hot-warmup"),
        ({"hot_prompt_weight": float("nan")}, "--hot-prompt-weight"),
        ({"hot_experts": -1}, "--hot-experts"),
        ({"migration_rate": "fast"}, "a size"),
        ({"migration_rate": "0"}, "--migration-rate|a size"),
        ({"levels": "4"}, "two levels above 0"),
        ({"levels": "4/0"}, "two levels above 0"),
        ({"levels": "8/4/2/0"}, "two levels above 0"),
        ({"levels": None, "exact": 4}, "two levels above 0"),
        ({"levels": None, "bits": 3.5}, "--policy hotness, got --bits"),
        ({"bits": 3.5}, "got --policy hotness, which ranks by use alone"),
        ({"retention": 0.9}, "got --policy hotness, which ranks by use alone"),
        ({"importance": "load"}, "got --policy hotness, which ranks by use alone"),
        ({"depth": "equal"}, "got --policy hotness, which ranks by use alone"),
        ({"promotion": "whole"}, "--promotion whole"),
        ({"eviction": "lru-pool"}, "--eviction lru-pool"),
    ],
)
def test_wrong_values_and_contradictions_are_refused(options, said):
    """Each refusal names what is wrong."""
    with pytest.raises(UserError, match=said):
        run_settings(8, **HOT | options)


def test_its_options_need_the_policy():
    """Without --policy hotness each of them is refused, and names itself."""
    for name, value in {"hotness": "mass", "hot_experts": 3, "migration_rate": "1MB"}.items():
        for policy in ({}, {"policy": "dymoe"}):
            with pytest.raises(UserError, match=f"--policy hotness for --{name.replace('_', '-')}"):
                run_settings(8, levels="4/2", **policy, **{name: value})


def test_automatic_levels():
    """4/2 where not every expert fits at the highest level; one level where all fit; a store of 2 bits has none."""
    assert run_settings(8, fits=False, policy="hotness").name == "4/2 hot mass"
    assert run_settings(4, fits=False, policy="hotness", hotness="count").name == "4/2 hot count"
    assert run_settings(8, policy="hotness").name == "8"
    with pytest.raises(UserError, match="a store of 2 bits"):
        run_settings(2, fits=False, policy="hotness")


@pytest.mark.parametrize(
    "words", [{"importance": "load"}, {"promotion": "whole"}, {"eviction": "lru-pool"}, {"depth": "equal"}]
)
def test_an_automatic_policy_contradicts_nothing(tiny_store, words):
    """Options that do not go with hotness leave the choice to DyMoE; so does a store of 2 bits."""
    store, how = StoreModel.open(tiny_store), {"policy": "auto", "levels": "4/2"} | words
    low = store.plan(vram_limit=None, settings=RunSettings(levels=(2,)), context=64, parallel=HOT_SEQUENCES)
    limit = low.vram_limit_bytes + 4 * 4096  # all experts at 2, four of them at 4
    for options, hot in ((how, False), ({"policy": "auto", "levels": "4/2"}, True)):
        _, settings = plan_levels(
            store,
            lambda level, options=options, **fits: run_settings(level, **options, **fits),
            Division(limit, context=64, parallel=HOT_SEQUENCES),
        )
        assert (settings.hotness is not None) == hot
    assert run_settings(2, fits=False, hot=True, policy="auto").levels == (2,)


def test_set_refuses_what_has_no_effect():
    """Refused are rankings of a token's experts, and levels that contradict hotness."""
    now = Tuning(run_settings(8, **HOT), Sampling(0, 1, 0, 1, 0, 6, frozenset({2})))
    for name, value in (("retention", "0.9"), ("importance", "load"), ("levels", "8/4/2/0"), ("exact", "4")):
        with pytest.raises(UserError):
            changed(now, name, value)
    assert changed(now, "levels", "8/4").run.hotness == now.run.hotness


@pytest.mark.e2e
def test_plan_says_who_fits(run, tiny_store):
    """All experts at 2 bits and some at 4; or some of them, with the rest read on demand."""
    options = ("plan", "-m", tiny_store, "-c", 64, "--policy", "hotness", "--levels", "4/2")
    whole = json.loads(run(*options, "--json")[1])
    fixed = whole["vram_limit_bytes"] - whole["plane_bytes"]
    for planes, line in (
        (16 * 8192 + 5 * 4096, "room for all 16 experts at 2 bits, the 5 that are used most at 4"),
        (
            16 * 8192 - 1,
            r"room for \d+ of 16 experts at 2 bits, the \d+ that are used most at 4; the others are read from the disk "
            "when they are needed",
        ),
    ):
        code, out, _ = run(*options, "--vram-limit", f"{fixed + planes}B")
        assert code == 0
        assert re.search(f"^  experts .*: {line}", re.sub(r"\n {17}", " ", out), re.M), out


@pytest.mark.e2e
def test_chat_says_what_moved(run, tiny_store):
    """In JSON and in --stats; without the policy neither has a word of it."""
    options = ("chat", "-m", tiny_store, "-p", "the fox", "-n", 40, "-c", 64, "--temperature", 0)
    hot = ("--policy", "hotness", "--levels", "4/2", "--study", "hot-interval=2t", "--study", "hot-warmup=0")
    code, out, _ = run(*options, *hot, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["hot"].keys() == {"experts", "promoted", "demoted", "deferred", "moved_bytes"}
    assert 0 < answer["hot"]["experts"] <= 16
    assert answer["hot"]["moved_bytes"] == 4096 * answer["hot"]["promoted"] <= answer["bytes_read"]["ssd"]
    assert 2.5 <= answer["bits"] <= 4.5
    _, _, err = run(*options, *hot, "--stats")
    assert re.search(
        r"hot experts +\d+; \d+ promoted, \d+ demoted, \d+ deferred, .*B read in the background", err
    )
    assert json.loads(run(*options, "--levels", "4/2", "--json")[1])["hot"] is None


def test_the_api_takes_the_options(tiny_store):
    """load takes them as keyword arguments; answers of requests that ran together say what moved."""
    how = {"policy": "hotness", "levels": "4/2", "hot_interval": "2t", "hot_warmup": 0, "hot_experts": 3}
    with edgemoe.load(tiny_store, parallel=3, context=64, **how) as model:
        assert model.engine.settings.hotness == Hotness(interval=2, warmup=0, experts=3)
        futures = [
            model.submit(prompt, max_new_tokens=40, temperature=0) for prompt in ("fox", "dog", "over")
        ]
        answers = [future.result() for future in futures]
    assert all(answer.hot["experts"] <= 6 for answer in answers)
    assert max(answer.hot["experts"] for answer in answers) > 0
    assert max(answer.hot["promoted"] for answer in answers) > 0


@pytest.mark.e2e
def test_eval_measures_it(run, tiny_store, checkpoint, tmp_path):
    """A pair of levels goes by hotness, in single new tokens; other levels stay; both runs have the same rows."""
    text = tmp_path / "a.txt"
    text.write_text("a quick fox jumps over dogs " * 60)
    of_model = ("-m", tiny_store, "--reference", checkpoint, "--text", text, "--tokens", 128, "--window", 64)
    levels = ("--levels", "4", "--levels", "2", "--levels", "4/2", "--levels", "4/0")
    hot = ("--policy", "hotness", "--hot-experts", 3, "--hot-interval", "4t", "--hot-warmup", 0)
    reports = [json.loads(run("eval", *of_model, *levels, *hot, "--json")[1]) for _ in range(2)]
    rows = {(row["setting"], row["phase"]): row for row in reports[0]["rows"]}
    assert reports[1]["rows"] == reports[0]["rows"]
    followed = rows.pop(("4/2 hot mass, 3 a layer reuse", "decode"))
    assert not any("hot" in setting for setting, _ in rows)
    assert any(setting.startswith("4/0 r") for setting, _ in rows)
    assert 2.5 < followed["bits_per_weight_read"] < 4.5
    assert rows["exact 4", "decode"]["kl"] < followed["kl"] < rows["exact 2", "decode"]["kl"]
    assert followed["retention"] is None


@pytest.mark.e2e
def test_eval_has_the_hot_experts_of_the_plan(run, tiny_store, tmp_path):
    """Under a limit as many experts are hot as `edgemoe plan` says of the same context, and fewer pairs are high."""
    text = tmp_path / "a.txt"
    text.write_text("a quick fox jumps over dogs " * 60)
    hot = ("--policy", "hotness", "--levels", "4/2")
    whole = json.loads(run("plan", "-m", tiny_store, "-c", 64, *hot, "--json")[1])
    least = whole["vram_limit_bytes"] - whole["plane_bytes"] + 16 * 8192
    high = []
    for extra, experts in ((3 * 4096, 3), (16 * 4096, 16)):
        limit = ("--vram-limit", f"{least + extra}B")
        assert (
            json.loads(run("plan", "-m", tiny_store, "-c", 64, *hot, *limit, "--json")[1])["hot_experts"]
            == experts
        )
        of_text = ("--text", text, "--tokens", 256, "--window", 64)
        code, out, err = run("eval", "-m", tiny_store, *of_text, *hot, *limit, "--json")
        assert code == 0, err
        (row,) = json.loads(out)["rows"]
        assert row["hot_experts"] == experts
        high.append(row["effective_retention"])
    assert high[0] < 0.7 < high[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policy", "auto"), "a policy to measure"),
        (("--policy", "hotness", "--levels", "4"), "two levels above 0, for --policy hotness"),
        (("--hot-experts", 3), "--policy hotness for --hot-experts"),
    ],
)
def test_eval_refuses(run, tiny_store, tmp_path, options, words):
    text = tmp_path / "a.txt"
    text.write_text("a quick fox jumps over dogs " * 60)
    code, _, err = run("eval", "-m", tiny_store, "--text", text, *options)
    assert code == 2
    assert words in " ".join(err.split())
