"""The routed experts of a layer on a device, and beside it on the CPU what only DRAM has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache.base import Lease
from edgemoe.experts.assignments import Assignments
from edgemoe.experts.layer import ExpertLayer, Predicted
from edgemoe.kernels.base import Part
from edgemoe.kv.step import StepKV


class DeviceExpertLayer(ExpertLayer):
    """An ExpertLayer whose tensors lie on a device.

    The host waits for the device once a layer, for the router's choice and all else that it needs of the layer.
    """

    _logits: torch.Tensor | None = None
    _host_hidden: torch.Tensor | None = None

    def _on_host(
        self, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, step: StepKV
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Brings everything that the host needs of a layer into RAM at once."""
        device, ahead = self.runtime.device, self.looks_ahead
        assert device
        optional = {
            "ranks": step.ranks,
            "logits": super()._next_logits(hidden) if ahead else None,
            "hidden": hidden if self.runtime.dram_kernel else None,
        }
        wanted = {name: tensor for name, tensor in optional.items() if tensor is not None}
        chosen, gates, *others = device.to_host([chosen, gates, *wanted.values()])
        found = dict.fromkeys(optional) | dict(zip(wanted, others, strict=True))
        self._logits, self._host_hidden = found["logits"], found["hidden"]
        return chosen, gates, found["ranks"]

    def _look_ahead(self, hidden: torch.Tensor, slots: int, predicted: Predicted | None) -> None:
        """Starts reading, unless the source did not look ahead yet when the layer's state came to the host."""
        if self._logits is not None:
            super()._look_ahead(hidden, slots, predicted)

    def _next_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits that came with the router's choice."""
        assert self._logits is not None
        return self._logits

    def _compute(
        self,
        leases: Sequence[Lease],
        hidden: torch.Tensor,
        assignments: Assignments,
        rows: torch.Tensor,
        row: int,
        places: list[torch.Tensor],
    ) -> int:
        """Computes experts on the device, or a single token's expert on the CPU where its lease lies in DRAM.

        In DRAM an expert is computed at its scheduled level though more planes may be there: that is the work which was
        weighed against moving it.
        """
        device = self.runtime.device
        assert device
        if leases[0].device == device.name:
            return super()._compute(leases, hidden, assignments, rows, row, places)
        (lease,) = leases
        (one,) = assignments.by_expert[lease.key.expert]
        assert self._host_hidden is not None
        rows[row].copy_(self.in_dram(lease, one.level, self._host_hidden)[0], non_blocking=True)
        places.append(one.places)
        return row + 1

    def in_dram(self, lease: Lease, level: int, hidden: torch.Tensor) -> torch.Tensor:
        """Computes an expert that was left in DRAM for one token, hidden [1, H] in RAM, on the CPU: bf16 [1, H]."""
        kernel = self.runtime.dram_kernel
        assert kernel
        self.runtime.use.add([(level, level, 1)])
        out = torch.empty_like(hidden)
        kernel.forward(hidden, [Part(lease.blocks, lease.level, level, 1)], self.activation, out)
        return out
