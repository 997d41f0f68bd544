"""The routed experts of a layer on a device."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import torch

from edgemoe.experts.assignments import Assignments
from edgemoe.experts.layer import ExpertLayer
from edgemoe.experts.runtime import OnHost
from edgemoe.experts.step import StepContext
from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.device_compensators import DeviceCompensator
from edgemoe.storage.base import ExpertKey


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

    def _compensated(self, step: StepContext, assignments: Assignments) -> dict[ExpertKey, int]:
        """No expert: a request brings no compensators, since the device has all of them."""
        return {}

    def apply(self, x: Rows, parts: Sequence[Part], experts: Sequence[int], out: torch.Tensor) -> None:
        """Computes the parts' rows [R, H]. Rows with a compensator take calls of their own.

        Without one, kernels apply the activation within the first product, so that a row would have other bits next
        to compensated ones.
        """
        if not any(part.compensator for part in parts):
            super().apply(x, parts, experts, out)
            return
        rows, pieces = x.gathered(len(out)), divided(parts)
        for compensates in (False, True):
            some = [piece for piece in pieces if bool(piece[2].compensator) == compensates]
            if not some:
                continue
            numbers, places, own = zip(*some, strict=True)
            inputs = torch.cat([rows[place] for place in places])
            results = torch.empty_like(inputs)
            chosen = [experts[number] for number in numbers]
            if compensates:
                self._compensate(inputs, own, chosen, results)
            else:
                super().apply(Rows(inputs), own, chosen, results)
            for place, result in zip(places, results.split([part.rows for part in own]), strict=True):
                out[place] = result

    def _compensate(
        self, x: torch.Tensor, parts: Sequence[Part], experts: Sequence[int], out: torch.Tensor
    ) -> None:
        """Computes rows that are all compensated: U (V x) is added to the products of both matrices.

        Args:
            x: bf16 [R, H], the rows of the parts one after another.
            parts: experts, each with a compensator of all of its rows.
            experts: their numbers.
            out: bf16 [R, H], written.
        """
        inner: list[torch.Tensor] = []

        def between(products: torch.Tensor) -> torch.Tensor:
            inner.append(self.activation.apply(_corrected(products, x, parts, "gate_up")))
            return inner[0]

        layer = copy(self)
        layer.activation = Activation(CUSTOM, between)
        ExpertLayer.apply(layer, Rows(x), parts, experts, out)
        out.copy_(_corrected(out, inner[0], parts, "down"))


def divided(parts: Sequence[Part]) -> list[tuple[int, slice, Part]]:
    """Cuts parts into rows with a compensator and rows without one.

    Returns:
        (number of the part, its rows in the call, a part of which all rows are compensated, or none), in order.
    """
    pieces: list[tuple[int, slice, Part]] = []
    at = 0
    for index, part in enumerate(parts):
        first = part.compensated if part.compensator else 0
        for count, compensator in ((first, part.compensator), (part.rows - first, None)):
            if count:
                own = replace(
                    part, rows=count, compensator=compensator, compensated=count if compensator else 0
                )
                pieces.append((index, slice(at, at + count), own))
                at += count
    return pieces


def _corrected(rows: torch.Tensor, x: torch.Tensor, parts: Sequence[Part], matrix: str) -> torch.Tensor:
    """Adds U (V x) to the products of a matrix.

    Args:
        rows: bf16 [R, N], the products; not changed.
        x: bf16 [R, K], multiplied with the matrix.
        parts: experts, each with a compensator, and their rows, R in all.
        matrix: "gate_up" or "down".

    Returns:
        bf16 [R, N].
    """
    sizes, pieces = [part.rows for part in parts], []
    for part, product, own in zip(parts, rows.split(sizes), x.split(sizes), strict=True):
        assert isinstance(part.compensator, DeviceCompensator)
        added = part.compensator.corrections()[matrix].apply(own.float())
        pieces.append((product.float() + added).to(torch.bfloat16))
    return torch.cat(pieces)
