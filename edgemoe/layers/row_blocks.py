"""The parts of decoder layers over many rows, a block of rows at a time, so that only experts see all rows at once.

A long prompt goes through a layer as a whole: each of the layer's parts but its experts takes BLOCK_ROWS rows after
one another, and its temporary memory is one block's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from edgemoe.kv import blocks
from edgemoe.kv.step import StepKV


class RowBlocks(nn.Module):
    """Runs a module block by block. A row's result depends on earlier rows alone, through the KV, or on its picture's.

    Args:
        module: its first argument, or `hidden_states`, is [..., rows, H]; it returns a tensor [..., rows, N], or a
            tuple of such tensors and of None.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        """The module's own attributes: transformers' blocks read attributes of their routers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Maps all rows as the module does."""
        x: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        rows = x.shape[-2]
        if rows <= blocks.BLOCK_ROWS:
            return self.module(*args, **kwargs)
        kv = next((value for value in kwargs.values() if isinstance(value, StepKV)), None)
        whole: list[torch.Tensor | None] = []
        single = False
        end = 0
        while end < rows:
            block = range(end, min(end + blocks.BLOCK_ROWS, rows))
            if kv is not None:
                kv.check_cancelled()
                block = range(end, kv.end_of_block(block))
            end = block.stop
            with nullcontext() if kv is None else kv.block(block):
                part = self.module(
                    *(rows_of(arg, block, rows) for arg in args),
                    **{name: rows_of(arg, block, rows) for name, arg in kwargs.items()},
                )
            single = not isinstance(part, tuple)
            parts = (part,) if single else part
            whole = whole or [_room_for(one, rows) for one in parts]
            for into, one in zip(whole, parts, strict=True):
                if into is not None:
                    into[..., block.start : block.stop, :] = one
        return whole[0] if single else tuple(whole)


def in_row_blocks(model: Any) -> None:
    """Makes every part of a model's decoder layers take its rows block by block, except routed experts."""
    for layer in model.get_submodule("model.layers"):
        _wrap_parts(layer)


def _wrap_parts(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if hasattr(child, "edgemoe"):
            continue
        if any(hasattr(part, "edgemoe") for part in child.modules()):
            _wrap_parts(child)
        else:
            setattr(module, name, RowBlocks(child))


def rows_of(argument: Any, block: range, rows: int) -> Any:
    """The block's rows of an argument with a row for each of the step's; any other argument as it is."""
    if isinstance(argument, tuple):
        return tuple(rows_of(one, block, rows) for one in argument)
    if not isinstance(argument, torch.Tensor) or argument.dim() < 2:
        return argument
    if argument.shape[-2] == rows:
        return argument[..., block.start : block.stop, :]
    # Positions [1, rows].
    return argument[:, block.start : block.stop] if argument.shape == (1, rows) else argument


def _room_for(part: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """A tensor for all rows of which `part` is the first block."""
    return None if part is None else part.new_empty(*part.shape[:-2], rows, part.shape[-1])
