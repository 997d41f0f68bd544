"""Where a model is computed: on the CPU, or on a device with memory of its own. Imports torch only when asked."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from storage.errors import UserError

if TYPE_CHECKING:
    from storage.device import Device

DEVICES = ("auto", "cpu", "cuda")


def chosen(name: str) -> str:
    """`auto` as what it is here: cuda where torch finds a GPU and Triton is installed, otherwise cpu.

    Raises:
        UserError: no such device, or not here.
    """
    if name not in DEVICES:
        raise UserError("a device was wanted", f"got {name!r}", f"Choose one of {', '.join(DEVICES)}")
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda was wanted",
            f"torch {torch.__version__} finds no GPU",
            "Install a driver and a torch built for CUDA, or use --device cpu",
        )
    if name == "auto":
        return "cuda" if torch.cuda.is_available() and find_spec("triton") else "cpu"
    return name


def open_device(name: str) -> Device | None:
    """The device of a name; None for the CPU. One for the whole process.

    Raises:
        UserError: as chosen.
    """
    return _opened(chosen(name))


@cache
def _opened(name: str) -> Device | None:
    """The device of a name that `chosen` gave: the same one, whether it was asked for as that or as auto."""
    if name == "cpu":
        return None
    from storage.cuda import CudaDevice

    return CudaDevice()
