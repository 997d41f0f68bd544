"""The description of a GGUF architecture in transformers' terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgemoe.storage.formats import gguf_changes as changes
from edgemoe.storage.formats.gguf_changes import Change
from edgemoe.storage.formats.gguf_derived import Derive
from edgemoe.storage.formats.gguf_names import LAYERS, layer_names


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture in transformers' terms.

    Args:
        fixed: config values that the architecture implies, `model_type` among them.
        keys: config key -> field, without the architecture's name in front.
        optional: config key -> field that a file may lack; transformers' default counts then.
        expected: field -> the only value that a file may give it.
        beginnings: how the names of tensors within a layer begin in transformers, where the gguf package has several
            such names for one tensor (gguf_names).
        experts: beginning and ends of the names of an expert's gate, up and down below a layer; an empty end: experts
            have no such matrix.
        layers: beginning of the names of layers in transformers.
        outside: transformers' names of tensors outside of layers, where they differ from most models' names.
        changes: tensors that the file has in another form.
        more: computes further config values from the file's fields and the names of its tensors.
        others: model types besides the fixed one that `more` may choose.
        paired_rows: tensor in which llama.cpp interleaves rows i and i + half of every head -> config key of heads.
        read_apart: tensors whose values become part of the config.
        exported: whether models are exported so.
        repeated_heads: tensors whose heads an export repeats until keys and values have as many as queries, because
            llama.cpp computes no others; the norm over all heads and the attention stay the same.
        own_head: whether llama.cpp wants the head of a tied model as a tensor.
    """

    fixed: dict[str, Any]
    keys: dict[str, str]
    optional: dict[str, str] = dataclasses.field(default_factory=dict)
    expected: dict[str, Any] = dataclasses.field(default_factory=dict)
    beginnings: tuple[str, ...] = ()
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
    layers: str = LAYERS
    outside: dict[str, str] = dataclasses.field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    more: tuple[Derive, ...] = ()
    others: tuple[str, ...] = ()
    paired_rows: dict[str, str] = dataclasses.field(default_factory=dict)
    read_apart: tuple[str, ...] = ()
    exported: bool = False
    repeated_heads: tuple[str, ...] = ()
    own_head: bool = False

    @property
    def model_types(self) -> tuple[str, ...]:
        """Every model_type that a file may have, the likeliest first."""
        return (self.fixed["model_type"], *self.others)

    def names(self, architecture: str) -> Mapping[str, str]:
        """Name of a tensor below `blk.N.`, without `.weight` -> transformers' name below the layer."""
        return layer_names(architecture, self.beginnings, self.layers)

    def expert_names(self) -> dict[str, str]:
        """Part of the name of a tensor over all experts -> transformers' name below the layer, with {expert}."""
        block, *ends = self.experts
        parts = zip(("gate", "up", "down"), ends, strict=True)
        return {f"ffn_{part}_exps": f"{block}.{{expert}}.{end}" for part, end in parts if end}

    def all_changes(self) -> tuple[Change, ...]:
        """`changes`, and the changes that paired_rows needs."""
        names, ends = {"attn_q": "q_proj", "attn_k": "k_proj"}, ("weight", "bias")
        return self.changes + tuple(
            Change(f"self_attn.{names[part]}.{end}", (f"{part}.{end}",), changes.unpaired(heads))
            for part, heads in self.paired_rows.items()
            for end in ends
        )
