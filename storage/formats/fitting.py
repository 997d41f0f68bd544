"""Checkpoints whose matrices have several packings: each matrix's stored parts show which one it has.

Configs name the matrices of a packing by regular expressions. Those are not run: an untrusted one may take forever. The
shapes of a matrix's parts fit one packing of the config, or the matrix is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol, TypeVar

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.storage.files.untrusted import USE_SOURCE


class Fitted(Protocol):
    """A weight that was opened with a packing."""

    @property
    def form(self) -> tuple[int, ...]:
        """Describes how the packing reads the parts; two packings that read the same numbers have equal forms."""


_P = TypeVar("_P")
_W = TypeVar("_W", bound=Fitted)


def fitting(packings: Iterable[_P], make: Callable[[_P], _W], name: str) -> _W:
    """Opens a matrix with the packing that its parts fit.

    Args:
        packings: the packings that quantization_config names, at least one. Where several fit and read the same
            numbers, the first of them is used.
        make: opens the matrix; raises MissingTensor where a part contradicts the packing.
        name: the matrix, for messages.

    Raises:
        MissingTensor: the parts fit no packing.
        ModelRefused: the parts fit several that read different numbers.
    """
    first, *others = packings
    if not others:
        return make(first)
    made: dict[tuple[int, ...], _W] = {}
    for packing in (first, *others):
        with suppress(MissingTensor):
            weight = make(packing)
            made.setdefault(weight.form, weight)
    if not made:
        return make(first)  # raises the error of the first
    if len(made) > 1:
        raise ModelRefused(
            f"one packing of quantization_config that fits {name}", f"{len(made)} that fit", USE_SOURCE
        )
    return made.popitem()[1]
