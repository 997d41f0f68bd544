"""Writes a bf16 checkpoint with a real model's shapes and random weights, to measure conversions on.

    python -m tools.synthetic.checkpoint --like qwen3-30b-a3b --layers 16 --vocab 32000 DST

The weights are Gaussian and equal for equal arguments. They are cut from one pool at offsets that depend on the
tensor's name, so that the disk, not the generator, limits the speed. Shards are cut as on the Hub: tensors in the
model's order, and a new file before --shard-gb would be exceeded, anywhere in a layer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path

import torch
import xxhash

from edgemoe.bench.synthetic.tokenizer import save_tokenizer
from edgemoe.bench.synthetic.workload import PRESETS, Shape
from edgemoe.console.progress import ByteProgress
from edgemoe.errors import EdgemoeError
from edgemoe.storage.files.atomic import replacing, require_free, write_all
from edgemoe.storage.files.header import header_bytes
from tools.command_line import failed, make_parser
from tools.synthetic.sizes import add_sizes, shape_of

POOL = 1 << 25
"""Weights drawn; a tensor up to this size is a slice of them."""


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and shape of every tensor, layer by layer, a layer's experts after its dense weights."""
    dense = shape.dense()
    yield from ((name, size) for name, size in dense.items() if ".layers." not in name)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield from ((name, size) for name, size in dense.items() if name.startswith(prefix))
        for expert in range(shape.experts):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                size = (shape.inner, shape.hidden) if matrix != "down_proj" else (shape.hidden, shape.inner)
                yield f"{prefix}mlp.experts.{expert}.{matrix}.weight", size


def shards(shape: Shape, limit: int) -> list[dict[str, tuple[int, ...]]]:
    """Divides the tensors into files of at most `limit` bytes; a larger tensor has a file of its own."""
    out: list[dict[str, tuple[int, ...]]] = [{}]
    taken = 0
    for name, size in tensor_shapes(shape):
        if taken and taken + 2 * prod(size) > limit:
            out.append({})
            taken = 0
        out[-1][name] = size
        taken += 2 * prod(size)
    return out


def write(destination: Path, shape: Shape, seed: int, limit: int) -> int:
    """Writes the checkpoint; returns its number of weights.

    Raises:
        UserError: the vocabulary is too small for a tokenizer.
        DoesNotFit: the disk has too few free bytes.
    """
    destination.mkdir(parents=True, exist_ok=True)
    shape.config().save_pretrained(destination)
    save_tokenizer(shape.vocab, destination)
    files = shards(shape, limit)
    total = sum(prod(size) for file in files for size in file.values())
    require_free(destination / "weights", 2 * total)
    largest = max(prod(size) for file in files for size in file.values())
    drawn = torch.randn(max(POOL, 2 * largest), generator=torch.Generator().manual_seed(seed)) * 0.02
    pool = drawn.to(torch.bfloat16).view(torch.uint8).numpy().data
    weight_map, done = {}, 0
    with ByteProgress(f"writing {destination.name}") as progress:
        for number, file in enumerate(files, 1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            header = header_bytes({n: ("BF16", size) for n, size in file.items()}, {"format": "pt"}, 8)
            with replacing(destination / name, len(header) + 2 * sum(map(prod, file.values()))) as fd:
                write_all(fd, header)
                for tensor, size in file.items():
                    length = 2 * prod(size)
                    at = xxhash.xxh3_64_intdigest(tensor.encode()) % (len(pool) - length) // 2 * 2
                    write_all(fd, pool[at : at + length])
                    weight_map[tensor] = name
                    progress.update(done := done + length, 2 * total)
    index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.synthetic.checkpoint", __doc__)
    parser.add_argument("--like", choices=sorted(PRESETS), required=True, help="model of the shapes")
    add_sizes(parser)
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in 10^9 bytes")
    parser.add_argument("destination", type=Path, metavar="DST", help="the checkpoint's directory")
    options = parser.parse_args(argv)
    if options.shard_gb <= 0:
        parser.error(f"expected a --shard-gb above 0, got {options.shard_gb:g}")
    try:
        weights = write(options.destination, shape_of(options), options.seed, int(options.shard_gb * 1e9))
    except EdgemoeError as error:
        return failed("tools.synthetic.checkpoint", error)
    print(json.dumps({"weights": weights}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
