"""The choice of the expert kernel that runs on a device, and of the layout and form in which it reads experts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

from edgemoe.errors import UserError
from edgemoe.kernels.base import ExpertKernel
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.probe import choose_fastest
from edgemoe.kernels.torch_int4 import CpuExpertKernel
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.storage.base import ResidentForm
from edgemoe.storage.record.forms import MergedForm, PlaneForm
from edgemoe.storage.record.layout import LAYOUTS, Layout, detect
from edgemoe.storage.record.offsets import RecordGeometry


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
        kernel: computes experts.
    """

    name: str
    layout: Layout
    form: Callable[[RecordGeometry, Layout, Layout], ResidentForm]
    kernel: KernelClass


def kernels_for(device: torch.device | str = "cpu") -> list[Compute]:
    """Every kernel that works on a device, the fastest first.

    On a CPU the compiled kernel needs AVX2, or under Linux NEON, and a C compiler at install; on a GPU the fast one
    needs Triton.

    Args:
        device: the device's name in torch; it need not be present.
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
def triton_runs(place: torch.device) -> bool:
    """Whether Triton's kernels compute on a place: a CUDA device, with Triton installed."""
    return place.type == "cuda" and importlib.util.find_spec("triton") is not None


AUTO = "auto"
NAMES = (AUTO, *(path for path in paths.PATHS if path != paths.EMULATED), "torch")
"""Names for `select`: of the fastest path of everything, of one path of the compiled kernel, and of torch's kernel."""

_forced: str | None = None
"""The name of the only kernel that `compute` gives on a CPU; None: the fastest. Set by `select`."""


def select(name: str, directory: Path, *, on_gpu: bool = False) -> None:
    """Chooses the CPU's kernel and, where it is the compiled one, the path of each kind of work, for this process.

    Args:
        name: one of NAMES. With `auto` every kind of work takes its fastest path, which is measured once a machine.
        directory: where the measurement is kept.
        on_gpu: the model is computed on a GPU, whose kernels `name` does not choose.

    Raises:
        UserError: no such kernel on this machine; or a name other than `auto` on a GPU.
    """
    global _forced
    if on_gpu and name != AUTO:
        raise UserError(
            "a model on the CPU, for --kernel",
            "a GPU, which has kernels of its own",
            "leave it out, or give --device cpu",
        )
    if name not in NAMES or (name in paths.PATHS and not (native.available() and name in paths.available())):
        here = [*(paths.available() if native.available() else []), "torch"]
        raise UserError(
            f"one of {', '.join((AUTO, *here))} for --kernel",
            name,
            "leave it out for the fastest; others need a processor and a system that have them",
        )
    _forced = name if name == "torch" else None
    compute.cache_clear()
    if not native.available():
        return
    if name in paths.PATHS:
        paths.choose(paths.forced(name))
    else:
        choose_fastest(directory)


@cache
def compute(device: torch.device | str = "cpu") -> Compute:
    """The fastest kernel on a device, or the one that is forced on the CPU."""
    found = kernels_for(device)
    return next((kernel for kernel in found if kernel.name == _forced), found[0])
