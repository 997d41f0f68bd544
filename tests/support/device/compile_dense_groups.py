"""Prints, as JSON, how products with dense weights of 4 to 6 bits compile: name -> [shared memory, room, spills].

Arguments are numbers of bits; sizes belong to Qwen3-30B-A3B's attention.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
from compile_launches import SHARED, compiled, recorded

from edgemoe.kernels.triton import decode_groups, dense_groups
from edgemoe.kernels.triton.dense import Matrix, multiply
from edgemoe.storage.store.dense_shapes import stored_shape


def multiply_row(bits: int) -> None:
    """Launches the products of a row with queries, keys and values."""
    shapes = [stored_shape((rows, 2048), bits) for rows in (4096, 512, 512)]
    matrices = [Matrix(torch.zeros(shape, dtype=torch.uint8)) for shape in shapes]
    row, products = (torch.zeros(size, dtype=torch.bfloat16) for size in (2048, 5120))
    multiply(row, matrices, products)


def decode(bits: int) -> None:
    """Launches the decoding of the queries' weights."""
    decode_groups.decoded_rows(torch.zeros(stored_shape((4096, 2048), bits), dtype=torch.uint8), 0, 4096)


table = dict[str, list[int]]()
for bits in map(int, sys.argv[1:]):
    launches = recorded(dense_groups, ("grouped_gemv",), partial(multiply_row, bits))
    launches += recorded(decode_groups, ("decode_groups",), partial(decode, bits))
    for each in launches:
        for capability, room in SHARED.items():
            code = compiled(each, capability)
            name = f"{each[0].__name__}, {bits} bits, {capability}"
            table[name] = [code.shared, room, code.spills]
print(json.dumps(table))
