"""Memory that the compiled kernel keeps next to tensors, which a memory plan reserves."""

from __future__ import annotations

import ctypes

import torch

from edgemoe.kernels.base import MOST_ROWS
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import Compensator


def attention_bytes(dim: int, tokens: int) -> int:
    """Returns the most bytes that a call of attention takes, with as many threads as torch has now.

    The pool of threads keeps them until the process ends.

    Args:
        dim: size of a head.
        tokens: tokens of the context; attention that each of them receives is counted.
    """
    scratch: int = native.library().edgemoe_attention_scratch(torch.get_num_threads(), dim, tokens)
    return scratch


def compensator_bytes(experts: int, widest: int) -> int:
    """Returns the bytes of C's structures of compensators, and of V x for the rows of a call.

    Args:
        experts: compensators of the model.
        widest: largest sum of a compensator's ranks.
    """
    return experts * ctypes.sizeof(Compensator) + MOST_ROWS * 4 * widest
