"""What a device's lack of memory is for a user: a limit that does not fit, not a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from storage.device import Device
from storage.errors import DoesNotFit


@contextmanager
def taking(device: Device | None, what: str, minimum: int) -> Iterator[None]:
    """Takes memory of a device within the block.

    Args:
        device: None: RAM, of which this says nothing.
        what: it is for: "the dense weights".
        minimum: bytes of --vram-limit that would do.

    Raises:
        DoesNotFit: the device has not so much, in its own words.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DoesNotFit(
            f"memory of {device.name if device else 'the device'} for {what} was wanted",
            str(error).partition("\n")[0],
            "Raise --vram-limit if it is below what is free, or end what else uses the GPU",
            minimum=minimum,
        ) from error
