"""Writes a qwen3moe GGUF with a real model's shapes and random weights, to measure llama.cpp on.

    python -m tools.synthetic.gguf --like qwen3-30b-a3b --layers 16 --vocab 32000 w1.gguf
    python -m tools.synthetic.store --from-gguf w1.gguf --max-level 4 --dense-bits 8 w1-store

Experts, embeddings, head and attention are Q4_K, as most of a Q4_K_M file is; routers and norms are float32. Dense
weights and routers are drawn as in tools/synthetic/store.py, so that both programs route alike. Experts are random in
both files, and different: here each is drawn from a pool of Gaussian blocks with variance 1 / inputs that are quantized
once, and no two are equal. Keeps one layer's largest tensor in memory. A partial file never has the final name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.bench.synthetic.tokenizer import vocabulary
from edgemoe.bench.synthetic.workload import PRESETS, Shape, generator, random_dense
from edgemoe.console.progress import ByteProgress
from edgemoe.errors import EdgemoeError
from edgemoe.storage.files.atomic import partial_file
from tools.command_line import failed, make_parser
from tools.synthetic import gguf_q4k
from tools.synthetic.gguf_dense import gguf_name
from tools.synthetic.sizes import add_sizes, shape_of

POOL = 1 << 15
"""Distinct blocks of 256 weights that an expert's matrix is drawn from: a matrix of W1 has 6,144 blocks."""

ARCHITECTURE = "qwen3moe"

Q4_K, F32 = gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.F32


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields llama.cpp's name and the shape of every tensor in the file's order: layer by layer."""
    dense = {gguf_name(name): size for name, size in shape.dense().items()}
    yield from ((name, size) for name, size in dense.items() if not name.startswith("blk."))
    for layer in range(shape.layers):
        prefix = f"blk.{layer}."
        yield from ((name, size) for name, size in dense.items() if name.startswith(prefix))
        for matrix in ("gate", "up"):
            yield f"{prefix}ffn_{matrix}_exps.weight", (shape.experts, shape.inner, shape.hidden)
        yield f"{prefix}ffn_down_exps.weight", (shape.experts, shape.hidden, shape.inner)


def is_quantized(name: str, size: tuple[int, ...]) -> bool:
    """Whether a tensor is Q4_K; norms and routers are float32."""
    return len(size) > 1 and "ffn_gate_inp" not in name


def stored_shape(name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape in the file: bytes where it is quantized, elements otherwise.

    Raises:
        UserError: the rows do not divide into blocks.
    """
    return (*size[:-1], gguf_q4k.blocks_in(size) * gguf_q4k.BYTES) if is_quantized(name, size) else size


class Tensors:
    """Makes the tensors of a model by their names.

    Args:
        shape: shape of the model.
        seed: the seed of all random numbers; workload.random_dense draws the dense tensors.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape, self._seed = shape, seed
        self._dense = {gguf_name(name): name for name in shape.dense()}
        self._pools = {inputs: self._pool(inputs) for inputs in {shape.hidden, shape.inner}}

    def _pool(self, inputs: int) -> torch.Tensor:
        """Blocks uint8 [POOL, 144] of Gaussian weights with variance 1 / inputs."""
        random = generator(self._seed, f"gguf.pool.{inputs}")
        weights = torch.empty(POOL, gguf_q4k.WEIGHTS).normal_(0, inputs**-0.5, generator=random)
        return torch.from_numpy(gguf_q4k.quantize(weights.numpy()))

    def make(self, name: str, size: tuple[int, ...]) -> NDArray[Any]:
        """A tensor as the file stores it: uint8 of stored_shape, or float32 of `size`."""
        if name not in self._dense:
            return self._experts(name, size)
        dense = random_dense(self._shape, self._seed, self._dense[name], size)
        if not is_quantized(name, size):
            return dense.float().numpy()
        return np.concatenate([gguf_q4k.quantize(rows.float().numpy()) for rows in dense.split(4096)])

    def _experts(self, name: str, size: tuple[int, ...]) -> NDArray[np.uint8]:
        pool, blocks = self._pools[size[-1]], prod(size[1:]) // gguf_q4k.WEIGHTS
        out = torch.empty(size[0], blocks, gguf_q4k.BYTES, dtype=torch.uint8)
        for expert, place in enumerate(out):
            random = generator(self._seed, f"gguf.{name}.{expert}")
            torch.index_select(pool, 0, torch.randint(POOL, (blocks,), generator=random), out=place)
        return out.view(stored_shape(name, size)).numpy()


def add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    """Adds the model's sizes, and the byte-level vocabulary that llama.cpp requires."""
    writer.add_name("synthetic")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_S)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.inner)
    tokens, special = vocabulary(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if t in special else kinds.NORMAL for t in tokens])
    # llama.cpp refuses a vocabulary without merges. This merge leads to no token, so it never applies.
    writer.add_token_merges(["Ċ Ċ"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)


def write(path: Path, shape: Shape, seed: int, update: Callable[[int, int], None]) -> int:
    """Writes the file; returns its bytes of tensors.

    Args:
        path: the file, replaced if it exists.
        shape: shape of the model.
        seed: the seed of all random numbers.
        update: called with the bytes done and the total bytes.

    Raises:
        UserError: the vocabulary is too small, or a matrix does not divide into blocks.
        DoesNotFit: the disk has too few free bytes.
        WriteFailed: the disk refuses a write.
    """
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    add_metadata(writer, shape)
    total = 0
    for name, size in tensor_shapes(shape):
        stored = stored_shape(name, size)
        kind, dtype = (Q4_K, np.uint8) if is_quantized(name, size) else (F32, np.float32)
        length = prod(stored) * np.dtype(dtype).itemsize
        writer.add_tensor_info(name, stored, np.dtype(dtype), length, raw_dtype=kind)
        total += length
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial_file(path, total) as partial:
        _write_tensors(writer, partial, Tensors(shape, seed), shape, lambda done: update(done, total))
        with partial.open("rb") as file:
            os.fsync(file.fileno())
    return total


def _write_tensors(
    writer: gguf.GGUFWriter, path: Path, tensors: Tensors, shape: Shape, update: Callable[[int], None]
) -> None:
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for name, size in tensor_shapes(shape):
            tensor = tensors.make(name, size)
            writer.write_tensor_data(tensor)
            update(done := done + tensor.nbytes)
    finally:
        writer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.synthetic.gguf", __doc__)
    parser.add_argument(
        "--like", choices=sorted(PRESETS), default="qwen3-30b-a3b", help="model of the shapes"
    )
    add_sizes(parser)
    parser.add_argument("destination", type=Path, metavar="FILE", help="the GGUF to write")
    options = parser.parse_args(argv)
    shape = shape_of(options)
    try:
        with ByteProgress(f"synthesizing {options.destination.name}") as progress:
            size = write(options.destination, shape, options.seed, progress.update)
    except EdgemoeError as error:
        return failed("tools.synthetic.gguf", error)
    print(f"{options.destination}: {size} bytes of tensors, {shape.layers} layers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
