"""Scores of experts against their equations token by token, and the settings of `--policy hotness`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.policy.hotness import GateMass, Hotness, Scores, TokenCounts, scores_of

LAYERS, EXPERTS = 2, 5

TOKEN = st.dictionaries(st.integers(0, EXPERTS - 1), st.floats(0, 1), max_size=3)
"""A token's experts in one layer, each with its gate weight."""

HALF_LIVES = st.floats(0.1, 1000)
WEIGHTS = st.floats(0.01, 4)


def of(layer: int, token: dict[int, float], weight: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Counts and mass of one token, in arrays of all layers."""
    counts, mass = np.zeros((LAYERS, EXPERTS)), np.zeros((LAYERS, EXPERTS))
    for expert, gate in token.items():
        counts[layer, expert] += weight
        mass[layer, expert] += weight * gate
    return counts, mass


@given(tokens=st.lists(TOKEN, max_size=12), half_life=HALF_LIVES, weight=WEIGHTS)
def test_gate_mass_is_the_moving_average_token_by_token(
    tokens: list[dict[int, float]], half_life: float, weight: float
) -> None:
    """S <- a S + (1 - a) g, where a keeps half of S over `half_life` weighted tokens; other layers stay at 0."""
    scores, want = GateMass(LAYERS, EXPERTS, half_life), [0.0] * EXPERTS
    kept = math.exp(-math.log(2) * weight / half_life)
    for token in tokens:
        scores.observe(*of(1, token, weight), tokens=weight)
        want = [kept * value + (1 - kept) * token.get(i, 0.0) for i, value in enumerate(want)]
    assert scores.values[1].tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)
    assert not scores.values[0].any()


@given(step=st.lists(TOKEN, min_size=1, max_size=8), before=TOKEN, half_life=HALF_LIVES)
def test_the_tokens_of_a_step_count_alike(
    step: list[dict[int, float]], before: dict[int, float], half_life: float
) -> None:
    """A step of n tokens is n times their mean token: no order, and what was before fades by n tokens."""
    scores = GateMass(LAYERS, EXPERTS, half_life)
    scores.observe(*of(0, before), tokens=1)
    want = scores.values[0].tolist()
    parts = [of(0, token) for token in step]
    scores.observe(sum(c for c, _ in parts), sum(m for _, m in parts), tokens=len(step))
    mean = [sum(token.get(i, 0.0) for token in step) / len(step) for i in range(EXPERTS)]
    for _ in step:
        kept = 0.5 ** (1 / half_life)
        want = [kept * value + (1 - kept) * mean[i] for i, value in enumerate(want)]
    assert scores.values[0].tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)


@pytest.mark.e2e
@given(intervals=st.lists(st.lists(TOKEN, min_size=1, max_size=6), max_size=5), half_life=HALF_LIVES)
def test_token_counts_change_at_the_end_of_an_interval_alone(
    intervals: list[list[dict[int, float]]], half_life: float
) -> None:
    """h <- a h + (1 - a) c / n at the end of an interval of n tokens; within it nothing changes, and c begins at 0."""
    scores, want = TokenCounts(LAYERS, EXPERTS, half_life), [0.0] * EXPERTS
    for tokens in intervals:
        for token in tokens:
            scores.observe(*of(1, token), tokens=1)
            assert scores.values[1].tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)
        scores.close_interval(len(tokens))
        kept = 0.5 ** (len(tokens) / half_life)
        chosen = [sum(i in token for token in tokens) for i in range(EXPERTS)]
        want = [kept * h + (1 - kept) * c / len(tokens) for h, c in zip(want, chosen, strict=True)]
    assert scores.values[1].tolist() == pytest.approx(want, rel=1e-9, abs=1e-15)
    assert not scores.values[0].any()


@pytest.mark.parametrize("signal", ["mass", "count"])
@given(half_life=HALF_LIVES, repeat=st.integers(1, 4))
def test_seeded_scores_are_those_of_a_long_run(signal: str, half_life: float, repeat: int) -> None:
    """Where tokens go on as the heat says, seeded scores stay: they are the average's own fixed point."""
    scores = scores_of(Hotness(signal=signal, half_life=half_life), LAYERS, EXPERTS)
    # Of 4 tokens of 2 experts: expert 0 is in all of them, 1 in three, 2 in one.
    counts = np.array([[4.0, 3, 1, 0, 0], [0, 0, 0, 0, 0]])
    mass = counts / 2
    scores.seed(counts / 4, slots=2)
    want = scores.values.copy()
    assert want[0].tolist() == pytest.approx(
        [1, 0.75, 0.25, 0, 0] if signal == "count" else [0.5, 0.375, 0.125, 0, 0]
    )
    for _ in range(repeat):
        scores.observe(counts, mass, 4)
        scores.close_interval(4)
    np.testing.assert_allclose(scores.values, want, rtol=1e-9)
    assert not scores.values[1].any()


def test_a_signal_chooses_its_scores() -> None:
    """`mass` averages gate weights, `count` counts tokens; both begin at 0."""
    for signal, kind in (("mass", GateMass), ("count", TokenCounts)):
        scores: Scores = scores_of(Hotness(signal=signal), 3, 4)
        assert type(scores) is kind
        assert scores.values.shape == (3, 4)
        assert not scores.values.any()


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"signal": "use"}, "--hotness mass or count"),
        ({"half_life": 0}, "--hot-half-life"),
        ({"half_life": math.inf}, "--hot-half-life"),
        ({"half_life": math.nan}, "--hot-half-life"),
        ({"interval": -1}, "--hot-interval"),
        ({"interval": 0}, "--hot-interval"),
        ({"interval": 0, "seconds": -1}, "--hot-interval"),
        ({"interval": 0, "seconds": math.nan}, "--hot-interval"),
        ({"margin": -0.1}, "--hot-margin"),
        ({"margin": math.nan}, "--hot-margin"),
        ({"margin": math.inf}, "--hot-margin"),
        ({"warmup": -1}, "--hot-warmup"),
        ({"prompt_weight": -1}, "--hot-prompt-weight"),
        ({"prompt_weight": math.inf}, "--hot-prompt-weight"),
        ({"experts": -1}, "--hot-experts"),
        ({"rate": 0}, "--migration-rate"),
        ({"rate": math.nan}, "--migration-rate"),
    ],
)
def test_values_out_of_their_range_are_refused(wrong: dict[str, float], option: str) -> None:
    """Each refusal names the option, and each value at the edge of its range is taken."""
    with pytest.raises(UserError, match=option):
        Hotness(**wrong)  # type: ignore[arg-type]


def test_values_at_the_edge_are_taken() -> None:
    """0 where 0 has a meaning; an interval in seconds needs no tokens."""
    edge = Hotness(margin=0, warmup=0, prompt_weight=0, experts=0, interval=0, seconds=0.001, rate=1)
    assert (str(edge), str(Hotness(signal="count"))) == ("hot mass, 0 a layer", "hot count")
