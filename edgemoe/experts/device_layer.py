"""The routed experts of a layer on a device."""

from __future__ import annotations

import torch

from edgemoe.experts.layer import ExpertLayer
from edgemoe.experts.runtime import OnHost
from edgemoe.experts.step import StepContext


class DeviceExpertLayer(ExpertLayer):
    """An ExpertLayer whose tensors lie on a device.

    The host waits for the device once a layer, for the router's choice and all else that it needs of the layer.
    """

    def _on_host(
        self, hidden: torch.Tensor, choice: torch.Tensor, gates: torch.Tensor, step: StepContext
    ) -> OnHost:
        """Brings everything that the host needs of a layer into RAM at once.

        The next router's logits are among it where the source looks ahead now.
        """
        device = self.runtime.device
        assert device
        compute = self.next_logits(hidden) if self.looks_ahead else None
        own, logits = step.take_rerouted(), compute() if compute else None
        optional = {"ranks": step.kv.ranks, "own": own, "logits": logits}
        present = {name: tensor for name, tensor in optional.items() if tensor is not None}
        choice, gates, *others = device.to_host([choice, gates, *present.values()])
        found = dict.fromkeys(optional) | dict(zip(present, others, strict=True))
        ranks, own, logits = found.values()
        return OnHost(choice, gates, ranks, None if logits is None else lambda: logits, own)
