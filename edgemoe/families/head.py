"""The head for further tokens of a model (multi-token prediction): its sizes and tensor names.

A head is one decoder layer after the model's layers, with experts of its own. It takes the state before the model's
head, and the embedding of the token after it: both are normed and joined by a matrix. Its result goes through a norm
and the model's own head. Embedding and head are the model's; copies in a checkpoint are left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from edgemoe.families.base import Family, renamed
from edgemoe.kv.shape import KVShape

if TYPE_CHECKING:
    from edgemoe.storage.convert.config import Config

PROJECTION, STATE_NORM, TOKEN_NORM = "eh_proj", "hnorm", "enorm"
"""Names of the matrix that joins a state and an embedding, and of their norms, as modules of layers.head have them."""

_LAST_NORM = "shared_head.norm."
_COPIES = ("embed_tokens.", "shared_head.head.")
"""The norm before the model's head in a checkpoint of the form `layer`, and copies of the model's tensors."""

_MODULE = {
    "mtp.fc.": f"{PROJECTION}.",
    "mtp.norm.": _LAST_NORM,
    "mtp.pre_fc_norm_hidden.": f"{STATE_NORM}.",
    "mtp.pre_fc_norm_embedding.": f"{TOKEN_NORM}.",
    "mtp.layers.0.": "",
}
"""Beginnings of names in the form `mtp`, and what the form `layer` has in their place after the layer's number."""


@dataclass(frozen=True)
class HeadFamily(Family):
    """The head of a family: its one layer has the number after the model's layers.

    Names in modules are the names in layers.head.HeadModel, which has this layer as its first.
    """

    @property
    def layer(self) -> int:
        """Number of the head's layer."""
        return self.moe_layers[0]

    def separate(self, layer: int, expert: int) -> tuple[str, ...] | None:
        """Names an expert's tensors, as Family.separate."""
        names = super().separate(layer, expert)
        return None if names is None else tuple(map(self._in_source, names))

    def fused(self, layer: int) -> tuple[tuple[str, str], ...]:
        """Names the tensors of all experts, as Family.fused."""
        return tuple((self._in_source(up), self._in_source(down)) for up, down in super().fused(layer))

    def is_expert(self, name: str) -> bool:
        """Whether a tensor of this name has expert weights of the head."""
        plain = self._part(name)
        return plain is not None and super().is_expert(self._prefix + plain)

    def in_modules(self, name: str) -> str:
        """Returns the name in layers.head.HeadModel of a checkpoint's tensor; another tensor's name is unchanged."""
        part = self._part(super().in_modules(name))
        if part is None:
            return name
        if part.startswith(_LAST_NORM):
            return f"model.norm.{part.removeprefix(_LAST_NORM)}"
        own = part.split(".")[0] in (PROJECTION, STATE_NORM, TOKEN_NORM)
        return part if own else f"model.layers.0.{part}"

    def in_checkpoint(self, name: str) -> str:
        """Returns the name in a checkpoint of its form of a tensor with a name in layers.head.HeadModel."""
        part = name.removeprefix("model.layers.0.")
        if part.startswith("model.norm."):
            part = _LAST_NORM + part.removeprefix("model.norm.")
        forms = {self._prefix: ""} if self.traits.head == "layer" else _MODULE
        made = next(
            begins + part.removeprefix(plain) for begins, plain in forms.items() if part.startswith(plain)
        )
        restored = renamed(made, self.restores)
        return restored if self.in_modules(restored) == self.in_modules(made) else made

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of this name is not part of the head."""
        part = self._part(super().in_modules(name))
        return part is None or part.startswith(_COPIES) or self.never_used(name)

    @property
    def _prefix(self) -> str:
        return f"model.layers.{self.layer}."

    def _part(self, name: str) -> str | None:
        """Returns the rest of a name after the number of the head's layer; None: it is no tensor of the head."""
        if self.traits.head == "layer":
            return name.removeprefix(self._prefix) if name.startswith(self._prefix) else None
        for beginning, plain in _MODULE.items():
            if name.startswith(beginning):
                return plain + name.removeprefix(beginning)
        return None

    def _in_source(self, name: str) -> str:
        """The name of an expert's tensor in a checkpoint of its form."""
        return name if self.traits.head == "layer" else name.replace(self._prefix, "mtp.layers.0.", 1)


def head_of(family: Family, config: Config, names: Collection[str]) -> HeadFamily | None:
    """Returns the head of a checkpoint; None: its family has none, or the checkpoint leaves out parts of it.

    Args:
        family: the family of the config.
        config: the config, bounded.
        names: names of all tensors of the checkpoint.
    """
    head = head_family(family, config)
    if head is None:
        return None
    tensors = [name for name in names if not head.is_unused(name)]
    parts = {head.in_modules(name) for name in tensors}
    modules = (PROJECTION, STATE_NORM, TOKEN_NORM, "model.norm")
    whole = parts.issuperset(f"{module}.weight" for module in modules) and any(map(head.is_expert, tensors))
    return head if whole else None


def head_family(family: Family, config: Config) -> HeadFamily | None:
    """Returns the head that checkpoints of a family may have; None: it has none that this program runs."""
    if not family.traits.head:
        return None
    values = {each.name: getattr(family, each.name) for each in fields(Family)}
    values |= {"moe_layers": (config["num_hidden_layers"],), "kv": _kv_of(family.kv), "ahead": (0, 0)}
    return HeadFamily(**values | {"dense": frozenset()})


def _kv_of(kv: KVShape) -> KVShape:
    """The keys and values of one layer with attention to all tokens, as the last layer with attention has it."""
    part = max(kv.parts, key=lambda each: max(each.layers))
    return replace(part, layers=(0,), linear=None, others=(), index=None, window=0)
