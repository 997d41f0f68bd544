"""Writes a store with a real model's shapes and random weights, in minutes and a few hundred MB of memory.

    python -m tools.synthetic.store --like qwen3-30b-a3b --layers 16 --vocab 32000 DST
    python -m tools.synthetic.store --from-gguf FILE DST      shapes, dense weights and routers from a qwen3moe GGUF

Speed does not depend on the meaning of the weights, so benchmarks need no download. The store keeps the properties that
speed depends on:
  - every expert is distinct. Its groups are drawn from a pool of Gaussian groups that are quantized as in a
    conversion: codes and parameters have the statistics of quantized Gaussian weights, and quantizing is done once;
  - routing is skewed: router rows are scaled by a lognormal of sigma 0.35, so that some experts are used far more;
  - dense weights are Gaussian with variance 1 / inputs, so that activations stay finite at any depth.
The tokenizer is byte-level, with placeholder words up to the size of the vocabulary. Answers are gibberish, also with
the dense weights of a GGUF: its experts are not read. Another run with the same arguments resumes an unfinished store.
`--like tiny` (2 layers of 8 experts) is for tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import xxhash

from edgemoe.console.progress import ByteProgress
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.kernels.registry import compute
from edgemoe.storage.files.header import tensor_bytes
from edgemoe.storage.record.layout import LAYOUTS, Layout
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.dense import quantize_rows
from edgemoe.storage.store.manifest import MANIFEST_NAME, SCALE_SUFFIX
from edgemoe.storage.store.writer import StoreWriter
from tools.command_line import failed, make_parser
from tools.synthetic.gguf_dense import Gguf
from tools.synthetic.workload import PRESETS, ExpertPool, Shape, add_sizes, random_dense, shape_of

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

Dense = Callable[[str, tuple[int, ...]], torch.Tensor]
"""Makes a dense tensor in bf16 from transformers' name and the shape."""


def vocabulary(size: int) -> tuple[list[str], frozenset[str]]:
    """Makes exactly `size` byte-level tokens in the order of their ids, and the set of special ones.

    Tokens above the 256 bytes are words that encoding never produces: every answer of a random model can be decoded.

    Raises:
        UserError: `size` is below the number of bytes and special tokens.
    """
    from tokenizers import pre_tokenizers

    known = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if size < len(known):
        raise UserError(f"a vocabulary of {len(known)} tokens or more", str(size), "raise --vocab")
    return [*known, *(f"Ġword{i}" for i in range(size - len(known)))], frozenset(SPECIAL)


def save_tokenizer(vocab: int, directory: Path) -> None:
    """Writes a byte-level tokenizer of vocabulary(vocab) with a ChatML template, as transformers saves it.

    Raises:
        UserError: `vocab` is below the number of bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, _ = vocabulary(vocab)
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL),
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(directory)


def dense_specs(shape: Shape, bits: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (element type, shape) of the tensors of dense_tensors, in order; routers keep 16 bits."""
    out: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, size in shape.dense().items():
        if bits == 8 and len(size) == 2 and not name.endswith("mlp.gate.weight"):
            out |= {name: ("I8", size), name + SCALE_SUFFIX: ("BF16", size[:1])}
        else:
            out[name] = ("BF16", size)
    return out


def dense_tensors(shape: Shape, dense: Dense, bits: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of dense_specs one at a time."""
    specs = dense_specs(shape, bits)
    for name, size in shape.dense().items():
        tensor = dense(name, size)
        if specs[name][0] == "I8":
            codes, scales = quantize_rows(tensor)
            yield name, codes
            yield name + SCALE_SUFFIX, scales
        else:
            yield name, tensor


class Counted:
    """Counts written bytes and reports them to `update` together with the total."""

    def __init__(self, total: int, update: Callable[[int, int], None]) -> None:
        self._done, self._total, self._update = 0, total, update

    def add(self, size: int) -> None:
        """Counts `size` more bytes."""
        self._done += size
        self._update(self._done, self._total)

    def records(self, records: Iterable[Bytes]) -> Iterator[Bytes]:
        """Yields the records; counts each when the writer requests its successor."""
        for record in records:
            yield record
            self.add(record.nbytes)

    def tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors; counts each when the writer requests its successor."""
        for name, tensor in tensors:
            yield name, tensor
            self.add(tensor.nbytes)


def synthesize(
    destination: Path,
    shape: Shape,
    dense: Dense,
    *,
    source: str,
    max_level: int,
    dense_bits: int,
    seed: int,
    update: Callable[[int, int], None],
    layout: Layout | None = None,
) -> None:
    """Writes a store, or the missing rest of one; keeps one dense tensor, four experts a core and the pool in memory.

    Args:
        destination: a new directory, or a store of the same source and options; a finished store stays as it is.
        shape: shape of the model.
        dense: makes the dense tensors.
        source: fingerprint of shape, dense and seed.
        max_level: 8 or 4.
        dense_bits: 16 or 8.
        seed: seed of the experts.
        update: called with the bytes done and the total bytes.
        layout: layout of the records; None: the layout of this machine's CPU.

    Raises:
        UserError: the shape cannot be made, or the directory contains something else.
        StoreBusy: another process writes the store.
        DoesNotFit: the disk has too few free bytes.
    """
    geometry, specs = shape.geometry(max_level), dense_specs(shape, dense_bits)
    layer_bytes = shape.experts * geometry.record_bytes
    total = shape.layers * layer_bytes + sum(tensor_bytes(*spec) for spec in specs.values())
    layout = layout or compute().layout
    counted, pool = Counted(total, update), ExpertPool(geometry, seed, layout)
    with tempfile.TemporaryDirectory() as companions:
        shape.config().save_pretrained(companions)
        save_tokenizer(shape.vocab, Path(companions))
        with StoreWriter(
            destination, geometry=geometry, layout=layout, source=source, dense_bits=dense_bits
        ) as writer:
            if (destination / MANIFEST_NAME).exists():
                return
            finished = writer.finished_layers()
            counted.add(len(finished) * layer_bytes)
            writer.require_free(total - len(finished) * layer_bytes)
            for layer in sorted(set(range(shape.layers)) - finished):
                records = pool.records(layer, shape.experts)
                writer.write_layer(layer, shape.experts, counted.records(records))
            writer.write_dense(specs, counted.tensors(dense_tensors(shape, dense, dense_bits)))
            for path in sorted(Path(companions).iterdir()):
                writer.copy(path)
            writer.finish()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.synthetic.store", __doc__)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--like", choices=sorted(PRESETS), help="model of the shapes")
    model.add_argument("--from-gguf", type=Path, metavar="FILE", help="a qwen3moe GGUF: all but the experts")
    add_sizes(parser)
    parser.add_argument("--max-level", type=int, choices=(8, 4), default=8, help="bits of an expert weight")
    parser.add_argument("--dense-bits", type=int, choices=(16, 8), default=16, help="of the other matrices")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), help="of the records; default: this CPU's")
    parser.add_argument("destination", type=Path, metavar="DST", help="the store's directory")
    options = parser.parse_args(argv)
    for name in ("layers", "vocab"):
        if getattr(options, name) is not None and options.from_gguf:
            parser.error(f"expected --from-gguf without --{name}, got both: the file determines it")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    options = parse(argv)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # experts are made side by side, each by one thread
    try:
        if options.from_gguf:
            gguf = Gguf(options.from_gguf)
            shape, dense, origin = gguf.shape(), gguf.dense, gguf.fingerprint()
        else:
            shape = shape_of(options)
            dense, origin = partial(random_dense, shape, options.seed), "random"
        named = repr((shape, origin, options.seed)).encode()
        with ByteProgress(f"synthesizing {options.destination.name}") as progress:
            synthesize(
                options.destination,
                shape,
                dense,
                source=f"synthetic-{xxhash.xxh3_128_hexdigest(named)}",
                max_level=options.max_level,
                dense_bits=options.dense_bits,
                seed=options.seed,
                update=progress.update,
                layout=LAYOUTS[options.layout] if options.layout else None,
            )
    except EdgemoeError as error:
        return failed("tools.synthetic.store", error)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
