"""prefetch.lookahead: off while look-ahead does not pay, probed now and then, on once it pays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgemoe.prefetch.lookahead import LookaheadGate


def rests(gate: LookaheadGate) -> int:
    """Passes layers without a prediction until the gate is on; returns how many."""
    count = 0
    while not gate.on:
        gate.layer(0, 0)
        count += 1
    return count


def feed(gate: LookaheadGate, layers: int, hidden: int, wasted: int) -> None:
    """Passes layers that each have the same bytes while the gate is on."""
    for _ in range(layers):
        assert gate.on
        gate.layer(hidden, wasted)


def test_it_waits_for_a_whole_window() -> None:
    """The gate stays on until its window is full, with any number of wasted bytes."""
    gate = LookaheadGate(window=4, rest=5)
    feed(gate, 4, 0, 100)
    assert not gate.on


def test_it_stays_on_while_it_pays() -> None:
    """As many bytes hidden as wasted keep the gate on, as do some layers with nothing to read."""
    gate = LookaheadGate(window=4, rest=5)
    feed(gate, 50, 10, 10)
    feed(gate, 3, 0, 0)
    feed(gate, 1, 10, 10)
    assert gate.on


def test_it_rests_where_there_is_nothing_to_read() -> None:
    """A whole window without a byte, hidden or wasted, turns the gate off, each time for the first rest."""
    gate = LookaheadGate(window=4, rest=5)
    for _ in range(3):
        feed(gate, 4, 0, 0)
        assert rests(gate) == 5


def test_the_window_slides() -> None:
    """Bytes that were hidden before the window do not count."""
    gate = LookaheadGate(window=3, rest=5)
    feed(gate, 3, 1000, 0)
    feed(gate, 3, 0, 1)
    assert not gate.on


def test_the_price_of_waste() -> None:
    """At a price of 2, one byte wasted needs two hidden."""
    dear, cheap = LookaheadGate(window=2, rest=5, price=2.0), LookaheadGate(window=2, rest=5, price=0.5)
    feed(dear, 2, 19, 10)
    feed(cheap, 2, 5, 10)
    assert (dear.on, cheap.on) == (False, True)


def test_rests_double() -> None:
    """The rest doubles with every probe that does not pay, up to the longest; a probe is a whole window."""
    gate = LookaheadGate(window=2, rest=3, longest_rest=10)
    lengths = []
    for _ in range(4):
        feed(gate, 2, 0, 1)
        lengths.append(rests(gate))
    assert lengths == [3, 6, 10, 10]


def test_a_probe_that_pays_resets_the_rest() -> None:
    """After a probe that pays the next rest is the first one."""
    gate = LookaheadGate(window=2, rest=3)
    feed(gate, 2, 0, 1)
    rests(gate)
    feed(gate, 2, 0, 1)
    assert rests(gate) == 6
    feed(gate, 2, 5, 0)
    feed(gate, 1, 0, 9)
    assert (gate.on, rests(gate)) == (False, 3)


def test_bytes_during_a_rest_do_not_count() -> None:
    """The probe after a rest counts its own bytes alone."""
    gate = LookaheadGate(window=2, rest=2)
    feed(gate, 2, 0, 1)
    gate.layer(0, 10**9)
    gate.layer(0, 10**9)
    feed(gate, 2, 1, 1)
    assert gate.on


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=60), st.integers(1, 5))
def test_it_is_on_exactly_when_the_last_window_paid(layers: list[tuple[int, int]], window: int) -> None:
    """Before its first rest, the gate is on exactly if the sums over the last `window` layers pay."""
    gate = LookaheadGate(window=window, rest=1)
    for i, layer in enumerate(layers):
        gate.layer(*layer)
        recent = layers[max(0, i + 1 - window) : i + 1]
        hidden, wasted = (sum(column) for column in zip(*recent, strict=True))
        pays = len(recent) < window or wasted <= hidden > 0
        assert gate.on == pays
        if not pays:
            return


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 9)), max_size=20),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_several_layers_at_once_are_layers_in_a_row(
    calls: list[tuple[int, int, int]], window: int, rest: int
) -> None:
    """One call for layers of a rest leaves the gate as one call per layer does."""
    together, apart = (LookaheadGate(window=window, rest=rest, longest_rest=4 * rest) for _ in range(2))
    for hidden, wasted, layers in calls:
        left = layers
        while left:
            at_once = min(left, together.resting or 1)
            together.layer(0, 0, at_once)
            left -= at_once
        for _ in range(layers):
            apart.layer(0, 0)
        for gate in (together, apart):
            gate.layer(hidden, wasted)
        assert together.on == apart.on
        assert (together.resting, together._next_rest) == (apart.resting, apart._next_rest)
