"""Which CPU kernel runs here, and everything that depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from edgemoe.kernels import native
from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.cpu import CpuExpertKernel
from edgemoe.kernels.native import NativeExpertKernel
from storage.base import ResidentForm
from storage.forms import MergedForm, PlaneForm
from storage.layout import Layout, detect
from storage.record import RecordGeometry


class KernelClass(Protocol):
    """A class of expert kernels."""

    def __call__(self, geometry: RecordGeometry, layout: Layout) -> ExpertKernel:
        """A kernel for experts of one geometry, in its layout."""

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes of scratch that one kernel holds."""


@dataclass(frozen=True)
class Compute:
    """One way of computing experts.

    Args:
        name: native or torch.
        layout: what the kernel wants codes in.
        form: how it wants experts to lie in memory: (geometry, layout stored, layout used).
        kernel: of experts.
    """

    name: str
    layout: Layout
    form: Callable[[RecordGeometry, Layout, Layout], ResidentForm]
    kernel: KernelClass


def ways() -> list[Compute]:
    """Every way that works here, the fastest first: edgemoe's own kernel needs AVX2 and a compiler at install."""
    torchs = Compute("torch", detect(), MergedForm, CpuExpertKernel)
    if not native.available():
        return [torchs]
    return [Compute("native", native.LAYOUT, PlaneForm, NativeExpertKernel), torchs]


@cache
def compute() -> Compute:
    """The fastest way here."""
    return ways()[0]
