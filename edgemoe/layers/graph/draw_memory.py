"""Memory that captured launches draw tokens with, and the random numbers that are sent there."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.machine.device import Device
from edgemoe.policy.drawing import DrawRule, Draws, powers


class DrawMemory:
    """A conversation's rule and its next random numbers on the device, by the positions whose tokens they draw.

    They are sent once in some 250 tokens, and where the host has taken another number than the device expects.

    Args:
        device: the device of the model.
        vocab: size of the vocabulary.

    Attributes:
        tables: tensors of kernels.triton.draw.
    """

    def __init__(self, device: Device, vocab: int) -> None:
        from edgemoe.kernels.triton import draw
        from edgemoe.kernels.triton.token import parts_of

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device.place)

        self._numbers, self._rule = draw.NUMBERS, draw.RULE
        self.tables = draw.DrawTables(
            rule=zeros(draw.RULE + draw.NUMBERS),
            powers=torch.from_numpy(powers()).to(device.place),
            counts=zeros(draw.VALUES, dtype=torch.int32),
            sums=zeros(3, draw.VALUES // draw.SPAN),
            pointed=zeros(2),
            matches=zeros(parts_of(vocab), dtype=torch.int32),
        )
        # Two in turn: the copy of one is done once the token after it has landed.
        self._host = [device.host_tensor((draw.RULE + draw.NUMBERS,), torch.int64) for _ in range(2)]
        self._sent: tuple[Draws, DrawRule, int] | None = None
        self._end = 0
        """First position for which no number has been sent."""

    def follow(self, draws: Draws, position: int) -> None:
        """Launches the copy of rule and random numbers, unless the device has them for this token and the next one.

        Args:
            draws: the numbers of the conversation; its next one draws the token after `position`. It has a rule.
            position: the number of the sequence's tokens before the token that is launched.
        """
        rule = draws.rule
        assert rule
        now = draws, rule, position - draws.number
        if self._sent and self._sent[0] is draws and self._sent[1:] == now[1:] and position + 1 < self._end:
            return
        self._sent, self._end = now, position + self._numbers
        self._host.reverse()
        numbers = self._host[0].numpy()
        scale = int(np.float32(rule.scale).view(np.int32))
        numbers[: self._rule] = position, scale, rule.top_k, rule.mass, rule.least
        numbers[self._rule :] = draws.coming(self._numbers)
        self.tables.rule.copy_(self._host[0], non_blocking=True)
