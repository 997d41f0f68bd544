"""transformers' names of a GGUF file's tensors, from the tables of the gguf package."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import gguf

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside of layers that all architectures have."""

LAYERS = "model.layers."
"""Beginning of the names of layers in most models."""

_BLOCK = "blk.0."

_BEGINNINGS = (
    *("input_layernorm", "post_attention_layernorm", "linear_attn.", "self_attn.q_norm", "self_attn.k_norm"),
    *("self_attn.o_proj", "self_attn.", "mlp.shared_experts.", "mlp.up_proj", "mlp.gate", "mlp."),
)
"""Beginnings of names below a layer, the likelier first: the package has the names of all models that an architecture
stands for, and of their older versions.
"""

_BARE = ("self_attn.sinks", "linear_attn.A_log", "feed_forward.expert_bias")
"""Parameters whose names have no `.weight` or `.bias` at their end."""

_OF_EXPERTS = "_exps"
"""End of the names of tensors over all experts, which other tables name."""

_CORRECTION = "e_score_correction"


@cache
def layer_names(architecture: str, beginnings: tuple[str, ...], layers: str = LAYERS) -> dict[str, str]:
    """Name of a tensor below `blk.N.`, without `.weight` -> transformers' name below the layer.

    Args:
        architecture: its name in GGUF files.
        beginnings: the beginnings of names below the layer that are preferred to `_BEGINNINGS`.
        layers: beginning of the names of layers.
    """
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    candidates: dict[str, list[str]] = {}
    first = f"{layers}0."
    for theirs, (_, name) in gguf.get_tensor_name_map(numbers[architecture], 1).mapping.items():
        if name.startswith(_BLOCK) and theirs.startswith(first) and not name.endswith(_OF_EXPERTS):
            candidates.setdefault(name.removeprefix(_BLOCK), []).append(theirs.removeprefix(first))
    found = {name: _first(options, (*beginnings, *_BEGINNINGS)) for name, options in candidates.items()}
    return {name: chosen for name, chosen in found.items() if chosen is not None}


def parameter(stem: str, suffix: str) -> str:
    """The name of a parameter below the layer.

    Args:
        stem: a name that layer_names returned.
        suffix: the file's, "weight" or "bias".

    >>> parameter("self_attn.q_proj", "bias"), parameter("mlp.gate.e_score_correction", "bias")
    ('self_attn.q_proj.bias', 'mlp.gate.e_score_correction_bias')
    """
    if stem in _BARE:
        return stem
    return f"{stem}_{suffix}" if stem.endswith(_CORRECTION) else f"{stem}.{suffix}"


def _first(options: list[str], beginnings: Iterable[str]) -> str | None:
    return next((name for begin in beginnings for name in options if name.startswith(begin)), None)
