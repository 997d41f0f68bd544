"""Streams experts from an SSD in the plainest form: the baseline that edgemoe must not be slower than.

    python -m tools.peers.prototype prepare STORE DIR      writes one flat file of experts at 4.5 bits a weight
    python -m tools.peers.prototype run DIR --expert-ram BYTES --json

It has O_DIRECT, four reader threads, one LRU over whole experts, hits computed while misses are read, transformers'
modules and torch's 4-bit kernel. It has no levels, prefetch, planes, checksums or budget. Prompts are random tokens,
which spread over the experts more than text does. Qwen3-MoE only.

An expert in the flat file: nibbles of gate_up | nibbles of down | parameters of both, padded to 4 KiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import resource
import shutil
import statistics
import struct
import sys
import time
from collections import OrderedDict, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.record.forms import P4, MergedForm
from edgemoe.storage.record.layout import LAYOUTS, detect
from edgemoe.storage.record.offsets import MatrixSpec, align
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader
from tools.command_line import failed, make_parser

READERS = 4
THREADS = 2


def prepare(store: Path, directory: Path) -> None:
    """Writes the flat form of a store, one expert at a time: experts.bin, dense.safetensors, config.json.

    Raises:
        UserError: the store's dense weights are not bf16, or `directory` exists.
    """
    manifest = Manifest.load(store)
    if manifest.dense_bits != 16:
        raise UserError(
            f"bf16 dense weights in {store}",
            f"{manifest.dense_bits} bits",
            "make a store with --dense-bits 16",
        )
    if directory.exists():
        raise UserError(f"a new directory {directory}", "an existing one", "remove it or name another")
    geometry = manifest.geometry
    directory.mkdir(parents=True)
    for name in ("config.json", "dense.safetensors"):
        shutil.copyfile(store / name, directory / name)
    buffer = memoryview(mmap.mmap(-1, geometry.prefix_bytes(4)))
    record = np.frombuffer(buffer, np.uint8)
    parameters, codes = record[: geometry.parameter_bytes], record[geometry.parameter_bytes :]
    padding = bytes(
        slot_bytes(geometry.matrices) - sum(m.nibble_bytes + m.parameter_bytes for m in geometry.matrices)
    )
    form = MergedForm(geometry, LAYOUTS[manifest.layout], detect())
    reader = RecordReader.open(store, manifest)
    with (directory / "experts.bin").open("wb") as out:
        for layer, records in sorted(manifest.layers.items()):
            for expert in range(len(records.records)):
                form.fill(reader, ExpertKey(layer, expert), 4, {P4: buffer}, None)
                out.write(codes[: sum(m.nibble_bytes for m in geometry.matrices)].data)
                out.write(parameters[: sum(m.parameter_bytes for m in geometry.matrices)].data)
                out.write(padding)
    reader.close()


def matrices_of(config: Any) -> tuple[MatrixSpec, MatrixSpec]:
    """The two matrices of a Qwen3-MoE expert."""
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    return MatrixSpec.of("gate_up", 2 * inner, hidden), MatrixSpec.of("down", hidden, inner)


def slot_bytes(matrices: tuple[MatrixSpec, ...]) -> int:
    """Bytes of an expert in the flat file and in memory."""
    return align(sum(m.nibble_bytes + m.parameter_bytes for m in matrices))


class Experts:
    """Keeps whole experts in RAM with LRU eviction; reader threads fill slots from experts.bin.

    Args:
        path: experts.bin.
        config: the model's config.
        ram: bytes for slots.

    Raises:
        UserError: fewer slots than a layer has experts (a prompt may need them all at once).
    """

    def __init__(self, path: Path, config: Any, ram: int) -> None:
        self.matrices, self.count = matrices_of(config), config.num_experts
        self.slot_bytes = slot_bytes(self.matrices)
        slots = min(ram // self.slot_bytes, config.num_hidden_layers * self.count)
        if slots < self.count:
            least = self.count * self.slot_bytes
            raise UserError(
                f"{least} bytes for the experts of a layer", f"{ram}", f"give --expert-ram {least} or more"
            )
        self.arena = memoryview(mmap.mmap(-1, slots * self.slot_bytes))
        self.slots = [self._tensors(i * self.slot_bytes) for i in range(slots)]
        self.free = list(range(slots))
        self.resident: OrderedDict[tuple[int, int], int] = OrderedDict()
        self.file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.readers = ThreadPoolExecutor(READERS)
        self.hits = self.misses = 0

    def _tensors(self, at: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """[(packed nibbles [N, K/2], parameters [K/group, N, 2])] of both matrices, views into a slot."""
        packed = []
        for m in self.matrices:
            flat = torch.frombuffer(self.arena, dtype=torch.uint8, count=m.nibble_bytes, offset=at)
            packed.append(flat.view(m.padded_rows, m.padded_cols // 2))
            at += m.nibble_bytes
        parameters = []
        for m in self.matrices:
            count = m.parameter_bytes // 2
            flat = torch.frombuffer(self.arena, dtype=torch.bfloat16, count=count, offset=at)
            parameters.append(flat.view(-1, m.padded_rows, 2))
            at += m.parameter_bytes
        return list(zip(packed, parameters, strict=True))

    def _read(self, key: tuple[int, int], slot: int) -> int:
        at, place = (key[0] * self.count + key[1]) * self.slot_bytes, slot * self.slot_bytes
        buffer = self.arena[place : place + self.slot_bytes]
        if os.preadv(self.file, [buffer], at) != self.slot_bytes:
            raise EOFError(f"experts.bin ends inside expert {key}")
        return slot

    def _fetch(self, key: tuple[int, int]) -> Future[int]:
        slot = self.free.pop() if self.free else self.resident.popitem(last=False)[1]
        self.resident[key] = slot
        return self.readers.submit(self._read, key, slot)

    def forward(
        self, module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Computes a layer's experts for transformers: hidden bf16 [T, H], index and weights [T, k] -> bf16 [T, H]."""
        wanted: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for token, row in enumerate(index.tolist()):
            for choice, expert in enumerate(row):
                wanted[module.layer, expert].append((token, choice))
        hits = [key for key in wanted if key in self.resident]
        for key in hits:
            self.resident.move_to_end(key)
        reads = {key: self._fetch(key) for key in wanted if key not in self.resident}
        self.hits, self.misses = self.hits + len(hits), self.misses + len(reads)
        out = torch.zeros(hidden.shape, dtype=torch.float32)
        for key in [*hits, *reads]:
            slot = reads[key].result() if key in reads else self.resident[key]
            tokens, choices = torch.tensor(wanted[key]).unbind(1)
            x = hidden if len(hidden) == 1 else hidden[tokens]
            (gate_up, gate_up_parameters), (down, down_parameters) = self.slots[slot]
            int4mm = torch.ops.aten._weight_int4pack_mm_for_cpu
            gate, up = int4mm(x, gate_up, self.matrices[0].group, gate_up_parameters).chunk(2, -1)
            x = torch.nn.functional.silu(gate) * up
            y = int4mm(x, down, self.matrices[1].group, down_parameters)
            out.index_add_(0, tokens, y.float() * weights[tokens, choices, None].float())
        return out.to(hidden.dtype)


def load(directory: Path, experts_ram: int) -> tuple[Any, Experts]:
    """Loads transformers' model with one copy of its dense weights in anonymous memory and its experts streamed.

    Raises:
        UserError: `directory` has no experts.bin, or `experts_ram` (bytes) is too small.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.integrations.moe import ExpertsInterface
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding

    if not (directory / "experts.bin").exists():
        advice = "make it with `python -m tools.peers.prototype prepare`"
        raise UserError(f"experts.bin in {directory}", "none", advice)
    config = Qwen3MoeConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval()
    model.model.rotary_emb = Qwen3MoeRotaryEmbedding(config)
    with (directory / "dense.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            raw = torch.empty(end - start, dtype=torch.uint8)
            file.seek(8 + length + start)
            file.readinto(raw.numpy().data)
            owner, _, attribute = name.rpartition(".")
            tensor = raw.view(torch.bfloat16).view(entry["shape"])
            setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(tensor, requires_grad=False))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    experts = Experts(directory / "experts.bin", config, experts_ram)
    for number, layer in enumerate(model.model.layers):
        layer.mlp.experts.layer = number
    ExpertsInterface.register("prototype", experts.forward)
    model.set_experts_implementation("prototype")
    return model, experts


@torch.inference_mode()
def answer(model: Any, experts: Experts, prompt: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    """Generates greedily from prompt ids [1, T]; times in seconds, hits and bytes of decoding only."""
    from transformers import DynamicCache

    cache, ids, tokens = DynamicCache(config=model.config), prompt, []
    times = [time.perf_counter()]
    for step in range(new_tokens):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(int(ids))
        times.append(time.perf_counter())
        if step == 0:
            experts.hits = experts.misses = 0
    gaps = [b - a for a, b in itertools.pairwise(times[1:])]
    cuts = statistics.quantiles(gaps, n=100, method="inclusive")
    return {
        "prompt": "random tokens",
        "prompt_tokens": prompt.shape[1],
        "new_tokens": len(tokens),
        "distinct_tokens": len(set(tokens)),
        "ttft_s": times[1] - times[0],
        "tpot_s": {"mean": statistics.fmean(gaps), "p50": cuts[49], "p99": cuts[98]},
        "hit_rate": experts.hits / (experts.hits + experts.misses),
        "ssd_bytes_per_token": experts.misses * experts.slot_bytes / len(gaps),
        "expert_ram_bytes": len(experts.slots) * experts.slot_bytes,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run(options: argparse.Namespace) -> None:
    """Loads the model and prints the figures of each answer; for the first every expert is on disk (cold)."""
    torch.set_num_threads(THREADS)
    model, experts = load(options.directory, options.expert_ram)
    generator = torch.Generator().manual_seed(options.seed)
    shape = (options.runs, options.prompt_tokens)
    prompts = torch.randint(model.config.vocab_size, shape, generator=generator)
    for number, prompt in enumerate(prompts.unsqueeze(1)):
        row = {"arm": "warm" if number else "cold"} | answer(model, experts, prompt, options.new_tokens)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            print(*(f"{name}: {value}" for name, value in row.items()), sep="\n", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.peers.prototype", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare", help="write the flat form of a store")
    preparing.add_argument("store", type=Path)
    preparing.add_argument("directory", type=Path, help="must not exist")
    running = commands.add_parser("run", help="generate and print times")
    running.add_argument("directory", type=Path)
    running.add_argument("--expert-ram", type=int, required=True, help="bytes of RAM for experts")
    running.add_argument("--prompt-tokens", type=int, default=64)
    running.add_argument("--new-tokens", type=int, default=64, help="at least 3")
    running.add_argument("--runs", type=int, default=1, help="prompts; all but the first are warm")
    running.add_argument("--seed", type=int, default=0, help="of the prompt's random tokens")
    running.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    if options.command == "run" and min(options.prompt_tokens, options.new_tokens - 2, options.runs) < 1:
        parser.error("expected --prompt-tokens and --runs of 1 or more and --new-tokens of 3 or more")
    try:
        prepare(options.store, options.directory) if options.command == "prepare" else run(options)
    except EdgemoeError as error:
        return failed("tools.peers.prototype", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
