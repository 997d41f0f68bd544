"""Pictures of the experts: how hot each one is, and its bits in each tier, by layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from edgemoe.serve.models import Models
from edgemoe.serve.page.state import serving_of_page
from edgemoe.storage.base import ExpertKey

REFRESH_SECONDS = 3.0
"""Shortest time between two looks at the tiers, however many pages are open."""

_HOTTEST = 255
"""The byte of the hottest expert."""


class ExpertPictures:
    """The answer of /monitor, made at most once per REFRESH_SECONDS.

    The engine keeps both for its own choices, so that a token costs nothing more. For the event loop's thread.

    Args:
        models: the models; the loaded one that was used last is shown.
        clock: seconds, never going back.
    """

    def __init__(self, models: Models, clock: Callable[[], float] = time.monotonic) -> None:
        self._models, self._clock, self._name = models, clock, ""
        self._at, self._answer = float("-inf"), dict[str, Any]()

    def answer(self) -> dict[str, Any]:
        """Each layer's experts as text of fixed width, so that thousands of experts are a few kilobytes.

        Returns:
            `layers`: numbers of the layers that have experts; `experts`: experts of a layer; `heat`: for each layer two
            hexadecimal digits per expert, 00 never used, ff the hottest; `levels`: tier -> for each layer a digit per
            expert, the bits that the tier has of it.

        Raises:
            ApiError: the model is not open yet, or unloaded.
        """
        serving, now = serving_of_page(self._models), self._clock()
        model = serving.require()
        if now - self._at >= REFRESH_SECONDS or serving.name != self._name:
            engine = model.engine
            layers, experts = sorted(engine.store.manifest.layers), engine.shape.experts_per_layer
            tiers = {"vram": engine.vram, "dram": engine.dram}
            self._answer = {
                "layers": layers,
                "experts": experts,
                "heat": heat_rows(engine.heat(), layers, experts),
                "levels": {
                    name: level_rows(tier.resident(), layers, experts) for name, tier in tiers.items() if tier
                },
            }
            self._at, self._name = now, serving.name
        return self._answer


def heat_rows(heat: Mapping[ExpertKey, float], layers: list[int], experts: int) -> list[str]:
    """Writes each expert's heat as two hexadecimal digits, a text per layer.

    >>> heat_rows({ExpertKey(3, 0): 1.0, ExpertKey(3, 2): 1e-9}, [3], 3)
    ['ff0001']

    Args:
        heat: 0 to 1; an expert that is missing was never used.
        layers: numbers of the layers.
        experts: number of experts of a layer.
    """
    rows = {layer: bytearray(experts) for layer in layers}
    for key, value in heat.items():
        rows[key.layer][key.expert] = max(round(_HOTTEST * value), 1)
    return [row.hex() for row in rows.values()]


def level_rows(levels: Mapping[ExpertKey, int], layers: list[int], experts: int) -> list[str]:
    """Writes each expert's level as a digit, 0 where it is absent, a text per layer.

    >>> level_rows({ExpertKey(3, 1): 8}, [3, 4], 2)
    ['08', '00']
    """
    rows = {layer: bytearray(b"0" * experts) for layer in layers}
    for key, level in levels.items():
        rows[key.layer][key.expert] = ord(f"{level}")
    return [row.decode() for row in rows.values()]
