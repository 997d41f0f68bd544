"""The formats that a store is exported to: the name of each, and its plan."""

from __future__ import annotations

from typing import Any

from edgemoe.storage.export.checkpoint import CheckpointPlan, CompressedPlan, PlanMaker
from edgemoe.storage.export.plan import Plan


def _gguf(*arguments: Any) -> Plan:
    # Imported here: only GGUF files need the gguf package.
    from edgemoe.storage.export.gguf_plan import GgufPlan

    return GgufPlan(*arguments)


FORMATS: dict[str, PlanMaker] = {
    "compressed-tensors": CompressedPlan,
    "gguf": _gguf,
    "safetensors": CheckpointPlan,
}
"""Name of a format -> its plan."""
