"""The estimate of a speed: by hand for a small case, and what published sizes say without files and network."""

from __future__ import annotations

import json
import re
from functools import cache
from types import SimpleNamespace

import pytest
from availability import needs_native
from terminals import ROOT

from edgemoe.console.sizes import parse_size
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.plans.division import Division, plan_levels
from edgemoe.models.plans.expected import expected_speed, speed_text
from edgemoe.models.published.announced import checkpoint_of_sizes
from edgemoe.models.published.short_names import SHORT_NAMES
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.settings import RunSettings
from edgemoe.speed.rates import ASSUMED, Rates, keep_rates, kept_rates

RATES = Rates(ssd=1e9, dram=1e10, vram=1e11)


def expected(
    *,
    room: int,
    dram: int = 0,
    model_type: str = "qwen3_moe",
    latent: bool = False,
    index: object = None,
    device: object = None,
    kernel: str = "native",
    **settings,
):
    """A model with 1 GB of dense weights and 10 layers of 100 experts of 10 MB at 4 bits, of which a token has 10."""
    store = SimpleNamespace(
        shape=SimpleNamespace(
            experts=1000,
            experts_per_layer=100,
            top_k=10,
            layers=10,
            kv=SimpleNamespace(latent=latent, index=index),
        ),
        config={"model_type": model_type},
        dense_bytes_per_token=10**9,
        bytes_of_all=lambda level: {8: 17, 4: 10, 2: 5}[level] * 10**9,
        device=device,
        compute=SimpleNamespace(name=kernel),
    )
    plan = SimpleNamespace(
        plane_bytes=room - 3, long_step_bytes=2, kv_bytes=5, first_kv_bytes=4, dram_limit_bytes=dram
    )
    return expected_speed(store, plan, RunSettings(**{"levels": (4,)} | settings), RATES)


def test_a_model_in_memory_by_hand():
    """2 GB from memory per token: 20 ms at the rate, of which a class of families reaches its own part."""
    made = expected(room=20 * 10**9)
    assert (made.fitting, made.hit_rate, made.ssd_bytes) == (1, (1, 1), (0, 0))
    assert made.bound_tok_s == pytest.approx((50, 50))
    assert made.tok_s == pytest.approx((0.4 * 50, 0.85 * 50))
    latent = expected(room=20 * 10**9, model_type="deepseek_v3", latent=True)
    assert latent.tok_s == pytest.approx((0.3 * 50, 0.6 * 50))
    without_kernel = expected(room=20 * 10**9, kernel="torch")
    assert (without_kernel.compiled, without_kernel.reached) == (False, (0.2, 0.5))
    indexed = expected(room=20 * 10**9, model_type="deepseek_v32", index=object())
    assert indexed.compiled
    assert indexed.tok_s == pytest.approx((0.2 * 50, 0.5 * 50))


def test_half_of_a_model_in_memory_by_hand():
    """A quarter to a sixteenth of 1 GB comes from the disk at 70 and 95 % of its rate, after what comes from memory."""
    made = expected(room=5 * 10**9)
    assert (made.fitting, made.hit_rate) == (0.5, (0.75, 0.9375))
    assert made.ssd_bytes == pytest.approx((250e6, 62.5e6))
    assert made.tok_s == pytest.approx((1 / (0.02 / 0.4 + 0.25 / 0.7), 1 / (0.02 / 0.85 + 0.0625 / 0.95)))
    assert made.bound_tok_s == pytest.approx((4, 16))
    second = expected(room=5 * 10**9, dram=5 * 10**9, device=object(), kernel="triton")
    assert (second.ssd_bytes, second.dram_bytes) == ((0, 0), pytest.approx((250e6, 62.5e6)))
    launches = 10 * 3e-5
    assert second.tok_s[1] == pytest.approx(1 / (0.02 / 0.95 + 0.00625 / 0.95 + launches))


def test_a_gpus_launches_differ_by_family():
    """A layer takes least by kernels of its own, more by captured modules, most by modules that Python launches."""
    how = {"room": 20 * 10**9, "device": object()}
    own = expected(**how, kernel="triton")
    captured = expected(**how, kernel="triton", model_type="glm4_moe")
    modules = expected(**how, kernel="planes")
    for made, launches, compiled in ((own, 3e-5, True), (captured, 1.2e-4, True), (modules, 2e-3, False)):
        assert made.tok_s[1] == pytest.approx(1 / (0.02 / 0.95 + 10 * launches))
        assert made.compiled is compiled


def test_fewer_bits_move_fewer_bytes():
    """Half of the experts at 2 bits; then means halfway between 2 and 4 bits, which take 2.5 and 4.5, and 4 and 8."""
    assert expected(room=10**9, levels=(4, 2), retention=0.5).memory_bytes == pytest.approx(1.75e9)
    assert expected(room=10**9, levels=(4, 2, 0), bits=3.5).memory_bytes == pytest.approx(1.75e9)
    assert expected(room=10**9, levels=(8, 4, 2, 0), bits=6.5).memory_bytes == pytest.approx(2.35e9)


def test_rates_are_kept(tmp_path):
    """Rates that were written are read again; without a file, or with a damaged one, rates are assumed."""
    path = tmp_path / "rates.json"
    assert kept_rates(path, "cpu") == ASSUMED["cpu"]
    measured = Rates(1e9, 2e9, 3e9, "2026-11-27")
    keep_rates(path, {"cpu": measured})
    assert (kept_rates(path, "cpu"), kept_rates(path, "cuda")) == (measured, ASSUMED["cuda"])
    for damaged in ("", "[]", '{"cpu": {"ssd": "x"}}', '{"cpu": {"ssd": 0, "dram": 1, "vram": 1}}'):
        path.write_text(damaged)
        assert kept_rates(path, "cpu") == ASSUMED["cpu"]


@pytest.mark.e2e
@pytest.mark.parametrize("name", SHORT_NAMES)
def test_a_short_name_has_the_size_of_its_file(name):
    """The types and shapes that a plan assumes add up to the file on the Hub; files named UD differ by up to 5 %."""
    short = SHORT_NAMES[name]
    within = 0.05 if "UD-" in short.repository else 0.015
    assert checkpoint_of_sizes(name).nbytes / 1e9 == pytest.approx(short.gigabytes, rel=within)


@pytest.mark.e2e
@needs_native
@pytest.mark.parametrize(("page", "rows"), [("README.md", 3), ("docs/quick_start.md", 6)])
def test_pages_have_the_speeds_that_are_expected(page, rows):
    """Tables of what to type have the speeds of a plan at the rates that are assumed."""
    line = r"`edgemoe chat (\S+) --vram-limit (\S+)` \|.* ([\d.]+ to [\d.]+) \|$"
    found = re.findall(line, (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(found) == rows
    for name, limit, speed in found:
        store = planned(name)
        plan, settings = plan_levels(store, run_settings, Division(parse_size(limit)))
        assert speed_text(expected_speed(store, plan, settings, ASSUMED["cpu"]).tok_s) == speed, name


@cache
def planned(name: str) -> StoreModel:
    """The store that a first use would make of a short name."""
    return StoreModel.planned(checkpoint_of_sizes(name))


@pytest.mark.e2e
def test_a_short_name_is_planned_without_a_network(run, monkeypatch, tmp_path):
    """Neither files nor the Hub are needed, and what the file has in 4 bits stays in 4 bits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection"))
    code, out, err = run("plan", "OLMoE", "--vram-limit", "4GB", "--json")
    assert (code, err) == (0, "olmoe is planned from its published sizes, without its files\n")
    assert json.loads(out)["experts"] == 16 * 64
    code, out, _ = run("pull", "olmoe", "--dry-run", "--json")
    sizes = json.loads(out)
    assert sizes["download_bytes"] < sizes["store_bytes"] < 1.3 * sizes["download_bytes"]
