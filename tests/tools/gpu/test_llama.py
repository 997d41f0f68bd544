"""tools/gpu/llama.py: the tensors that stay in RAM."""

from __future__ import annotations

import re

from tools.gpu.llama import on_cpu


def test_experts_of_the_first_layers_stay_in_ram():
    """The pattern finds the experts of these layers and no other tensor, and an empty entry ends the list."""
    first, last = on_cpu(11, 0x1234)
    assert (first.type, last.pattern, last.type) == (0x1234, None, None)
    names = [f"blk.{layer}.ffn_{part}.weight" for layer in (0, 1, 10, 11) for part in ("up_exps", "gate_inp")]
    found = [name for name in names if re.search(first.pattern.decode(), name)]
    assert found == ["blk.0.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight", "blk.10.ffn_up_exps.weight"]


def test_without_layers_nothing_stays_in_ram():
    """The list has its end alone."""
    (last,) = on_cpu(0, 0x1234)
    assert last.pattern is None
