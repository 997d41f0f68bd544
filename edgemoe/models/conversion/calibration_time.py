"""Estimates how long the calibration of a model's codes takes on this machine."""

from __future__ import annotations

from edgemoe.families.table import family_of
from edgemoe.machine.cgroups import cores
from edgemoe.machine.process import available_memory
from edgemoe.models.cache import rates_path
from edgemoe.speed.rates import kept_rates
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import store_bytes

CODED_WEIGHTS = 3_600_000
"""Experts' weights that a core codes per second by error feedback (docs/benchmarks/2026-11-26-calibrated-codes.md)."""

SAMPLES = 4096
"""Tokens that a model writes at its first use to calibrate its codes on: half of what `convert --calibrate` takes."""

MEASURED = 2048
"""Tokens that it writes to measure its dense weights on."""

STEP = 0.0015
"""Seconds of a token apart from reading weights."""

REACHED = 0.4
"""The part of RAM's rate that a token reaches at least (plans.expected)."""


def calibration_seconds(checkpoint: Checkpoint, samples: int = SAMPLES) -> float | None:
    """Estimates the duration of a calibration with this machine's cores and measured rates.

    Args:
        checkpoint: the source; no weights are read.
        samples: tokens of the text.

    Returns:
        seconds; None where a calibration brings nothing, as the source has codes of its own.

    Raises:
        ModelRefused, MissingTensor: from store_bytes.
    """
    family = family_of(checkpoint.config)
    experts = ExpertWeights(checkpoint, family)
    if experts.has_codes(None):
        return None
    weights = len(experts.layers) * experts.count * experts.geometry(None).weights
    whole = store_bytes(checkpoint, family, max_level=None, dense_bits=16)
    token = whole - weights * (1 - family.top_k / experts.count)  # a weight of an expert takes a byte
    rates = kept_rates(rates_path(), "cpu")
    rate = REACHED * rates.vram if whole < available_memory() else rates.ssd
    return weights / (CODED_WEIGHTS * cores()) + (samples + MEASURED) * (STEP + token / rate)
