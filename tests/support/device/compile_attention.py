"""Prints, as JSON, how the launches of a row's attention compile: name -> [shared memory, room, spills, fused bf16].

Arguments are names of kernels; Triton's front end translates all others. Without one all are compiled.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from compile_launches import SHARED, compiled, recorded, source_of, translate

from edgemoe.kernels.triton import attention, latents
from edgemoe.kernels.triton.attention import RowAttention, StoredRowAttention, scratch_size
from edgemoe.kernels.triton.latents import LatentRowAttention
from edgemoe.kv.formats import KVFormat

KERNELS = ("attend", "combine", "rotate", "store", "turn_heads")

PRODUCTS = ("to_latents", "to_values")

CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sinks and a window": ((32, 4, 128, 128, 1.0, 128, torch.zeros(32), 0), {}),
    "smaller values": ((64, 4, 192, 128, 1.0, 0, None, 0), {}),
    "latents": ((64, 1, 576, 512, 1.0, 0, None, 0), {"latent": 512}),
    "8 bits": ((32, 4, 128, 128, 1.0, 0, None, 0), {"form": KVFormat("q8_0", "q8_0")}),
    "latents of 4 bits": (
        (64, 1, 576, 512, 1.0, 0, None, 0),
        {"form": KVFormat("q4_0", "q4_0"), "latent": 512},
    ),
}
"""Name -> arguments of StoredRowAttention."""


def bf16(*shape: int) -> torch.Tensor:
    """Memory for a launch that does not run."""
    return torch.zeros(*shape, dtype=torch.bfloat16)


def launch(shape: StoredRowAttention) -> None:
    """Launches the next row of a sequence and its attention."""
    state = torch.zeros(8, dtype=torch.int64)
    keys, values = bf16(shape.kv_heads, shape.dim), bf16(shape.kv_heads, shape.value_dim)
    shape.store(keys, values, state)
    scratch = torch.zeros(scratch_size(shape.heads, max(shape.dim, shape.value_dim)))
    shape.attend(bf16(shape.heads, shape.dim), state, scratch, bf16(shape.heads, shape.value_dim))


def launch_row() -> None:
    """Launches the attention of Qwen3-30B-A3B, from its products on."""
    norms = (bf16(128), 1e-6), (bf16(128), 1e-6)
    shape, state = RowAttention(32, 4, 128, norms, 1.0, 0, 0), torch.zeros(8, dtype=torch.int64)
    scratch = torch.zeros(scratch_size(32, 128))
    shape.launch(bf16(40 * 128), (bf16(128), bf16(128)), state, bf16(4096), scratch, bf16(4096))


def launch_latents() -> None:
    """Launches the products of GLM-4.7-Flash's heads, whose weights have 8 bits, and the attention between them."""
    weight = torch.zeros(20 * (192 + 256), 512, dtype=torch.int8)
    shape = LatentRowAttention(weight, bf16(len(weight)), 20, 192, 64, 1.0, 0)
    state, scratch = torch.zeros(8, dtype=torch.int64), torch.zeros(shape.scratch_size)
    recorded(attention, KERNELS, lambda: shape.attend(bf16(20, 256), state, scratch, bf16(20, 256)))


def main() -> None:
    """Compiles attention of each case, and every other kernel once or twice, for the smallest shared memory."""
    names = {
        "heads": PRODUCTS,
        "latents of 4 bits": KERNELS,
        "latents": ("store", "attend"),
        "row": ("rotate",),
    }
    table = {}
    for name, each in all_launches():
        kernel = each[0].__name__
        if kernel in names.get(name, ("attend",)):
            # Only 9.0 has products and sums of bf16, which the compiler may fuse.
            capability = 90 if kernel in ("rotate", "store") else 86
            if sys.argv[1:] and kernel not in sys.argv[1:]:
                translate(source_of(each), capability, each[2])
                continue
            code = compiled(each, capability)
            fused = code.asm["ptx"].count("fma.rn.bf16")
            table[f"{name}, {kernel}"] = [code.shared, SHARED[capability], code.spills, fused]
    print(json.dumps(table))


def all_launches() -> list[tuple[str, tuple[Any, ...]]]:
    """The launches of each case with its name."""
    pairs = []
    for name, (some, others) in CASES.items():
        run = partial(launch, StoredRowAttention(*some, **others))
        pairs += [(name, each) for each in recorded(attention, KERNELS, run)]
    pairs += [("heads", each) for each in recorded(latents, PRODUCTS, launch_latents)]
    return pairs + [("row", each) for each in recorded(attention, KERNELS, launch_row)]


if __name__ == "__main__":
    main()
