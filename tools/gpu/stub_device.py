"""A device that launches nothing, and a small store on it, to time the host (tools.gpu.host_time)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: nothing is compiled

import torch

from edgemoe.bench.synthetic.store import Synthetic, synthesize
from edgemoe.bench.synthetic.workload import Shape, random_dense
from edgemoe.kernels.registry import kernels_for
from edgemoe.layers.dense import DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.router import CompiledRouter
from edgemoe.machine.device import Device, Event
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.record.layout import LAYOUTS

SHAPE = Shape(64, 48, 128, 32, 8, 4, 2, 16, 151_936)
"""Layers, experts, experts of a token and vocabulary of Qwen3-30B-A3B; matrices of a few KB."""


class _Done(Event):
    """Is always done."""

    def done(self) -> bool:
        """True."""
        return True

    def wait(self) -> None:
        """Returns at once."""


class StubDevice(Device):
    """A device that computes nothing and copies nothing, and whose memory is RAM.

    Attributes:
        outcome: int32, the result of `fetch` for tensors of its size.
    """

    place = torch.device("cpu")
    reads_host_memory = True
    outcome = torch.empty(0, dtype=torch.int32)

    @property
    def name(self) -> str:
        """Differs from the place's."""
        return "stub"

    def allocate(self, size: int) -> torch.Tensor:
        """Allocates RAM."""
        return torch.zeros(size, dtype=torch.uint8)

    def pin(self, memory: memoryview) -> bool:
        """Pins nothing."""
        return True

    def unpin(self, memory: memoryview) -> None:
        """Unpins nothing."""

    def copy(self, pairs: Sequence[tuple[memoryview, torch.Tensor]], after: Event | None) -> Event:
        """Copies nothing."""
        return _Done()

    def await_copies(self, events: Iterable[Event]) -> None:
        """Consumes the events."""
        for _ in events:
            pass

    def computed(self) -> Event:
        """An event that is done."""
        return _Done()

    def await_computed(self) -> None:
        """Returns at once."""

    def host_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocates RAM."""
        return torch.zeros(*shape, dtype=dtype)

    def capture_pieces(
        self, launch: Callable[[Callable[[], None]], None], pool: object | None = None
    ) -> list[Callable[[], None]]:
        """Captures nothing: the launch does nothing."""
        return [lambda: None]

    def without_waits(self) -> AbstractContextManager[None]:
        """Changes nothing."""
        return nullcontext()

    def to_host(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies tensors."""
        return [tensor.clone() for tensor in tensors]

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Returns the outcome, or a copy of another tensor."""
        return (self.outcome if len(tensor) == len(self.outcome) else tensor.clone()), _Done()

    def free_unused(self) -> None:
        """Frees nothing."""

    def cap(self, size: int | None) -> None:
        """Limits nothing."""

    def driver_bytes(self) -> int:
        """A small number of bytes."""
        return 1000

    def available_bytes(self) -> int:
        """A large number of bytes."""
        return 1 << 40

    def peak(self) -> int:
        """A small number of bytes."""
        return 1000


def open_store(directory: Path) -> StoreModel:
    """Opens the store on a stub; makes it first, if the directory is new."""
    if not (directory / "store.json").exists():
        dense, layout = partial(random_dense, SHAPE, 0), LAYOUTS["cuda"]
        model = Synthetic(SHAPE, max_level=4, dense_bits=16)
        synthesize(directory, model, dense, source="host", seed=0, update=lambda *_: None, layout=layout)
    store, compute = StoreModel.open(directory), kernels_for("cuda")[0]
    form = compute.form(store.manifest.geometry, LAYOUTS["cuda"], compute.layout)
    for part in (
        GroupedQueryAttention,
        CompiledRouter,
        DenseNorm,
    ):  # the stub's place is the CPU, which has kernels
        part.try_from = lambda *_: None  # type: ignore[method-assign]
    shape = replace(store.shape, kv=store.shape.kv.moving())
    return replace(store, form=form, compute=compute, device=StubDevice(), shape=shape)
