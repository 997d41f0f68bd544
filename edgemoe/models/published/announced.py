"""A checkpoint that is known by the sizes of its model alone: enough for a plan, and without weights."""

from __future__ import annotations

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
from edgemoe.models.published.short_names import short_repository
from edgemoe.models.published.sizes import BF16, BITS, PUBLISHED, Published
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.formats.base import Weight


class AnnouncedWeight(Weight):
    """A tensor of which the shape is known, and nothing else."""

    def __init__(self, name: str, shape: tuple[int, ...], type: str, published: Published) -> None:
        self.shape, self.parts, self.nbytes = shape, (name,), round(prod(shape) * BITS[type] / 8)
        self.type, self._published = type, published

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16: the type of weights in a model's files, or the one that they are read as."""
        return torch.bfloat16

    def read(self) -> NoReturn:
        """Raises ModelRefused: there are no weights."""
        repository = self._published.repository
        raise ModelRefused(
            f"the weights of {self.parts[0]}",
            f"the published sizes of {repository} alone",
            f"run `edgemoe pull {repository}`",
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


def announced_checkpoint(name: str) -> Checkpoint:
    """Makes a checkpoint of a model's published sizes, and says so on stderr. Imports the code of the model's class.

    Args:
        name: one of PUBLISHED.

    Raises:
        ModelRefused: edgemoe does not run the model.
    """
    from edgemoe.layers.skeleton import skeleton

    say(f"{name} is planned from its published sizes, without its files")
    published = PUBLISHED[name]
    config = bounded_config(published.config)
    directory = published_repository(name)
    weights: dict[str, Weight] = {
        tensor: AnnouncedWeight(tensor, shape, type, published)
        for tensor, shape, type in _tensors(published, family_of(config), skeleton(directory, config))
    }
    return Checkpoint(directory, config, published.experts, weights, ())


def _tensors(published: Published, family: Family, model: Any) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yields name, shape and format of each tensor, experts fused, of a model without weights."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for name, value in model.state_dict().items():
        if name in family.dense and name not in tied:
            yield name, tuple(value.shape), BF16
    count, hidden, inner = family.experts, family.hidden, family.intermediate
    rows = 2 * inner if family.gated else inner
    first, down = (count, rows, hidden), (count, hidden, inner)
    if family.transposed:
        first, down = (count, hidden, rows), (count, inner, hidden)
    for layer in family.moe_layers:
        names = family.fused(layer)[0]
        for name, shape in zip(names, (first, down), strict=True):
            yield name, shape, published.experts
