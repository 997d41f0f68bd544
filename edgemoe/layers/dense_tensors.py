"""The dense tensors of a store: their comparison with a model's parameters, and their places in its modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.families.base import Family
from edgemoe.families.table import family_of
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.embedding import DenseEmbedding
from edgemoe.layers.skeleton import skeleton, without_weights
from edgemoe.storage.convert.config import Config
from edgemoe.storage.files.header import Spec, read_header
from edgemoe.storage.store import dense_groups, dense_shapes
from edgemoe.storage.store.manifest import SCALE_SUFFIX

T = TypeVar("T")

_MATRICES = (nn.Linear, nn.Embedding)
"""Modules whose matrices may be at 8 bits, or at 4 to 6. Not their subclasses: some routers are linear layers that do
more.
"""

_FACTOR = "embed_scale"
"""Buffer of embeddings that multiply all rows by it."""


def check_dense(directory: Path, config: Config, specs: Mapping[str, Spec]) -> None:
    """Compares the dense tensors of a store, made or still to be made, with transformers' modules of a config.json.

    Args:
        directory, config: see skeleton.
        specs: every dense tensor.

    Raises:
        MissingTensor: a parameter of the model is not among them, or has another shape or type.
        ModelRefused: a tensor without a parameter, or a config that skeleton refuses.
    """
    model = skeleton(directory, config)
    without_weights(model)
    require_tensors(model, family_of(config), specs, directory)


def dense_specs(path: Path) -> dict[str, Spec]:
    """Every tensor of a store's dense.safetensors.

    Raises:
        BadHeader, TruncatedFile, MissingTensor: from read_header.
    """
    return {name: entry.spec for name, entry in read_header(path).tensors.items()}


def require_tensors(model: Any, family: Family, specs: Mapping[str, Spec], directory: Path) -> None:
    """Compares dense tensors with the parameters of a model, by name, shape and type. `directory` is for messages.

    Matrices of linear layers and embeddings are BF16, I8 with a scale, BF16, for each row, or U8, of 4 to 6 bits
    (storage.store.dense_groups). Biases are BF16, and other parameters BF16 or F32.
    """
    left = {family.in_modules(name): spec for name, spec in specs.items()}
    join_parts(family, left, _joined_spec)
    _tie(model, left)
    wrong = []
    for name, shape, others in dense_parameters(model):
        found, scale = left.pop(name, None), left.pop(name + SCALE_SUFFIX, None) if "I8" in others else None
        if (found, scale) not in [spec for kind in ("BF16", *others) for spec in _stored(kind, shape)]:
            wrong.append(f"{name} of {list(shape)}: {f'{found[0]} {list(found[1])}' if found else 'none'}")
    if wrong:
        raise MissingTensor(
            f"all dense tensors of {type(model).__name__} in {directory}",
            f"{len(wrong)} missing or of another shape or type, first {wrong[0]}",
            "convert the model again from a complete checkpoint",
        )
    for name in _biases_without_place(model, left):
        del left[name]
    if left:
        raise ModelRefused(
            f"a module of {type(model).__name__} for every dense tensor in {directory}",
            f"{len(left)} tensors without one, first {min(left)}",
            "check that config.json belongs to this checkpoint",
        )


def join_parts(family: Family, tensors: dict[str, T], join: Callable[[list[T]], T]) -> None:
    """Replaces tensors that a checkpoint has in parts by one, as the modules have it (Family.joins).

    Args:
        family: the family of the model.
        tensors: changed: name in modules -> tensor, or another thing that `join` makes one of several.
        join: makes the whole of its parts, in their order.
    """
    for whole, parts in family.joins:
        for name in [name for name in tensors if name.endswith(parts[0])]:
            stem = name.removesuffix(parts[0])
            if all(stem + part in tensors for part in parts):
                tensors[stem + whole] = join([tensors.pop(stem + part) for part in parts])


def join_tensors(parts: list[torch.Tensor]) -> torch.Tensor:
    """Joins dense tensors along their first dimension."""
    return dense_groups.joined(parts) if parts[0].dtype == torch.uint8 else torch.cat(parts)


def _joined_spec(parts: list[Spec]) -> Spec:
    """The spec of tensors that are joined along their first dimension; types that differ have no common one."""
    (dtype, shape), *others = parts
    rows = sum(each[0] for _, each in parts)
    alike = all(each == (dtype, (each[1][0], *shape[1:])) for each in others)
    return dtype if alike else "different types or shapes", (rows, *shape[1:])


def _tie(model: Any, tensors: dict[str, Any]) -> None:
    """Lets the head share the embedding's table where the config says so and no other is stored."""
    if model.config.tie_word_embeddings and "lm_head.weight" not in tensors:
        for suffix in ("", SCALE_SUFFIX):
            if (table := tensors.get("model.embed_tokens.weight" + suffix)) is not None:
                tensors["lm_head.weight" + suffix] = table


def _stored(kind: str, shape: tuple[int, ...]) -> list[tuple[Spec, Spec | None]]:
    """The specs that a parameter stored as a type may have, each with the spec of its scales."""
    if kind == dense_shapes.DTYPE:
        return [((kind, dense_shapes.stored_shape(shape, bits)), None) for bits in dense_shapes.BITS]
    return [((kind, shape), ("BF16", shape[:1]) if kind == "I8" else None)]


def dense_parameters(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """Name and shape of every dense parameter, and the types that it may have besides BF16."""
    for name, module in model.named_modules():
        for parameter, current in _kept(module):
            shape = tuple(current.shape)
            kinds: dict[str, tuple[str, ...]] = {}
            if _is_matrix(module):
                grouped = (dense_shapes.DTYPE,) if dense_shapes.fits(shape) else ()
                kinds = {"weight": ("I8", *grouped), "bias": ()}
            yield f"{name}.{parameter}", shape, kinds.get(parameter, ("F32",))


def place_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Puts every dense tensor into its module; `require_tensors` has passed.

    Raises:
        ModelRefused: a bias without a place is not 0.
    """
    _tie(model, tensors)
    for name in _biases_without_place(model, tensors):
        if bool(tensors[name].any()):
            raise ModelRefused(
                f"zeros in {name}, as {type(model).__name__} has no such bias",
                "other values",
                "check that config.json belongs to this checkpoint",
            )
    for name, module in list(model.named_modules()):
        if _is_matrix(module):
            weight, scale = tensors[f"{name}.weight"], tensors.get(f"{name}.weight{SCALE_SUFFIX}")
            placed = (
                DenseEmbedding(weight, scale, getattr(module, _FACTOR, None))
                if isinstance(module, nn.Embedding)
                else DenseLinear(weight, scale, tensors.get(f"{name}.bias"), (f"{name}.weight",))
            )
            model.set_submodule(name, placed)
            continue
        for parameter, current in _kept(module):
            value = tensors[f"{name}.{parameter}"]
            if isinstance(current, nn.Parameter):
                setattr(module, parameter, nn.Parameter(value, requires_grad=False))
            else:
                setattr(module, parameter, value)


def _biases_without_place(model: nn.Module, names: Collection[str]) -> list[str]:
    """Biases that lie next to the matrices of modules without one, as some quantizers write them."""
    matrices = {name for name, module in model.named_modules() if _is_matrix(module) and not _bias_of(module)}
    return [name for name in names if name.endswith(".bias") and name.removesuffix(".bias") in matrices]


def _is_matrix(module: nn.Module) -> bool:
    """Whether a module's matrix may be at 8 bits."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, _FACTOR)
    return scaled or type(module) in _MATRICES


def _bias_of(module: Any) -> bool:
    return getattr(module, "bias", None) is not None


def _kept(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    buffers = [
        b for b in module.named_buffers(recurse=False) if b[0] not in module._non_persistent_buffers_set
    ]
    return [*module.named_parameters(recurse=False), *buffers]
