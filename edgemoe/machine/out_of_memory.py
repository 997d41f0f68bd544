"""Reports a device's lack of memory as a limit that does not fit, instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from edgemoe.errors import DoesNotFit
from edgemoe.machine.device import Device


@contextmanager
def taking(device: Device | None, what: str, minimum: int) -> Iterator[None]:
    """Translates torch's out-of-memory error within the block.

    Args:
        device: the device whose memory is allocated; None: RAM.
        what: the purpose of the memory, as in "dense weights".
        minimum: the smallest sufficient --vram-limit, bytes.

    Raises:
        DoesNotFit: the device has too little free memory; carries the first line of torch's message.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"memory of {device.name if device else 'the device'} for {what}",
            str(error).partition("\n")[0],
            "raise --vram-limit if it is below the free memory, or end other programs on the GPU",
            minimum=minimum,
        ) from error
