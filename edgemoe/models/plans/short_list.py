"""The models of the short list on this machine: whether each fits inside limits, and its expected speed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from edgemoe.console.sizes import format_least, format_size
from edgemoe.errors import DoesNotFit
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.plans.division import Division, plan_levels
from edgemoe.models.plans.expected import Range, expected_speed, speed_text
from edgemoe.models.published.announced import checkpoint_of_sizes
from edgemoe.models.published.short_names import SHORT_NAMES
from edgemoe.models.store_model import StoreModel

if TYPE_CHECKING:
    from edgemoe.machine.device import Device
    from edgemoe.speed.rates import Rates


@dataclass(frozen=True)
class Listed:
    """A model of the short list on a machine.

    Args:
        name: its short name.
        download_bytes, store_bytes: bytes of its download, and of its store on the disk.
        smallest_limit: bytes, the smallest --vram-limit that runs it.
        fitting: the share of its experts, 0 to 1, that fits into memory; None: it does not run inside the limits.
        tok_s: the slower and the faster end of the expected tokens per second; None with `fitting`.
    """

    name: str
    download_bytes: int
    store_bytes: int
    smallest_limit: int
    fitting: float | None
    tok_s: Range | None

    def line(self, disk_free: int) -> str:
        """The model in words, for a disk with so many free bytes."""
        download = f"{format_size(self.download_bytes)} to download"
        if self.fitting is None or self.tok_s is None:
            return f"{download}; needs --vram-limit {format_least(self.smallest_limit)}"
        held = "all experts" if self.fitting == 1 else f"{100 * self.fitting:.0f} % of the experts"
        fits = f"{download}, {held} in memory, {speed_text(self.tok_s)} tokens per second"
        if self.store_bytes > disk_free:
            return f"{fits}; needs {format_size(self.store_bytes)} of free disk"
        return fits


def short_list(division: Division, device: Device | None, rates: Mapping[str, Rates]) -> Iterator[Listed]:
    """Plans each model of the short list from its published sizes, without a network.

    Args:
        division: the limits.
        device: the device that they hold for; None: the CPU.
        rates: cpu, or cuda -> rates of this machine.
    """
    for name, short in SHORT_NAMES.items():
        store = _planned(name, device)
        held, tok_s = None, None
        try:
            plan, settings = plan_levels(store, run_settings, division)
        except DoesNotFit as refused:
            smallest = refused.minimum
        else:
            expected = expected_speed(store, plan, settings, rates["cuda" if device else "cpu"])
            held, tok_s, smallest = expected.fitting, expected.tok_s, plan.minimum_vram_bytes
        on_disk = store.record_bytes + store.shape.dense_bytes
        yield Listed(name, round(short.gigabytes * 1e9), on_disk, smallest, held, tok_s)


@cache
def _planned(name: str, device: Device | None) -> StoreModel:
    """The store that a first use would make; its class takes a second to import, so it stays for later calls."""
    return StoreModel.planned(checkpoint_of_sizes(name), device)
