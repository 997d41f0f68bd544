"""An estimate of a model's speed before it is there: the bytes of a token over this machine's rates.

A token reads its dense weights and its experts from memory, and from the disk the experts that memory does not have.
The seconds of these tiers (speed.bound) add up, each at the part of the rate that runs have reached. Two things are
assumed, so that the result is a range: the part that is reached, and how often an expert is found in memory. A model
uses some experts more than others, and memory keeps those. Where a share s of all experts fits, 1 - (1 - s)^2 to
1 - (1 - s)^4 of the experts that tokens need are there: trained models were within it (docs/benchmarks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgemoe.console.sizes import format_size
from edgemoe.families.table import traits_of
from edgemoe.kv.rotary_lengths import RotaryLengths
from edgemoe.memory.describe import LABEL
from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.speed.bound import slowest, tier_seconds
from edgemoe.speed.rates import Rates

if TYPE_CHECKING:
    from edgemoe.memory.plan import MemoryPlan
    from edgemoe.models.store_model import StoreModel
    from edgemoe.policy.settings import RunSettings

Range = tuple[float, float]
"""The slower and the faster end of an estimate."""

FOUND: Range = (2, 4)
"""Exponents of the experts that are not found: (1 - s)^2 and (1 - s)^4."""

READ: Range = (0.7, 0.95)
"""The part of the rate of the disk, and of RAM where it is a second tier, that is reached."""

COMPILED: Range = (0.4, 0.85)
"""The part of RAM's rate that tokens reach where compiled code runs all layers."""

LATENT: Range = (0.3, 0.6)
"""The part of RAM's rate for families with latent attention (DeepSeek, GLM-4.7-Flash): more small products."""

BY_MODULES: Range = (0.2, 0.5)
"""The part of RAM's rate where transformers' modules compute a token, or attention to tokens that an index chooses."""

ON_GPU: Range = (0.7, 0.95)
"""The part of a GPU's memory rate that is reached, apart from LAUNCHES."""

KERNELS, CAPTURED, MODULES = "kernels", "captured", "modules"

LAUNCHES: Mapping[str, Range] = {KERNELS: (6e-5, 3e-5), CAPTURED: (4e-4, 1.2e-4), MODULES: (4e-3, 2e-3)}
"""Seconds per layer of a GPU's token, besides the reading of weights: how its layers are launched -> the two ends."""


@dataclass(frozen=True)
class Expected:
    """The expected speed of one conversation at its beginning. Pairs are the slower and the faster end.

    Args:
        tok_s: tokens per second.
        bound_tok_s: tokens per second where every rate is reached and all tiers work at the same time.
        fitting: the share of all experts, 0 to 1, that fits into memory.
        hit_rate: the share of a token's experts that is in the fastest memory.
        memory_bytes: bytes per token from the fastest memory.
        dram_bytes, ssd_bytes: bytes per token from a second tier in RAM, and from the disk.
        reached: the part of the fastest memory's rate that is reached.
        compiled: whether compiled code, or captured launches, run all layers of a token.
        rates: bytes per second.
    """

    tok_s: Range
    bound_tok_s: Range
    fitting: float
    hit_rate: Range
    memory_bytes: float
    dram_bytes: Range
    ssd_bytes: Range
    reached: Range
    compiled: bool
    rates: Rates

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self) | {"reached_of_reads": READ}

    def lines(self) -> list[str]:
        """Lines of a plan, each with its name first."""
        rates = self.rates
        speed = f"{speed_text(self.tok_s)} tokens per second, an estimate with rates {rates.source}"
        memory = f"{format_size(self.memory_bytes)} per token at {format_size(rates.vram)}/s"
        parts = [
            ("expected speed", speed),
            ("  from memory", f"{memory}, of which {_percents(self.reached)} are reached"),
        ]
        if self.dram_bytes[0]:
            parts.append(
                ("  second tier", f"{_sizes(self.dram_bytes)} per token at {format_size(rates.dram)}/s")
            )
        if self.ssd_bytes[0]:
            disk = f"{_sizes(self.ssd_bytes)} per token at {format_size(rates.ssd)}/s"
            found = f"{_percents(self.hit_rate)} of a token's experts, where {100 * self.fitting:.0f} % of all fit"
            parts.append(("  from disk", f"{disk}, of which {_percents(READ)} are reached"))
            parts.append(("  in memory", found))
        return [f"{name:<{LABEL}}{text}" for name, text in parts]


def expected_speed(store: StoreModel, plan: MemoryPlan, settings: RunSettings, rates: Rates) -> Expected:
    """Estimates the speed of a model.

    Args:
        store: the model's store, or the one that its first use would make.
        plan: the division of its limits.
        settings: its levels.
        rates: rates of the device that the store is open for.
    """
    shape, each = store.shape, _bytes_of_expert(store, settings)
    active = shape.top_k * shape.experts // shape.experts_per_layer
    whole = each * shape.experts
    given = plan.plane_bytes + plan.long_step_bytes + plan.kv_bytes - plan.first_kv_bytes
    held, both = min(given / whole, 1.0), min((given + plan.dram_limit_bytes) / whole, 1.0)
    launched = _launched(store)
    compiled = launched != MODULES if store.device else store.compute.name != "torch"
    on_cpu = BY_MODULES if not compiled or shape.kv.index else LATENT if shape.kv.latent else COMPILED
    reached = ON_GPU if store.device else on_cpu
    launches = LAUNCHES[launched] if store.device else (0.0, 0.0)
    ends = []
    for end, exponent in enumerate(FOUND):
        missed, read = (1 - held) ** exponent * active * each, (1 - both) ** exponent * active * each
        moved = {"vram": active * each, "dram": missed - read, "ssd": read}
        seconds = tier_seconds(store.dense_bytes_per_token, moved, vars(rates))
        taken = (seconds["dense"] + seconds["vram"]) / reached[end]
        taken += (seconds["dram"] + seconds["ssd"]) / READ[end] + launches[end] * shape.layers
        ends.append((1 / taken, 1 / slowest(seconds), 1 - missed / (active * each), moved["dram"], read))
    tok_s, bound, hits, dram, ssd = zip(*ends, strict=True)
    memory = store.dense_bytes_per_token + active * each
    return Expected(tok_s, bound, held, hits, memory, dram, ssd, reached, compiled, rates)


def _launched(store: StoreModel) -> str:
    """How the layers of a token are launched on a GPU (layers.graph.choose_launches), as far as the config says."""
    traits = traits_of(store.config["model_type"])
    if store.compute.name != "triton" or store.shape.kv.index or RotaryLengths.of(store.config):
        return MODULES
    whole = traits.fused_gqa.block_is_experts and traits.product_router
    return KERNELS if whole else CAPTURED


def speed_text(tok_s: Range) -> str:
    """A range of tokens per second in two digits.

    >>> speed_text((0.8123, 4.26)), speed_text((9.7, 24.6))
    ('0.81 to 4.3', '9.7 to 25')
    """
    return " to ".join(f"{end:.2g}" if end < 100 else f"{end:.0f}" for end in tok_s)


def _bytes_of_expert(store: StoreModel, settings: RunSettings) -> float:
    """Mean bytes of an expert at the bits that settings give it."""
    sizes = {level: store.bytes_of_all(level) / store.shape.experts for level in (8, 4, 2)} | {0: 0.0}
    levels, known = settings.scheduled, sorted(sizes)
    if settings.priced:
        bits = [BITS_PER_WEIGHT[level] for level in known]
        mean = float(np.interp(settings.mean_bits, bits, [sizes[level] for level in known]))
        return min(mean, sizes[levels[0]])
    if len(levels) == 1:
        return sizes[levels[0]]
    return settings.retention * sizes[levels[0]] + (1 - settings.retention) * sizes[levels[-1]]


def _percents(ends: Range) -> str:
    low, high = (f"{100 * end:.0f}" for end in ends)
    return f"{low} %" if low == high else f"{low} to {high} %"


def _sizes(ends: Range) -> str:
    return f"{format_size(ends[1])} to {format_size(ends[0])}"
