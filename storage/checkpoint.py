"""A Hugging Face checkpoint, read with distrust.

Nothing in it is executed, nothing outside it is opened, and nothing is allocated on the word of its config.
Files are never mapped; a read takes the memory of one tensor.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import xxhash

from storage.errors import MissingTensor, ModelRefused
from storage.formats import GGUF, open_weights
from storage.formats.base import FourBit, Weight
from storage.tensors import INDEX_NAME, WEIGHTS_NAME, StoredTensors
from storage.untrusted import inside, read_json, refuse_remote_code, shortened

Places = tuple[tuple[str, Path, int], ...]
"""(name, file, bytes before it in the file) of every stored tensor, sorted by name."""

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

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "moe_k")

REQUIRED_BOUNDS = {
    "num_hidden_layers": 1024,
    "hidden_size": 131_072,
    "num_attention_heads": 4096,
    "vocab_size": 10_000_000,
}
OPTIONAL_BOUNDS = {
    **dict.fromkeys(EXPERT_COUNT_KEYS, 4096),
    **dict.fromkeys(TOP_K_KEYS, 4096),
    "num_key_value_heads": 4096,
    "head_dim": 131_072,
    "intermediate_size": 1_048_576,
    "moe_intermediate_size": 131_072,
    "max_position_embeddings": 1 << 30,
    "decoder_sparse_step": 1024,
}
"""Config key -> largest value believed; the smallest is 1. Several times what any model known has."""

_SAMPLE = 1 << 16
"""Bytes hashed at each end of a file's data, besides its header."""


def bounded_config(config: object) -> dict[str, Any]:
    """Returns a copy of the config once every value that sizes something is within bounds.

    `auto_map`, the code that a checkpoint brings, is left out: a model of a type that transformers has is run
    by transformers' own code, and any other is refused for its type.

    Args:
        config: config.json as parsed.

    Raises:
        ModelRefused: naming the key and the value.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelRefused(
            "a config.json with a model_type", shortened(config), "use a checkpoint made for transformers"
        )
    for key, bound in (REQUIRED_BOUNDS | OPTIONAL_BOUNDS).items():
        value = config.get(key)
        if value is None and key in OPTIONAL_BOUNDS:
            continue
        if type(value) is not int or not 1 <= value <= bound:
            raise ModelRefused(
                f"a whole number from 1 to {bound} for {key} in config.json",
                shortened(value),
                "check the origin of this checkpoint",
            )
    top_k_key = next((key for key in TOP_K_KEYS if config.get(key)), TOP_K_KEYS[0])
    top_k = config.get(top_k_key) or 1
    for key in EXPERT_COUNT_KEYS:
        if top_k > (config.get(key) or top_k):
            raise ModelRefused(
                f"{top_k_key} of at most {key} = {config[key]} in config.json",
                str(top_k),
                "check the origin of this checkpoint",
            )
    return {key: value for key, value in config.items() if key != "auto_map"}


class Checkpoint:
    """Tensors of a checkpoint by transformers' names, whatever they are stored as. Holds no descriptor; thread-safe.

    Made by `open`.

    Attributes:
        directory: the checkpoint's.
        config: config.json, bounded.
        format: what its weights are stored as, as in FORMATS.
    """

    def __init__(
        self, directory: Path, config: dict[str, Any], format: str, weights: dict[str, Weight], places: Places
    ) -> None:
        self.directory, self.config, self.format = directory, config, format
        self._weights, self._places = weights, places

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads config.json, the index if there is one, and every header; no weights. Or a GGUF file's header.

        Args:
            directory: the checkpoint's; or a GGUF file, or the directory of one and no other weights.

        Raises:
            ModelRefused: no safetensors weights (pickle is never opened), a file outside the directory,
                remote code, a config value out of bounds, JSON that is none, a format that is not known.
            MissingTensor: the index names a tensor or a file that is not there; a quantized matrix lacks a part.
            BadHeader, TruncatedFile: a file of weights whose header lies about it.
        """
        if (path := find_gguf(directory)) is not None:
            return GgufCheckpoint(path)
        if not (directory / "config.json").exists():
            raise ModelRefused(
                f"a checkpoint in {directory}", "no config.json", "give the directory of a model"
            )
        config = bounded_config(read_json(directory, "config.json"))
        if (directory / "tokenizer_config.json").exists():
            refuse_remote_code("tokenizer_config.json", read_json(directory, "tokenizer_config.json"))
        tensors = StoredTensors.open(directory)
        return cls(directory, config, *open_weights(config, tensors), tuple(tensors.places()))

    def names(self) -> set[str]:
        """Every tensor's name."""
        return set(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises MissingTensor for an unknown name, as every method that takes one does."""
        return self._find(name).shape

    def nbytes(self, name: str) -> int:
        """Bytes of the tensor on disk."""
        return self._find(name).nbytes

    def stored(self, names: Iterable[str]) -> set[str]:
        """Names, in the files, of all that these tensors are made of."""
        return {part for name in names for part in self._find(name).parts}

    def dtype(self, name: str) -> torch.dtype:
        """bfloat16, float16 or float32, as `read` gives it.

        Raises:
            ModelRefused: it is stored as a type that config.json does not explain.
        """
        return self._find(name).dtype

    def group(self, name: str) -> int | None:
        """Consecutive inputs that share the parameters of the tensor's own 4-bit codes; None if it has none."""
        return self._find(name).group

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor in floating point, in memory of its own.

        Raises:
            ModelRefused: as dtype.
            TruncatedFile: the file has become shorter.
            DamagedData: parts of a quantized matrix contradict each other.
        """
        return self._find(name).read()

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """tensor[index], without reading the rest: one expert of a fused tensor [E, N, K] as [N, K].

        Raises:
            IndexError: index is not in 0 .. E - 1.
            ModelRefused, TruncatedFile, DamagedData: as read.
        """
        return self._find(name).read_slice(index)

    def codes(self, name: str) -> FourBit:
        """A matrix's own 4-bit codes. Only where `group` is not None.

        Raises:
            TruncatedFile, DamagedData: as read.
        """
        return self._find(name).codes()

    def companions(self) -> list[Path]:
        """The files of COMPANIONS that are there.

        Raises:
            ModelRefused: one is a link out of the directory.
        """
        return self._own_companions()

    def _own_companions(self) -> list[Path]:
        return [inside(self.directory, name) for name in COMPANIONS if (self.directory / name).exists()]

    def fingerprint(self) -> str:
        """32 hex digits: a hash of the companions, and of the size, header and both ends of all weight files.

        Takes milliseconds however large the checkpoint is, and does not depend on where the directory lies.
        """
        digest = xxhash.xxh3_128()
        first: dict[Path, int] = {}
        for name, path, at in self._places:
            digest.update(f"{name}\0{path.name}\0".encode())
            first[path] = min(first.get(path, at), at)
        whole = {path: path.stat().st_size for path in self._own_companions()}
        for path, head in sorted((whole | first).items()):
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            with path.open("rb") as file:
                for start in range(0, min(head + _SAMPLE, size), _SAMPLE):
                    digest.update(file.read(min(_SAMPLE, head + _SAMPLE - start)))
                file.seek(max(size - _SAMPLE, 0))
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()

    def _find(self, name: str) -> Weight:
        if name not in self._weights:
            raise MissingTensor(
                f"tensor {name} in {self.directory}",
                "no tensor of that name",
                "download the checkpoint again",
            )
        return self._weights[name]


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file, which also holds its config, tokenizer and chat template.

    Raises:
        ModelRefused: an architecture that is not known, a config value out of bounds.
        BadHeader, TruncatedFile, MissingTensor: a header that lies, or lacks what the architecture needs.
    """

    def __init__(self, path: Path) -> None:
        # Here and not above: most checkpoints are no GGUF, and need nothing of that package.
        from storage.formats.gguf_model import GgufModel

        self._model = GgufModel(path)
        places = [(name, path, entry.range.offset) for name, entry in self._model.header.tensors.items()]
        super().__init__(
            path, bounded_config(self._model.config), GGUF, self._model.weights(), tuple(sorted(places))
        )

    def companions(self) -> list[Path]:
        """config.json, the tokenizer's files and the chat template, unpacked to live as long as this does.

        Raises:
            ModelRefused: transformers does not know the tokenizer.
        """
        from storage.formats.gguf_tokenizer import unpack_tokenizer

        into = Path(mkdtemp(prefix="edgemoe-"))
        weakref.finalize(self, shutil.rmtree, into, ignore_errors=True)
        (into / "config.json").write_text(json.dumps(self._model.config, indent=2) + "\n")
        unpack_tokenizer(self._model.path, self._model.header.fields, into)
        return [into / name for name in COMPANIONS if (into / name).exists()]

    def _own_companions(self) -> list[Path]:
        return []


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that is the only weights of the directory; None if there is no such file.

    Raises:
        ModelRefused: the directory has several.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if not path.is_dir() or (path / WEIGHTS_NAME).exists() or (path / INDEX_NAME).exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise ModelRefused(
            f"one GGUF file in {path}",
            f"{len(found)}, first {found[0].name}",
            "give the path of one file; merge the parts of a split model with llama-gguf-split",
        )
    return inside(path, found[0].name) if found else None
