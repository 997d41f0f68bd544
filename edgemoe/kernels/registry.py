"""Which kernel runs on a device, and everything that depends on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.native import cuda_layout as slabs
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.cuda_layout import SlabExpertKernel
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.torch_int4 import CpuExpertKernel
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from storage.base import ResidentForm
from storage.forms import MergedForm, PlaneForm
from storage.layout import LAYOUTS, Layout, detect
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
        name: native or torch on a CPU, triton or planes on another device.
        layout: what the kernel wants codes in.
        form: how it wants experts to lie in memory: (geometry, layout stored, layout used).
        kernel: of experts.
    """

    name: str
    layout: Layout
    form: Callable[[RecordGeometry, Layout, Layout], ResidentForm]
    kernel: KernelClass


def ways(device: torch.device | str = "cpu") -> list[Compute]:
    """Every way that works on a device, the fastest first.

    On a CPU edgemoe's own kernel needs AVX2 and a compiler at install; elsewhere the fast one needs Triton.

    Args:
        device: as torch names it. Whether it is there is not asked.
    """
    if torch.device(device).type != "cpu":
        return _device_ways()
    torchs = Compute("torch", detect(), MergedForm, CpuExpertKernel)
    if not native.available():
        return [torchs]
    return [Compute("native", native.LAYOUT, PlaneForm, NativeExpertKernel), torchs]


def _device_ways() -> list[Compute]:
    planes = Compute("planes", LAYOUTS["cuda"], PlaneForm, PlaneExpertKernel)
    if importlib.util.find_spec("triton") is None:
        return [planes]
    # Triton takes most of a second to import, which is of no use on a CPU.
    from edgemoe.kernels.triton.experts import TritonExpertKernel

    return [Compute("triton", LAYOUTS["cuda"], PlaneForm, TritonExpertKernel), planes]


def beside_device(layout: Layout) -> KernelClass:
    """The fastest kernel of the CPU for planes in a device's layout, which nobody may re-lay on their way to it.

    edgemoe's own read cpu-avx2-paired and cuda; of any other, torch's operators make matrices in every call.
    """
    if layout == slabs.LAYOUT and slabs.available():
        return SlabExpertKernel
    return NativeExpertKernel if native.available() and layout == native.LAYOUT else PlaneExpertKernel


@cache
def compute(device: torch.device | str = "cpu") -> Compute:
    """The fastest way on a device."""
    return ways(device)[0]
