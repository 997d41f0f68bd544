"""A Hugging Face checkpoint as an untrusted source.

Its code is never executed, files outside of it are never opened, and config values are bounded before any allocation.
Files are never mapped; a read takes the memory of one tensor.
"""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any

import xxhash

from edgemoe.errors import ModelRefused
from edgemoe.storage.convert.config import WRAPPED_IN, bounded_config
from edgemoe.storage.files.content import content_digests
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.files.tensors import INDEX_NAME, WEIGHTS_NAME, StoredTensors
from edgemoe.storage.files.untrusted import (
    inside,
    no_tensor,
    read_json,
    refuse_remote_code,
    refuse_special_files,
)
from edgemoe.storage.formats import GGUF, open_weights
from edgemoe.storage.formats.base import Weight

Places = tuple[tuple[str, Path], ...]
"""Name and file of every stored tensor, sorted by name."""

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
"""Files besides the weights that a model needs to run."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Settings with which a multimodal model's pictures are prepared. A fingerprint leaves them out: no weight depends on
them."""

_WITHIN, _HEADS = re.compile(r"(?:model\.)?language_model\.(?:model\.)?"), ("lm_head.", "mtp.")
"""Prefix of the language model's names in a multimodal one, and the beginning of its head's, which may have none."""

MAGIC, _SUFFIX = b"GGUF", ".gguf"
"""First bytes of a GGUF file, and the end of its name in lower case."""


class Checkpoint:
    """The tensors of a checkpoint by transformers' names, in any format; created by `open`.

    Thread-safe; keeps no file open.

    Attributes:
        directory: the directory of the checkpoint.
        config: config.json after bounded_config.
        format: name of the weights' format in FORMATS.
        others: tensors of a multimodal model outside of its language model, by their names in transformers' modules.
    """

    def __init__(
        self, directory: Path, config: dict[str, Any], format: str, weights: dict[str, Weight], places: Places
    ) -> None:
        self.directory, self.config, self.format = directory, config, format
        self._weights, self._places = weights, places
        self.others: dict[str, Weight] = {}

    @classmethod
    def open(cls, directory: Path) -> Checkpoint:
        """Reads config.json, the index, if there is one, and every header, or the header of a GGUF file; no weights.

        Args:
            directory: the checkpoint's directory; or a GGUF file, or a directory whose only weights are one GGUF file.

        Raises:
            ModelRefused: no safetensors weights (pickles are never opened), a file outside the directory, remote
                code, a config value out of bounds, invalid JSON, an unknown format.
            MissingTensor: a tensor or file of the index, or a part of a quantized matrix, is missing.
            BadHeader, TruncatedFile: a header contradicts its file.
        """
        if (path := find_gguf(directory)) is not None:
            return GgufCheckpoint(path)
        if not (directory / "config.json").exists():
            raise ModelRefused(
                f"a checkpoint in {directory}", "no config.json", "give the directory of a model"
            )
        refuse_special_files(directory)
        config = bounded_config(read_json(directory, "config.json"))
        if (directory / "tokenizer_config.json").exists():
            refuse_remote_code("tokenizer_config.json", read_json(directory, "tokenizer_config.json"))
        tensors = StoredTensors.open(directory)
        format, weights = open_weights(config, tensors)
        others = dict[str, Weight]()
        if WRAPPED_IN in config:
            others, weights = _of_other_parts(weights), _of_language_model(weights)
        made = cls(directory, config, format, weights, tuple(tensors.places()))
        made.others = others
        return made

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._weights)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on disk."""
        return sum(weight.nbytes for weight in self._weights.values())

    def __getitem__(self, name: str) -> Weight:
        """Returns a tensor. Like every method that takes a name, raises MissingTensor for an unknown one."""
        if name not in self._weights:
            raise no_tensor(f"{name} in {self.directory}")
        return self._weights[name]

    def stored(self, names: Iterable[str]) -> set[str]:
        """Names of the stored tensors that these tensors consist of."""
        return {part for name in names for part in self[name].parts}

    def companions(self) -> list[Path]:
        """Paths of the COMPANIONS that exist.

        Raises:
            ModelRefused: a companion is a link out of the directory.
        """
        return [inside(self.directory, name) for name in COMPANIONS if (self.directory / name).exists()]

    def processor_files(self) -> list[Path]:
        """Paths of the PROCESSOR_FILES that exist.

        Raises:
            ModelRefused: one of them is a link out of the directory.
        """
        return [inside(self.directory, name) for name in PROCESSOR_FILES if (self.directory / name).exists()]

    def fingerprint(self, hashes: Mapping[str, str] = MappingProxyType({})) -> str:
        """Computes 32 hex digits: a hash of the content of all companions and weight files.

        Reads every file whole the first time, and again where its size, times or inode have changed
        (storage.files.content). The directory's path has no influence.

        Args:
            hashes: SHA-256 of the content of files, by name, in hex digits. These files are not read.
        """
        digest = xxhash.xxh3_128()
        for name, path in self._places:
            digest.update(f"{name}\0{path.name}\0".encode())
        # A GGUF file is its own directory, and contains its companions.
        files = sorted({*Checkpoint.companions(self), *(path for _, path in self._places)})
        contents = content_digests(path for path in files if path.name not in hashes)
        for path in files:
            digest.update(f"{path.name}\0{hashes.get(path.name) or contents[path]}\0".encode())
        return digest.hexdigest()


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file, or in the parts of a split one, with its config, tokenizer and chat template.

    Raises:
        ModelRefused: an unknown architecture, or a config value out of bounds.
        BadHeader, TruncatedFile: a header that contradicts the file.
        MissingTensor: a tensor or field of the architecture is missing.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: only GGUF files need the gguf package.
        from edgemoe.storage.formats.gguf_model import GgufModel

        self._model = GgufModel(path)
        places = [(name, part) for name, (part, _) in self._model.tensors.items()]
        super().__init__(
            self._model.path,
            bounded_config(self._model.config),
            GGUF,
            self._model.weights(),
            tuple(sorted(places)),
        )

    def companions(self) -> list[Path]:
        """Unpacks config.json, the tokenizer's files and the chat template, and removes them with this object.

        Raises:
            ModelRefused: transformers does not support the tokenizer.
        """
        from edgemoe.storage.formats.gguf_tokenizer import unpack_tokenizer

        into = Path(mkdtemp(prefix="edgemoe-"))
        weakref.finalize(self, shutil.rmtree, into, ignore_errors=True)
        (into / "config.json").write_text(json.dumps(self._model.config, indent=2) + "\n")
        unpack_tokenizer(self._model.path, self._model.fields, into)
        return [into / name for name in COMPANIONS if (into / name).exists()]


def _of_language_model(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The tensors of the language model within a multimodal one, by the names that they have in a model of its own.

    Tensors of other parts, such as vision (_of_other_parts), are left out.
    """
    found = {
        _WITHIN.sub("", name, count=1): weight for name, weight in weights.items() if _WITHIN.match(name)
    }
    own = {name if name.startswith(_HEADS) else f"model.{name}": weight for name, weight in found.items()}
    return {name: weight for name, weight in weights.items() if name.startswith(_HEADS)} | own


def _of_other_parts(weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The tensors outside of the language model within a multimodal one, by their names in its modules."""
    return {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if not (_WITHIN.match(name) or name.startswith(_HEADS))
    }


def find_gguf(path: Path) -> Path | None:
    """Returns `path` if it is a GGUF file, or the one GGUF model of a directory without other weights; otherwise None.

    A file is a GGUF file by its first bytes, whatever its name is. A model is a file, or the first of all parts of a
    split one.

    Raises:
        ModelRefused: the directory has several GGUF models, or some parts of one.
    """
    if path.is_file():
        return path if path.suffix.lower() == _SUFFIX or _begins_as_gguf(path) else None
    if not path.is_dir() or (path / WEIGHTS_NAME).exists() or (path / INDEX_NAME).exists():
        return None
    files = sorted(file for file in path.iterdir() if file.is_file())
    found = [file for file in files if file.suffix.lower() == _SUFFIX] or [*filter(_begins_as_gguf, files)]
    if len(found) < 2:
        return inside(path, found[0].name) if found else None
    from edgemoe.storage.convert.gguf_parts import first_part

    first = first_part(file.name for file in found)
    if first is None:
        raise ModelRefused(
            f"one GGUF model in {path}",
            f"{len(found)} files that are not all parts of one, first {found[0].name}",
            "give the path of one file, or put all parts of a split model into one directory",
        )
    return inside(path, first)


def _begins_as_gguf(path: Path) -> bool:
    """Whether a file begins with the four bytes of GGUF files."""
    with suppress(OSError), open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC
    return False
