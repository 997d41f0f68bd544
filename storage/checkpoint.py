"""A Hugging Face checkpoint, read with distrust.

Nothing in it is executed, nothing outside it is opened, and nothing is allocated on the word of its config.
Files are never mapped; a read takes the memory of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from storage.errors import MissingTensor, ModelRefused, TruncatedFile
from storage.header import TensorEntry, read_header
from storage.untrusted import inside, read_json, refuse_remote_code, shortened

Config = Mapping[str, Any]
"""A model's config.json after bounded_config."""

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
"""Files beside the weights that a model needs to be run."""

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")

REQUIRED_BOUNDS = {
    "num_hidden_layers": 1024,
    "hidden_size": 131_072,
    "num_attention_heads": 4096,
    "vocab_size": 10_000_000,
}
OPTIONAL_BOUNDS = {
    **dict.fromkeys(EXPERT_COUNT_KEYS, 4096),
    "num_experts_per_tok": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 131_072,
    "intermediate_size": 1_048_576,
    "moe_intermediate_size": 131_072,
    "max_position_embeddings": 1 << 30,
    "decoder_sparse_step": 1024,
}
"""Config key -> largest value believed; the smallest is 1. Several times what any model known has."""

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_PICKLED = (".bin", ".pt", ".pth", ".ckpt")

_SAMPLE = 1 << 16
"""Bytes hashed at each end of a file's data, besides its header."""


def bounded_config(config: object) -> dict[str, Any]:
    """Returns a copy of the config once every value that sizes something is within bounds.

    Args:
        config: config.json as parsed.

    Raises:
        ModelRefused: naming the key and the value; or the config asks for remote code.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelRefused(
            "a config.json with a model_type was wanted",
            f"got {shortened(config)}",
            "Use a checkpoint made for transformers",
        )
    refuse_remote_code("config.json", config)
    for key, bound in (REQUIRED_BOUNDS | OPTIONAL_BOUNDS).items():
        value = config.get(key)
        if value is None and key in OPTIONAL_BOUNDS:
            continue
        if type(value) is not int or not 1 <= value <= bound:
            raise ModelRefused(
                f"a whole number from 1 to {bound} was wanted for {key} in config.json",
                f"it is {shortened(value)}",
                "Check where this checkpoint is from",
            )
    top_k = config.get("num_experts_per_tok") or 1
    for key in EXPERT_COUNT_KEYS:
        if top_k > (config.get(key) or top_k):
            raise ModelRefused(
                f"num_experts_per_tok of at most {key} = {config[key]} was wanted in config.json",
                f"it is {top_k}",
                "Check where this checkpoint is from",
            )
    return dict(config)


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies."""

    path: Path
    entry: TensorEntry


class Checkpoint:
    """Tensors of a checkpoint by name. Holds no descriptor; thread-safe. Made by `open`.

    Attributes:
        directory: the checkpoint's.
        config: config.json, bounded.
    """

    def __init__(self, directory: Path, config: dict[str, Any], tensors: dict[str, _Stored]) -> None:
        self.directory, self.config = directory, config
        self._tensors = tensors

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads config.json, the index if there is one, and every header; no weights.

        Raises:
            ModelRefused: no safetensors weights (pickle is never opened), a file outside the directory,
                remote code, a config value out of bounds, JSON that is none.
            MissingTensor: the index names a tensor or a file that is not there.
            BadHeader, TruncatedFile: a file of weights whose header lies about it.
        """
        if not (directory / "config.json").exists():
            raise ModelRefused(
                f"a checkpoint was wanted at {directory}",
                "there is no config.json",
                "Give a model's own directory",
            )
        config = bounded_config(read_json(directory, "config.json"))
        if (directory / "tokenizer_config.json").exists():
            refuse_remote_code("tokenizer_config.json", read_json(directory, "tokenizer_config.json"))
        if (directory / _WEIGHTS).exists():
            path = inside(directory, _WEIGHTS)
            tensors = {name: _Stored(path, entry) for name, entry in read_header(path).tensors.items()}
        elif (directory / _INDEX).exists():
            tensors = _indexed(directory)
        else:
            raise _no_weights(directory)
        return cls(directory, config, tensors)

    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises MissingTensor for an unknown name, as every method that takes one does."""
        return tuple(self._find(name).entry.shape)

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor on disk."""
        return self._find(name).entry.range.length

    def dtype(self, name: str) -> torch.dtype:
        """bfloat16, float16 or float32.

        Raises:
            ModelRefused: any other type; the checkpoint is quantized already.
        """
        stored = self._find(name)
        if stored.entry.dtype not in DTYPES:
            raise ModelRefused(
                f"{name} in bfloat16, float16 or float32 was wanted",
                f"it is {stored.entry.dtype} in {stored.path}",
                "Use the checkpoint that this one was quantized from",
            )
        return DTYPES[stored.entry.dtype]

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in its own dtype and shape, in memory of its own.

        Raises:
            ModelRefused: as dtype.
            TruncatedFile: the file has become shorter.
        """
        stored = self._find(name)
        return _read(stored.path, stored.entry.range.offset, self.dtype(name), self.shape(name))

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """tensor[index], without reading the rest: one expert of a fused tensor [E, N, K] as [N, K].

        Raises:
            IndexError: index is not in 0 .. E - 1.
            ModelRefused, TruncatedFile: as read.
        """
        stored = self._find(name)
        count, *rest = self.shape(name)
        if not 0 <= index < count:
            raise IndexError(f"{name} has {count} slices, asked for {index}")
        offset = stored.entry.range.offset + index * (stored.entry.range.length // count)
        return _read(stored.path, offset, self.dtype(name), tuple(rest))

    def companions(self) -> list[Path]:
        """The files of COMPANIONS that are there.

        Raises:
            ModelRefused: one is a link out of the directory.
        """
        return [inside(self.directory, name) for name in COMPANIONS if (self.directory / name).exists()]

    def fingerprint(self) -> str:
        """32 hex digits: a hash of the companions, and of the size, header and both ends of all weight files.

        Takes milliseconds however large the checkpoint is, and does not depend on where the directory lies.
        """
        digest = xxhash.xxh3_128()
        first: dict[Path, int] = {}
        for name, stored in sorted(self._tensors.items()):
            digest.update(f"{name}\0{stored.path.name}\0".encode())
            at = stored.entry.range.offset
            first[stored.path] = min(first.get(stored.path, at), at)
        whole = {path: path.stat().st_size for path in self.companions()}
        for path, head in sorted((whole | first).items()):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for start in range(0, min(head + _SAMPLE, size), _SAMPLE):
                    digest.update(file.read(min(_SAMPLE, head + _SAMPLE - start)))
                file.seek(max(size - _SAMPLE, 0))
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()

    def _find(self, name: str) -> _Stored:
        if name not in self._tensors:
            raise MissingTensor(
                f"tensor {name} was wanted", f"{self.directory} has none of that name", "Download it again"
            )
        return self._tensors[name]


def _indexed(directory: Path) -> dict[str, _Stored]:
    """The tensors that the index of a sharded checkpoint names."""
    weight_map = read_json(directory, _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelRefused(
            f"a weight_map from tensors to files was wanted in {directory / _INDEX}",
            f"it is {shortened(weight_map)}",
            "Download it again",
        )
    for file in set(weight_map.values()):
        if not file.endswith(".safetensors"):
            raise _pickled(directory, file)
    headers = {file: read_header(inside(directory, file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise MissingTensor(
                f"tensor {name} was wanted in {directory / file}, as {_INDEX} says",
                "the file has none of that name",
                "Download it again",
            )
    return {name: _Stored(directory / file, headers[file].tensors[name]) for name, file in weight_map.items()}


def _no_weights(directory: Path) -> ModelRefused:
    for path in sorted(directory.iterdir()):
        if path.suffix in _PICKLED:
            return _pickled(directory, path.name)
    return ModelRefused(
        f"weights were wanted in {directory}",
        f"there is neither {_WEIGHTS} nor {_INDEX}",
        "Download it again",
    )


def _pickled(directory: Path, name: str) -> ModelRefused:
    return ModelRefused(
        f"weights as safetensors were wanted in {directory}",
        f"{shortened(name)} is not safetensors; opening a pickle would run whatever code is in it",
        "Convert the checkpoint to safetensors where you trust it",
    )


def _read(path: Path, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    raw = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    view: memoryview = raw.numpy().data
    done = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while done < len(view):
            got = file.readinto(view[done:])
            if not got:
                raise TruncatedFile(
                    f"{len(view)} bytes were wanted at {offset} in {path}",
                    f"the file ends after {done} of them",
                    "Download it again",
                )
            done += got
    return raw.view(dtype).view(shape)
