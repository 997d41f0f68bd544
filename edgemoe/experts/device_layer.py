"""The routed experts of a layer on a device."""

from __future__ import annotations

import torch

from edgemoe.experts.layer import ExpertLayer, Predicted
from edgemoe.kv.step import StepKV


class DeviceExpertLayer(ExpertLayer):
    """An ExpertLayer whose tensors lie on a device.

    The host waits for the device once a layer, for the router's choice and all else that it needs of the layer.
    """

    _logits: torch.Tensor | None = None

    def _on_host(
        self, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, step: StepKV
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Brings everything that the host needs of a layer into RAM at once."""
        device = self.runtime.device
        assert device
        optional = {
            "ranks": step.ranks,
            "logits": super()._next_logits(hidden) if self.looks_ahead else None,
        }
        wanted = {name: tensor for name, tensor in optional.items() if tensor is not None}
        chosen, gates, *others = device.to_host([chosen, gates, *wanted.values()])
        found = dict.fromkeys(optional) | dict(zip(wanted, others, strict=True))
        self._logits = found["logits"]
        return chosen, gates, found["ranks"]

    def _look_ahead(
        self, hidden: torch.Tensor, slots: int, predicted: Predicted | None, *, scan: bool = False
    ) -> None:
        """Starts reading, unless the source did not look ahead yet when the layer's state came to the host."""
        if self._logits is not None:
            super()._look_ahead(hidden, slots, predicted, scan=scan)

    def _next_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits that came with the router's choice."""
        assert self._logits is not None
        return self._logits
