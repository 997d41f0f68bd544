"""What a tier's free room is filled with before anybody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache.base import Tier
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey
from storage.errors import DamagedData

TOGETHER = 32
"""Experts a stream: enough for every reader, few enough that whoever wants to end it waits for some 0.1 s."""


def fill(
    fetcher: Fetcher,
    tier: Tier,
    keys: Iterable[ExpertKey],
    levels: Sequence[int],
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Reads experts that are not resident into room that is free, and evicts nobody.

    A prompt behind it takes room from those that it has not asked for, of the last layers first.
    At the first of `levels` while there is room at it, then at the next. An expert that cannot be read ends it:
    whoever asks for that one is told. Counters of before are dropped with its own.

    Args:
        fetcher: into whose fastest tier. Between two streams; on any thread, while no other uses it.
        tier: that tier.
        keys: the first wanted first.
        levels: the highest first.
        go_on: asked before every TOGETHER experts.

    Raises:
        ValueError: the fetcher is closed, or a stream of it is open.
    """
    rest = [key for key in keys if not tier.level_of(key)]
    if not rest or not any(map(tier.room, levels)):
        return
    fetcher.settle()
    mode, fetcher.mode = fetcher.mode, "off"  # no verdict on guesses that nobody made
    filled: list[ExpertKey] = []
    try:
        for level in levels:
            while go_on() and (now := rest[: min(TOGETHER, tier.room(level))]):
                with fetcher.stream(dict.fromkeys(now, level)) as leases:
                    for _ in leases:
                        leases.ready()
                filled += now
                del rest[: len(now)]
    except DamagedData:
        pass
    finally:
        tier.go_first(sorted(filled, reverse=True))
        fetcher.take_counts()
        fetcher.mode = mode
