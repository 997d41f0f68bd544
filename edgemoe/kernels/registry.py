"""Which expert kernel runs on a device, and in what layout and form it reads experts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.native import library as native
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
        """Makes a kernel for experts of one geometry in a layout."""

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Returns the bytes of scratch that one kernel uses."""


@dataclass(frozen=True)
class Compute:
    """A kernel and the data that it reads.

    Args:
        name: native or torch on a CPU, triton or planes on another device.
        layout: the order of codes that the kernel reads.
        form: makes the form of resident experts from (geometry, layout stored, layout read).
        kernel: of experts.
    """

    name: str
    layout: Layout
    form: Callable[[RecordGeometry, Layout, Layout], ResidentForm]
    kernel: KernelClass


def kernels_for(device: torch.device | str = "cpu") -> list[Compute]:
    """Every kernel that works on a device, the fastest first.

    On a CPU the compiled kernel needs AVX2 and a C compiler at install; on a GPU the fast one needs Triton.

    Args:
        device: as torch names it; it need not be present.
    """
    if torch.device(device).type != "cpu":
        return _device_kernels()
    torch_int4 = Compute("torch", detect(), MergedForm, CpuExpertKernel)
    if not native.available():
        return [torch_int4]
    return [Compute("native", native.LAYOUT, PlaneForm, NativeExpertKernel), torch_int4]


def _device_kernels() -> list[Compute]:
    planes = Compute("planes", LAYOUTS["cuda"], PlaneForm, PlaneExpertKernel)
    if importlib.util.find_spec("triton") is None:
        return [planes]
    # Imported here: Triton takes most of a second to import, and a CPU run never needs it.
    from edgemoe.kernels.triton.experts import TritonExpertKernel

    return [Compute("triton", LAYOUTS["cuda"], PlaneForm, TritonExpertKernel), planes]


@cache
def compute(device: torch.device | str = "cpu") -> Compute:
    """The fastest kernel on a device."""
    return kernels_for(device)[0]
