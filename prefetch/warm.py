"""What a tier's free room is filled with before anybody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cache.base import Tier
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey
from storage.errors import DamagedData


def fill(
    fetcher: Fetcher,
    tier: Tier,
    keys: Iterable[ExpertKey],
    levels: Sequence[int],
    together: int,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Reads experts that are not resident into room that is free, and evicts nobody from it.

    A prompt behind it takes room from those that it has not asked for, of the last layers first.
    At the first of `levels` while there is room at it, then at the next. An expert that cannot be read ends it:
    whoever asks for that one is told. Counters of before are dropped with its own.

    Args:
        fetcher: into whose fastest tier. Between two streams; on any thread, while no other uses it.
        tier: that tier.
        keys: the first wanted first.
        levels: the highest first.
        together: experts a stream, 1 or more.
        go_on: asked before every stream and after every expert; False ends it with what is being read by then.

    Raises:
        ValueError: the fetcher is closed, or a stream of it is open.
        RuntimeError: a device refused a copy.
    """
    rest = [key for key in keys if not tier.level_of(key)]
    if not rest or not any(map(tier.room, levels)):
        return
    fetcher.settle()
    mode, split = fetcher.mode, fetcher.split
    fetcher.mode = "off"  # no verdict on guesses that nobody made
    fetcher.split = None  # nobody computes what would stay below
    tried: list[ExpertKey] = []
    try:
        for level in levels:
            while go_on() and (now := rest[: min(together, tier.room(level))]):
                tried += now
                del rest[: len(now)]
                with fetcher.stream(dict.fromkeys(now, level), passing=True) as leases:
                    while go_on() and next(leases, None):
                        leases.ready()
    except DamagedData:
        pass
    finally:
        tier.go_first(sorted(tried, reverse=True))
        fetcher.take_counts()
        fetcher.mode, fetcher.split = mode, split
