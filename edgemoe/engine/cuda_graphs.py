"""A new token's dense work as pieces that a device launches as one: between experts and attention, all is the same.

    note    begin ─ embedding, norm, q k v, rope ─ end │ attention │ begin ─ o, norm, router ─ end │ experts │ begin …
    again   launch ────────────────────────────────────│ attention │ launch ───────────────────────│ experts │ launch …

What depends on the host is left outside of the pieces: attention, whose keys and values grow, and experts, whose
fetching is decided there. Both are this program's own code, hooked into transformers' (attention, experts), and
begin and end the pieces: no module has to be taken apart. A piece reads what the work before it has left in the same
memory as when it was noted, and the step's token and position from two numbers on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgemoe.kv.sequence import StepKV
from storage.device import Device

Work = Callable[[StepKV], torch.Tensor]
"""What is run between two pieces, for the sequence of a step: kernels that read what pieces make."""


@dataclass(frozen=True)
class _Noted:
    """A step in pieces.

    Args:
        pieces: launch, then the work behind it, whose result goes where it was when the piece after it was noted.
        last: launches what is left.
        logits: float32 [1, vocab], which that makes.
    """

    pieces: list[tuple[Callable[[], None], Work, torch.Tensor]]
    last: Callable[[], None]
    logits: torch.Tensor


class NewTokenGraph:
    """Runs steps of one token: the first as ever, since code that is loaded late cannot be noted; then by pieces.

    Args:
        model: of model.build_model, in a family with plain attention.
        device: that it is on.
    """

    def __init__(self, model: nn.Module, device: Device) -> None:
        self._model, self._recorder = model, device.recorder()
        self._token, self._position = (
            torch.zeros(1, 1, dtype=torch.int64, device=device.place) for _ in range(2)
        )
        self._only_row = torch.zeros(1, dtype=torch.int64, device=device.place)
        self._warm = False
        self._noted: _Noted | None = None

    def run(self, token: int, kv: StepKV) -> torch.Tensor:
        """Runs a token behind the one sequence of `kv`.

        Returns:
            float32 [1, vocab], on the device, until the next step.

        Raises:
            as what it runs; a step that fails while pieces are noted leaves none.
        """
        self._token.fill_(token)
        self._position.fill_(kv.get_seq_length())
        if not self._warm:
            self._warm = True
            return self._forward(kv)
        if self._noted is None:
            self._noted = self._note(kv)
            return self._noted.logits
        for launch, work, result in self._noted.pieces:
            launch()
            result.copy_(work(kv))
        self._noted.last()
        return self._noted.logits

    def _note(self, kv: StepKV) -> _Noted:
        """Runs a step, and notes it."""
        pieces: list[tuple[Callable[[], None], Work, torch.Tensor]] = []
        recorder = self._recorder

        def between(work: Work) -> torch.Tensor:
            launch = recorder.end()
            launch()
            result = work(kv)
            pieces.append((launch, work, result))
            recorder.begin()
            return result

        kv.state.between = between
        try:
            with recorder.noting():
                recorder.begin()
                logits = self._forward(kv)
                last = recorder.end()
                last()
        finally:
            kv.state.between = None
        return _Noted(pieces, last, logits)

    def _forward(self, kv: StepKV) -> torch.Tensor:
        output: Any = self._model(
            input_ids=self._token,
            position_ids=self._position,
            past_key_values=kv,
            use_cache=True,
            logits_to_keep=self._only_row,
            kv=kv,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
