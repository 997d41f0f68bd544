"""Names of a model's tensors in checkpoints, by transformers' own conversions of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from edgemoe.errors import ModelRefused
from edgemoe.families.base import Rename, renamed

_ACTION = "choose a model of another family"


@dataclass(frozen=True)
class Conversions:
    """How from_pretrained makes the tensors of modules from a checkpoint's tensors.

    Args:
        renames: pairs that turn a checkpoint's tensor names into the model's (Family.renames).
        restores: pairs that turn the model's tensor names into a checkpoint's (Family.restores).
        converters: transformers' conversions that compute with tensors.
    """

    renames: tuple[Rename, ...]
    restores: tuple[Rename, ...]
    converters: tuple[Any, ...]

    @classmethod
    def of(cls, model: Any, wrapper: str | None) -> Conversions:
        """Reads the conversions of a model's class.

        Args:
            model: transformers' model.
            wrapper: model_type of the multimodal model that it is the language model of; None: of none.

        Raises:
            ModelRefused: a conversion that is more than a rename, and not of experts alone.
        """
        found = get_model_conversion_mapping(model, add_legacy=False)
        if wrapper and not any(isinstance(each, WeightConverter) for each in found):
            found += get_checkpoint_conversion_mapping(wrapper) or []
        renames = [each for each in found if isinstance(each, WeightRenaming)]
        for each in renames:
            if type(each) not in (WeightRenaming, PrefixChange) or len(each.source_patterns) != 1:
                raise ModelRefused(
                    f"tensors of {type(model).__name__} that are renamed one by one",
                    f"a {type(each).__name__} of {', '.join(each.source_patterns)}",
                    _ACTION,
                )
        back = [each.reverse_transform() for each in reversed(renames) if not isinstance(each, PrefixChange)]
        return cls(
            tuple(_as_rename(each) for each in renames),
            tuple(_as_rename(each) for each in back),
            tuple(each for each in found if isinstance(each, WeightConverter)),
        )

    def expert_names(self, target: str) -> tuple[list[str], Transpose | None]:
        """Templates of the tensors that are joined to the tensor `target` of an experts module.

        Args:
            target: name in modules, with {layer} in place of a number.

        Returns:
            a template for each part, in the order of their rows, and the operation where the part is one tensor that is
            transposed; no template where a checkpoint has the tensor as it is.

        Raises:
            ModelRefused: an operation that no conversion knows.
        """
        for converter in self.converters:
            (pattern, *more), sources = map(_plain, (converter.target_patterns, converter.source_patterns))
            if more or pattern not in target:
                continue
            kinds = [type(operation) for operation in converter.operations]
            if kinds == [Transpose]:
                return [self.restored(target)], converter.operations[0]
            if kinds not in ([MergeModulelist, Concatenate], [MergeModulelist]):
                raise ModelRefused(
                    f"experts joined by {MergeModulelist.__name__}, {Concatenate.__name__} or {Transpose.__name__}",
                    f"{target} by {', '.join(kind.__name__ for kind in kinds)}",
                    _ACTION,
                )
            parts = [source.replace("*.", "{expert}.", 1) for source in sources]
            return [self.restored(target.replace(pattern, part, 1)) for part in parts], None
        return [], None

    def joins(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Endings of the names of dense tensors that are joined along their rows (Family.joins)."""
        found = []
        for converter in self.converters:
            kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
            if kinds == [(Concatenate, 0)] and len(converter.target_patterns) == 1:
                (whole,), parts = map(_plain, (converter.target_patterns, converter.source_patterns))
                found.append((whole, tuple(parts)))
        return tuple(found)

    def restored(self, name: str) -> str:
        """The name in checkpoints of the Hub of a name in modules; unchanged where there is no other."""
        made = renamed(_numbered(name), self.restores)
        made = made if renamed(made, self.renames) == _numbered(name) else _numbered(name)
        return made.replace(f".{_LAYER}.", ".{layer}.", 1).replace(f".{_EXPERT}.", ".{expert}.", 1)


def _plain(patterns: Iterable[str]) -> list[str]:
    """Patterns whose only special characters are escaped points, as text."""
    return [pattern.replace("\\.", ".") for pattern in patterns]


_LAYER, _EXPERT = 7, 5
"""Numbers that stand for any, as renames may look for digits."""


def _numbered(template: str) -> str:
    return template.replace("{layer}", str(_LAYER)).replace("{expert}", str(_EXPERT))


def _as_rename(renaming: Any) -> Rename:
    """The pattern and the replacement of one of transformers' renamings, with its group as the first."""
    pattern, replacement = renaming.compiled_sources.pattern, renaming.target_patterns[0]
    # transformers names the whole alternative; a group within it is the second then.
    pattern = pattern.removeprefix("(?P<g0>").removesuffix(")") if pattern.startswith("(?P<g0>") else pattern
    scope = renaming.scope_prefix
    if scope:
        raise ModelRefused(
            "tensors that are renamed the same in all modules", f"{pattern} in {scope} alone", _ACTION
        )
    return pattern, replacement


def template_of(name: str) -> str:
    """A tensor's name with {layer} in place of the number after `.layers.`."""
    return re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", name, count=1)


def one_template(names: Iterable[str]) -> str:
    """The template of names that differ in their layer's number alone.

    Raises:
        ModelRefused: there are several.
    """
    found = {template_of(name) for name in names}
    if len(found) != 1:
        raise ModelRefused(
            "experts under one name in all layers", f"{len(found)} names, {sorted(found)[:2]}", _ACTION
        )
    return found.pop()
