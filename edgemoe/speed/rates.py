"""Bytes per second of a machine's memories, for an estimate: as `edgemoe doctor` measured them, or assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edgemoe.errors import EdgemoeError
from edgemoe.storage.files.atomic import replacing, write_all


@dataclass(frozen=True)
class Rates:
    """Bytes per second of each tier.

    Args:
        ssd: reads of the disk past the system's cache.
        dram: copies from RAM to the fastest tier, over the link where that is a GPU's memory.
        vram: reads of the fastest memory: a GPU's, or RAM without one.
        measured: the day of the measurement, as 2026-11-27; None: the rates are assumed.
    """

    ssd: float
    dram: float
    vram: float
    measured: str | None = None

    @property
    def source(self) -> str:
        """Where the rates come from, as a clause."""
        if self.measured:
            return f"that `edgemoe doctor` measured on {self.measured}"
        return "that are assumed: `edgemoe doctor` measures this machine's"


ASSUMED = {"cpu": Rates(2e9, 10e9, 30e9), "cuda": Rates(2e9, 12e9, 400e9)}
"""Place -> rates of an ordinary computer: an SSD of PCIe 3, two channels of DDR4; a card of 8 to 12 GB in PCIe 3."""


def keep_rates(path: Path, rates: Mapping[str, Rates]) -> None:
    """Writes the rates of each place into a file; a directory that cannot be written to keeps none."""
    data = json.dumps({place: asdict(each) for place, each in rates.items()}).encode()
    with suppress(OSError, EdgemoeError), replacing(path, len(data)) as file:
        write_all(file, data)


def kept_rates(path: Path, place: str) -> Rates:
    """The rates of a place, cpu or cuda, in a file of keep_rates; ASSUMED where there is none, or it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        rates = Rates(**json.loads(path.read_text(encoding="utf-8"))[place])
        if min(rates.ssd, rates.dram, rates.vram) > 0:
            return rates
    return ASSUMED[place]
