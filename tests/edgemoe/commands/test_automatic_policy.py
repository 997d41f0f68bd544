"""--policy auto: hotness for many sequences where the lower planes of all experts fit, DyMoE's levels elsewhere."""

from __future__ import annotations

from functools import partial

import pytest

from edgemoe.engine.engine import StoreModel
from edgemoe.errors import UserError
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.plans.division import HOT_SEQUENCES, Division, plan_levels

CONTEXT = 64


@pytest.fixture
def model(damageable):
    return StoreModel.open(damageable)


def limit(model, *, high: float, sequences: int) -> int:
    """A limit at which every expert has 2 bits, and this fraction of them 4."""
    settings = run_settings(8, fits=False, policy="hotness")
    least = model.plan(vram_limit=None, settings=settings, context=CONTEXT, parallel=sequences)
    low, four = (model.form.bytes_at(level) for level in (2, 4))
    experts = model.shape.experts
    return least.vram_limit_bytes - least.plane_bytes + int(experts * (low + high * (four - low))) + 1


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("high", "sequences", "hot"),
    [
        (0.5, HOT_SEQUENCES, True),
        (0.5, HOT_SEQUENCES - 1, False),
        (0.0, HOT_SEQUENCES, False),
        (-0.5, HOT_SEQUENCES, False),
    ],
)
def test_choice(model, high, sequences, hot):
    choose = partial(run_settings, policy="auto")
    vram = limit(model, high=high, sequences=sequences)
    plan, settings = plan_levels(model, choose, Division(vram, context=CONTEXT, parallel=sequences))
    assert (settings.hotness is not None) == hot == (plan.hot_experts is not None)
    if hot:
        assert plan.vram_experts == model.shape.experts
        assert plan.hot_experts == int(high * model.shape.experts)


def test_everything_fits(model):
    """Then every expert has the highest level, under any policy."""
    for policy in ("auto", "hotness", "dymoe"):
        choose = partial(run_settings, policy=policy)
        plan, settings = plan_levels(model, choose, Division(None, context=CONTEXT, parallel=HOT_SEQUENCES))
        assert settings.levels == (8,)
        assert settings.hotness is None
        assert plan.hot_experts is None


@pytest.mark.parametrize(
    "options",
    [{"levels": "8/4/2/0"}, {"levels": "4/0"}, {"bits": 3.5}, {"exact": 4}, {"tpot_target": "50ms"}],
)
def test_levels_that_do_not_follow_hotness_stay(options):
    assert run_settings(8, fits=False, hot=True, policy="auto", **options).hotness is None


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="dymoe or hotness or auto"):
        run_settings(8, policy="cold")
