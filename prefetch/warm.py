"""Reads experts into free blocks before their first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cache.plane_tier import PlaneTier
from prefetch.base import ExpertSource
from storage.base import ExpertKey, ResidentForm
from storage.errors import DamagedData

BATCH_BYTES = 1 << 26
"""Bytes per warm-up batch: keeps all readers busy, bounds the delay of an arriving request."""


def warm(
    source: ExpertSource,
    tier: PlaneTier,
    form: ResidentForm,
    keys: Sequence[ExpertKey],
    levels: Sequence[int],
    go_on: Callable[[], bool],
) -> None:
    """Implements ExpertSource.fill for a source whose fastest tier is `tier`.

    A prompt that follows evicts the experts that it does not want, of the last layers first.

    Args:
        source: between two requests, with look-ahead and split turned off.
        tier: its fastest tier.
        form: of the tier.
        keys, levels, go_on: as ExpertSource.fill.
    """
    rest = [key for key in keys if not tier.level_of(key)]
    tried: list[ExpertKey] = []
    try:
        for level in levels:
            most = max(BATCH_BYTES // form.bytes_at(level), 1)
            while go_on() and (now := rest[: min(most, tier.free_experts(level))]):
                tried += now
                del rest[: len(now)]
                with source.request(dict.fromkeys(now, level), scan=True) as request:
                    for _ in request:
                        if not go_on():
                            break
    except DamagedData:
        pass
    finally:
        tier.mark_evict_first(sorted(tried, reverse=True))
