"""tools/training/repeated_text.py: fractions against counts by hand and a plain search."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.training.repeated_text import STRETCH, repeated_fraction


def tokens(*parts: object) -> np.ndarray:
    return np.concatenate([np.atleast_1d(part) for part in parts]).astype(np.uint16)


TRAINING = tokens(np.arange(1000, 2000))


@pytest.mark.parametrize(
    ("held_out", "fraction"),
    [
        (tokens(np.arange(1000, 2000)), 1),
        (tokens(np.arange(5)), 0),
        (tokens(np.arange(1500, 1500 + STRETCH - 1)), 0),
        (tokens(np.arange(1500, 1500 + STRETCH)), 1),
        (tokens(np.arange(1500, 1540), 7, np.arange(1500, 1520), np.arange(39)), 0.4),
        (tokens(9, 8, np.arange(1200, 1248), np.arange(1900, 1948), 3, 2), 0.96),
        (tokens(np.arange(2000, 1000, -1)), 0),
    ],
)
def test_fractions_counted_by_hand(held_out, fraction):
    """All of the text, none, a stretch too short or just long enough, a part in the middle, and the reversed text."""
    assert repeated_fraction(TRAINING, held_out) == pytest.approx(fraction)


def test_training_text_shorter_than_a_stretch_repeats_nothing():
    """The fraction is 0."""
    assert repeated_fraction(TRAINING[:5], TRAINING) == 0


PIECES = st.sampled_from([[0] * 20, [1] * 20, [0, 1] * 10, [1, 0, 0] * 6, [1]])


@given(st.lists(PIECES, max_size=8), st.lists(PIECES, min_size=1, max_size=6))
def test_fraction_equals_a_plain_search(training, held_out):
    """The fraction equals a string search's for every stretch, in texts of the same few pieces."""
    training, held_out = list(chain(*training)), list(chain(*held_out))
    text = "".join(map(str, training))
    starts = [
        i for i in range(len(held_out) - STRETCH + 1) if "".join(map(str, held_out[i : i + STRETCH])) in text
    ]
    covered = {i + j for i in starts for j in range(STRETCH)}
    found = repeated_fraction(np.array(training, np.uint16), np.array(held_out, np.uint16))
    assert found == pytest.approx(len(covered) / len(held_out))
