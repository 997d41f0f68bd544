"""A checkpoint that is known by the sizes of its model alone: enough for a plan, and without weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch

from edgemoe.console.width import say
from edgemoe.errors import ModelRefused
from edgemoe.families.base import Family
from edgemoe.families.table import family_of
from edgemoe.models.cache import aliases
from edgemoe.models.published.q4_k_m import MIXED, CodeType, dense_type, expert_type
from edgemoe.models.published.short_names import SHORT_NAMES, short_repository
from edgemoe.models.published.sizes import BF16, BITS, PUBLISHED, Published
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.formats.base import Weight


class AnnouncedWeight(Weight):
    """A tensor of which the shape and the type are known, and nothing else."""

    def __init__(self, name: str, shape: tuple[int, ...], type: CodeType, repository: str) -> None:
        self.shape, self.parts, self.nbytes = shape, (name,), round(prod(shape) * type.bits_per_weight / 8)
        self.type, self.bits, self.group = type.name, type.bits, type.group
        self._repository = repository

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16: the type of weights in a model's files, or the one that they are read as."""
        return torch.bfloat16

    def read(self) -> NoReturn:
        """Raises ModelRefused: there are no weights."""
        raise ModelRefused(
            f"the weights of {self.parts[0]}",
            f"the published sizes of {self._repository} alone",
            f"run `edgemoe pull {self._repository}`",
        )


def published_name(model: Path) -> str | None:
    """The name in PUBLISHED that a user gives; None for an existing path, and for any other name.
    Upper and lower case are the same.

    >>> published_name(Path("GPT-OSS-20B")), published_name(Path("acme/gpt-oss-20b"))
    ('gpt-oss-20b', None)
    """
    if model.exists():
        return None
    given = str(model).lower()
    return next((name for name in PUBLISHED if given == name.lower()), None)


def known_repository(model: Path, cached: Collection[str]) -> Path | None:
    """The name on the Hub that a short name, or a name of PUBLISHED, stands for.

    Args:
        model: the name that a user gives.
        cached: the directories of the cache.

    Returns:
        None for any other name, and where the cache has a model of this name, or one that begins with the short name.
    """
    short = short_repository(model)
    if short and not any(directory.lower().startswith(str(model).lower()) for directory in cached):
        return short
    published = published_name(model)
    if published and not any(str(model) in aliases(directory) for directory in cached):
        return published_repository(published)
    return None


def published_repository(name: str) -> Path:
    """The name on the Hub, organisation/name, of a model of PUBLISHED."""
    return Path(PUBLISHED[name].repository)


def announced_name(model: Path) -> str | None:
    """The short name, or the name in PUBLISHED, that a user gives; None for an existing path and any other name."""
    short = str(model).lower()
    return short if short_repository(model) else published_name(model)


def announced_checkpoint(name: str) -> Checkpoint:
    """Makes a checkpoint of a model's published sizes, and says so on stderr. Imports the code of the model's class.

    Args:
        name: one of PUBLISHED, or a short name, whose tensors have the types of its file.

    Raises:
        ModelRefused: edgemoe does not run the model.
    """
    say(f"{name} is planned from its published sizes, without its files")
    return checkpoint_of_sizes(name)


def checkpoint_of_sizes(name: str) -> Checkpoint:
    """Makes a checkpoint as announced_checkpoint does, without a word."""
    from edgemoe.layers.skeleton import skeleton

    short = SHORT_NAMES.get(name)
    published = PUBLISHED[short.published if short else name]
    config = bounded_config(published.config)
    directory = Path(short.repository if short else published.repository)
    tensors, source = _tensors(published, family_of(config), skeleton(directory, config)), published.experts
    if short and short.gguf:
        tensors, source = _as_gguf(tensors, config["num_hidden_layers"]), MIXED
    weights: dict[str, Weight] = {
        tensor: AnnouncedWeight(tensor, shape, type, str(directory)) for tensor, shape, type in tensors
    }
    return Checkpoint(directory, config, source, weights, ())


_Tensors = Iterator[tuple[str, tuple[int, ...], CodeType]]
"""Name, shape and type of each tensor of a model."""


def _tensors(published: Published, family: Family, model: Any) -> _Tensors:
    """Yields each tensor, experts fused, of a model without weights; experts have three dimensions."""
    dense, experts = (CodeType(type, BITS[type]) for type in (BF16, published.experts))
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, value in model.state_dict().items():
        if name in family.dense and name not in tied:
            yield name, tuple(value.shape), dense
    count, hidden, inner = family.experts, family.hidden, family.intermediate
    rows = 2 * inner if family.gated else inner
    first, down = (count, rows, hidden), (count, hidden, inner)
    if family.transposed:
        first, down = (count, hidden, rows), (count, inner, hidden)
    for layer in family.moe_layers:
        names = family.fused(layer)[0]
        for name, shape in zip(names, (first, down), strict=True):
            yield name, shape, experts


def _as_gguf(tensors: _Tensors, layers: int) -> _Tensors:
    """Yields the tensors of a model of `layers` layers with the types of a file of Q4_K_M."""
    for name, shape, _ in tensors:
        if len(shape) == 3 and (layer := re.search(r"layers\.(\d+)\..*experts", name)):
            yield name, shape, expert_type(int(layer[1]), layers, shape[2], down="down" in name)
        else:
            yield name, shape, dense_type(name, shape)
