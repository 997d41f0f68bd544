"""The shape of a sequence's KV: keys and values, latents, and the state of linear-attention layers."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field, replace

from edgemoe.errors import ModelRefused
from edgemoe.kv.formats import KVFormat, row_bytes
from edgemoe.storage.convert.checkpoint import Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, shortened

_LARGEST_SIZE = 131_072
"""Largest legal size of one cached dimension."""

PAGE = mmap.PAGESIZE
"""Bytes of memory that are taken at once."""


@dataclass(frozen=True)
class LinearState:
    """The shape of the linear-attention layers' state, which does not depend on the length of a sequence.

    Args:
        layers: the linear-attention layers, ascending.
        channels, kernel: of the convolution, whose last inputs are stored as bf16 [channels, kernel].
        heads, key_dim, value_dim: of the recurrence, stored as float32 [heads, key_dim, value_dim].
    """

    layers: tuple[int, ...]
    channels: int
    kernel: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Bytes of all layers' states in two copies: a step writes one, so that the other can undo the step."""
        each = 2 * self.channels * self.kernel + 4 * self.heads * self.key_dim * self.value_dim
        return 2 * len(self.layers) * each


@dataclass(frozen=True)
class KVShape:
    """The shape of one sequence's KV.

    Args:
        layers: the layers with attention, ascending.
        heads: number of key and value heads.
        key_dim: size of a key.
        value_dim: size of a value; 0 where values are not stored.
        latent: leading elements of a key that are the latent of its value (multi-head latent attention); 0: none.
        linear: state of the linear-attention layers; None: there are none.
        format: how keys and values are stored; latents are stored as keys.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    latent: int = 0
    linear: LinearState | None = None
    format: KVFormat = field(default_factory=KVFormat)

    @property
    def rotation(self) -> int:
        """Numbers of a key that are rotated together (KVFormat.rotation); 0: keys lie plain."""
        return self.format.rotation(self.key_dim, self.latent or self.key_dim)

    def bytes_for(self, context: int) -> int:
        """Returns the bytes of a sequence's KV for `context` tokens."""
        row = row_bytes(self.format.keys, self.key_dim) + row_bytes(self.format.values, self.value_dim)
        return len(self.layers) * self.heads * row * context + (self.linear.bytes if self.linear else 0)

    def bytes_in_pages(self, tokens: int, context: int) -> int:
        """Returns the bytes of the pages that a sequence's first tokens lie in, where its context has been mapped.

        Keys and values of each layer and head lie together, for all tokens of the context.

        Args:
            tokens: at most the context.
            context: tokens that the sequence may have.
        """
        rows = [row_bytes(self.format.keys, self.key_dim)]
        rows += [row_bytes(self.format.values, self.value_dim)] if self.value_dim else []
        pages = sum(-(-tokens * row // PAGE) + (context * row % PAGE > 0) for row in rows if tokens)
        in_pages = len(self.layers) * self.heads * pages * PAGE + (self.linear.bytes if self.linear else 0)
        return min(in_pages, self.bytes_for(context))


def keys_and_values(config: Config) -> KVShape:
    """Returns the shape for grouped-query attention in every layer."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = tuple(range(config["num_hidden_layers"]))
    return KVShape(layers, config.get("num_key_value_heads") or heads, dim, dim)


def latents(config: Config) -> KVShape:
    """Returns the shape for multi-head latent attention: a latent and a rotary key per token, for all heads."""
    latent, rotary = sized(config, "kv_lora_rank"), sized(config, "qk_rope_head_dim")
    return KVShape(tuple(range(config["num_hidden_layers"])), 1, latent + rotary, 0, latent=latent)


def hybrid(config: Config) -> KVShape:
    """Returns the shape for gated delta nets with attention in some layers.

    layer_types names the layers with attention; without it every full_attention_interval-th layer has attention.

    Raises:
        ModelRefused: layer_types lacks a known kind for a layer.
    """
    count = config["num_hidden_layers"]
    interval = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)
    ]
    known = {"linear_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != count or not known.issuperset(map(str, kinds)):
        raise ModelRefused(
            f"{' or '.join(sorted(known))} for each of {count} layers in layer_types of config.json",
            shortened(kinds),
            CHECK_ORIGIN,
        )
    heads, keys = sized(config, "linear_num_value_heads"), sized(config, "linear_num_key_heads")
    key_dim, value_dim = sized(config, "linear_key_head_dim"), sized(config, "linear_value_head_dim")
    linear = LinearState(
        tuple(layer for layer in range(count) if kinds[layer] == "linear_attention"),
        channels=2 * keys * key_dim + heads * value_dim,
        kernel=sized(config, "linear_conv_kernel_dim"),
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
    )
    layers = tuple(layer for layer in range(count) if kinds[layer] == "full_attention")
    return replace(keys_and_values(config), layers=layers, linear=linear)


def sized(config: Config, key: str) -> int:
    """Returns a size from the config.

    Raises:
        ModelRefused: the size is missing, or not a whole number from 1 to 131072.
    """
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
        raise ModelRefused(
            f"a whole number from 1 to {_LARGEST_SIZE} for {key} in config.json",
            shortened(value),
            CHECK_ORIGIN,
        )
    return value
