"""One setting to measure, and where its row belongs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgemoe.policy.settings import RunSettings

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

TABLE = "table"


@dataclass(frozen=True)
class Arm:
    """A setting, the phases it is measured in, and what it belongs to: TABLE, or one of studies.STUDIES."""

    settings: RunSettings
    phases: tuple[Phase, ...]
    study: str

    @property
    def name(self) -> str:
        """The setting's, with what a study varies. Distinct among all arms, so that rows can be found by it.

        Levels are exactly the scheduled ones unless it says "reuse".
        """
        settings = self.settings
        varied = {
            "signals": f" {settings.importance}",
            "depth": f" {settings.depth}",
            "skipping": f" {'scaled' if settings.renormalise else 'unscaled'}",
            "layers": f" layer {settings.only_layer}",
        }
        return settings.name + varied.get(self.study, "") + ("" if settings.exact else " reuse")
