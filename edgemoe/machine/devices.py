"""Chooses and opens the device that a model is computed on. Imports torch only when called."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from edgemoe.errors import UserError

if TYPE_CHECKING:
    from edgemoe.machine.device import Device

DEVICES = ("auto", "cpu", "cuda")

LEAST_CAPABILITY = 8, 0
"""NVIDIA's compute capability from which a GPU multiplies bf16: Ampere (RTX 30, A100) and later."""


def device_name(name: str) -> str:
    """Resolves `auto`: to cuda where torch finds a GPU that multiplies bf16 and Triton is installed, otherwise to cpu.

    Raises:
        UserError: `name` is none of DEVICES, or the machine does not have it, or its GPU is too old.
    """
    if name not in DEVICES:
        raise UserError("the name of a device", repr(name), f"choose one of {', '.join(DEVICES)}")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "a GPU for --device cuda",
            f"torch {torch.__version__}, which finds no GPU",
            "install a driver and a torch built for CUDA, or use --device cpu",
        )
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu"
    capability = torch.cuda.get_device_capability()
    if name == "auto":
        return "cuda" if capability >= LEAST_CAPABILITY and find_spec("triton") else "cpu"
    if capability < LEAST_CAPABILITY:
        raise UserError(
            "a GPU of compute capability 8.0 or later for --device cuda (RTX 30, A100, and newer)",
            f"{torch.cuda.get_device_name()}, of capability {capability[0]}.{capability[1]}",
            "use --device cpu",
        )
    return name


def open_device(name: str) -> Device | None:
    """The device of a name; None for the CPU. The process has one Device, whichever name it is opened by.

    Raises:
        UserError: `name` is none of DEVICES, or the machine does not have it.
    """
    return _cuda() if device_name(name) == "cuda" else None


@cache
def _cuda() -> Device:
    from edgemoe.machine.cuda import CudaDevice

    return CudaDevice()
