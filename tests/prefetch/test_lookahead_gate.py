"""prefetch.lookahead_gate: off when it does not pay, back now and then, and on for good when it pays again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefetch.lookahead_gate import Judge


def rests(judge: Judge) -> int:
    """Layers without a guess until the judge is on again."""
    count = 0
    while not judge.on:
        judge.layer(0, 0)
        count += 1
    return count


def feed(judge: Judge, layers: int, hidden: int, wasted: int) -> None:
    for _ in range(layers):
        assert judge.on
        judge.layer(hidden, wasted)


def test_it_waits_for_a_whole_window() -> None:
    """However bad the first layers are, it stays on until the window is full."""
    judge = Judge(window=4, rest=5)
    feed(judge, 4, 0, 100)
    assert not judge.on


def test_it_stays_on_while_it_pays() -> None:
    """As many bytes hidden as wasted is no reason to stop, and neither are some layers with nothing to read."""
    judge = Judge(window=4, rest=5)
    feed(judge, 50, 10, 10)
    feed(judge, 3, 0, 0)
    feed(judge, 1, 10, 10)
    assert judge.on


def test_it_rests_where_there_is_nothing_to_read() -> None:
    """A whole window without a byte read ahead, hidden or wasted: guessing takes time too. Not longer each time."""
    judge = Judge(window=4, rest=5)
    for _ in range(3):
        feed(judge, 4, 0, 0)
        assert rests(judge) == 5


def test_the_window_slides() -> None:
    """Gains that have left the window make good for nothing."""
    judge = Judge(window=3, rest=5)
    feed(judge, 3, 1000, 0)
    feed(judge, 3, 0, 1)
    assert not judge.on


def test_the_price_of_waste() -> None:
    """At a price of 2, one byte wasted needs two hidden."""
    dear, cheap = Judge(window=2, rest=5, price=2.0), Judge(window=2, rest=5, price=0.5)
    feed(dear, 2, 19, 10)
    feed(cheap, 2, 5, 10)
    assert (dear.on, cheap.on) == (False, True)


def test_it_tries_again_later_and_later() -> None:
    """The rest doubles with every probe that fails, up to the longest; a probe is a whole window."""
    judge = Judge(window=2, rest=3, longest_rest=10)
    lengths = []
    for _ in range(4):
        feed(judge, 2, 0, 1)
        lengths.append(rests(judge))
    assert lengths == [3, 6, 10, 10]


def test_a_probe_that_pays_resets_the_rest() -> None:
    """After good times the first rest is short again."""
    judge = Judge(window=2, rest=3)
    feed(judge, 2, 0, 1)
    rests(judge)
    feed(judge, 2, 0, 1)
    assert rests(judge) == 6
    feed(judge, 2, 5, 0)
    feed(judge, 1, 0, 9)
    assert (judge.on, rests(judge)) == (False, 3)


def test_what_comes_late_while_off_is_not_held_against_the_probe() -> None:
    """Bytes told while resting count nowhere."""
    judge = Judge(window=2, rest=2)
    feed(judge, 2, 0, 1)
    judge.layer(0, 10**9)
    judge.layer(0, 10**9)
    feed(judge, 2, 1, 1)
    assert judge.on


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60), st.integers(1, 5))
def test_it_is_on_exactly_when_the_last_window_paid(layers: list[tuple[int, int]], window: int) -> None:
    """Before its first rest, the verdict is that of the plain sums over the last `window` layers."""
    judge = Judge(window=window, rest=1)
    for i, layer in enumerate(layers):
        judge.layer(*layer)
        recent = layers[max(0, i + 1 - window) : i + 1]
        hidden, wasted = (sum(column) for column in zip(*recent, strict=True))
        pays = len(recent) < window or wasted <= hidden > 0
        assert judge.on == pays
        if not pays:
            return
