"""The parsers of model files, each with valid models whose files are mutated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from edgemoe.families.table import family_of
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import store_bytes
from edgemoe.storage.files.header import read_header
from edgemoe.storage.files.untrusted import read_json
from edgemoe.storage.formats import OPENERS
from edgemoe.storage.formats.gguf_header import read_gguf_header
from tools.reliability import samples
from tools.reliability.gguf_samples import gguf_config, read_gguf_config, write_gguf_configs
from tools.reliability.mutators import mutate_gguf, mutate_json, mutate_safetensors


@dataclass(frozen=True)
class Parser:
    """A function that reads one file of a model, and what to give it.

    Args:
        make: writes valid models under a directory; returns the files to mutate, one of them in a case.
        parse: reads the model of a mutated file by its path.
    """

    make: Callable[[Path], Sequence[Path]]
    parse: Callable[[Path], object]


def mutated(path: Path, raw: bytes, random: Random) -> bytes:
    """Another content for a file, by the kind of file that its name says."""
    if path.suffix == ".gguf":
        return mutate_gguf(*(gguf_config(path.stem) or samples.gguf_model()), random)
    if path.suffix == ".safetensors":
        return mutate_safetensors(raw, random)
    return mutate_json(json.loads(raw), random)


def _read_config(path: Path) -> None:
    """Reads a config.json: its bounds, and the family that transformers' modules make of it."""
    config = bounded_config(read_json(path.parent, path.name))
    family = family_of(config)
    family.kv.bytes_for(512), family.is_unused("model.layers.9.mlp.gate.weight")


def _read_weights(path: Path) -> None:
    """Opens a checkpoint and reads its first expert and all dense weights, as a conversion does."""
    checkpoint = Checkpoint.open(path if path.suffix == ".gguf" else path.parent)
    family = family_of(checkpoint.config)
    store_bytes(checkpoint, family, max_level=None, dense_bits=8)
    experts = ExpertWeights(checkpoint, family)
    experts.read(experts.layers[0], 0)
    for name in checkpoint.names() - experts.names:
        checkpoint[name].read()
    checkpoint.fingerprint()


def _read_generation_config(path: Path) -> None:
    from edgemoe.engine.sampling import Sampler, Sampling
    from edgemoe.models.runnable import generation_config

    config = generation_config(path.parent)
    Sampler(Sampling.of_model(config, frozenset({2}), temperature=None, top_p=None, seed=0, max_new_tokens=1))


def _read_modules(path: Path) -> None:
    from edgemoe.layers.skeleton import skeleton

    skeleton(path.parent, bounded_config(read_json(path.parent, path.name)))


def _files(make: Callable[[Path], Path], *names: str) -> Callable[[Path], Sequence[Path]]:
    """Files of one model."""
    return lambda directory: [made / name for made in (make(directory / "model"),) for name in names]


_KINDS = (
    *("qwen3_moe", "deepseek_v3", "qwen3_5_moe", "gpt_oss"),
    *("ernie4_5_moe", "minimax_m2", "glm4_moe", "granitemoe"),
)
"""Families whose configs have keys of different kinds; qwen3_5_moe is a language model within another one."""


def _configs(directory: Path, kinds: Iterable[str] = _KINDS) -> Sequence[Path]:
    return [samples.write_config(directory / name, name) / "config.json" for name in kinds]


def _packed(method: str) -> Parser:
    make = _files(partial(samples.write_packed, method=method), "config.json", "model.safetensors")
    return Parser(make, _read_weights)


def _shards(directory: Path) -> Sequence[Path]:
    return sorted(samples.write_checkpoint(directory / "model").glob("*.safetensors"))


EVERY_FAMILY = "config.json of every family"
"""Name of the parser that imports transformers' code of all families, which takes some seconds."""

PARSERS = {
    "safetensors header": Parser(_shards, read_header),
    "GGUF header": Parser(_files(samples.write_gguf, "model.gguf"), read_gguf_header),
    "GGUF model": Parser(_files(samples.write_gguf, "model.gguf"), _read_weights),
    "GGUF config": Parser(write_gguf_configs, read_gguf_config),
    "store.json": Parser(
        _files(samples.write_store, "store.json"), lambda path: StoreModel.open(path.parent)
    ),
    "store.json of mixed bits": Parser(
        _files(samples.write_mixed_store, "store.json"), lambda path: StoreModel.open(path.parent)
    ),
    "config.json": Parser(_configs, _read_config),
    EVERY_FAMILY: Parser(partial(_configs, kinds=samples.FAMILIES), _read_config),
    "model.safetensors.index.json": Parser(
        _files(samples.write_checkpoint, "model.safetensors.index.json"), _read_weights
    ),
    **{f"quantization_config: {method}": _packed(method) for method in (*OPENERS, "mixed", "nvfp4")},
    "generation_config.json": Parser(
        _files(samples.write_checkpoint, "generation_config.json"), _read_generation_config
    ),
    "tokenizer_config.json": Parser(
        _files(samples.write_checkpoint, "tokenizer_config.json"), lambda path: Checkpoint.open(path.parent)
    ),
    "transformers' modules": Parser(_configs, _read_modules),
}
"""Name -> parser."""
