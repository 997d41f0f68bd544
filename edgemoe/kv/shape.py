"""What one sequence keeps between steps, layer by layer: keys and values, latents, or a linear layer's state."""

from __future__ import annotations

from dataclasses import dataclass

from storage.checkpoint import Config
from storage.errors import ModelRefused


@dataclass(frozen=True)
class LinearState:
    """The state that every linear-attention layer keeps, whatever the length of its sequence.

    Args:
        layers: that are linear, ascending.
        channels, kernel: of the convolution; its last inputs are kept as bf16 [channels, kernel].
        heads, key_dim, value_dim: of the recurrence, kept as float32 [heads, key_dim, value_dim].
    """

    layers: tuple[int, ...]
    channels: int
    kernel: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Bytes of all layers' states, twice: a step writes the second copy and is undone by forgetting it."""
        each = 2 * self.channels * self.kernel + 4 * self.heads * self.key_dim * self.value_dim
        return 2 * len(self.layers) * each


@dataclass(frozen=True)
class KVShape:
    """The cache of one sequence.

    Args:
        layers: that have attention, ascending.
        heads: of keys and values.
        key_dim: of a key.
        value_dim: of a value; 0 where values are not kept.
        latent: elements of the key that values are made from as well (multi-head latent attention); 0: none.
        linear: state of the layers without attention.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    latent: int = 0
    linear: LinearState | None = None

    def bytes_for(self, context: int) -> int:
        """Bytes that the cache of a sequence of `context` tokens allocates."""
        kept = 2 * len(self.layers) * self.heads * (self.key_dim + self.value_dim) * context
        return kept + (self.linear.bytes if self.linear else 0)


def keys_and_values(config: Config) -> KVShape:
    """Grouped-query attention in every layer."""
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = tuple(range(config["num_hidden_layers"]))
    return KVShape(layers, config.get("num_key_value_heads") or heads, dim, dim)


def latents(config: Config) -> KVShape:
    """Multi-head latent attention: one latent and one rotary key for all heads of a token."""
    latent, rotary = sized(config, "kv_lora_rank"), sized(config, "qk_rope_head_dim")
    return KVShape(tuple(range(config["num_hidden_layers"])), 1, latent + rotary, 0, latent=latent)


def hybrid(config: Config) -> KVShape:
    """Gated delta nets, with attention in every full_attention_interval-th layer or where layer_types says so.

    Raises:
        ModelRefused: layer_types does not name a known kind for every layer.
    """
    count = config["num_hidden_layers"]
    interval = config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(count)
    ]
    known = {"linear_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != count or not known.issuperset(map(str, kinds)):
        raise ModelRefused(
            f"{' or '.join(sorted(known))} was wanted for each of {count} layers in layer_types of config.json",
            f"it is {str(kinds)[:60]}",
            "Check where this checkpoint is from",
        )
    heads, keys = sized(config, "linear_num_value_heads"), sized(config, "linear_num_key_heads")
    key_dim, value_dim = sized(config, "linear_key_head_dim"), sized(config, "linear_value_head_dim")
    plain = keys_and_values(config)
    return KVShape(
        tuple(layer for layer in plain.layers if kinds[layer] == "full_attention"),
        plain.heads,
        plain.key_dim,
        plain.value_dim,
        linear=LinearState(
            tuple(layer for layer in plain.layers if kinds[layer] == "linear_attention"),
            channels=2 * keys * key_dim + heads * value_dim,
            kernel=sized(config, "linear_conv_kernel_dim"),
            heads=heads,
            key_dim=key_dim,
            value_dim=value_dim,
        ),
    )


_LARGEST = 131_072
"""Largest size of one cached dimension that is believed."""


def sized(config: Config, key: str) -> int:
    """A size from the config.

    Raises:
        ModelRefused: it is missing, or no whole number from 1 to 131072.
    """
    value = config.get(key)
    if type(value) is not int or not 1 <= value <= _LARGEST:
        raise ModelRefused(
            f"a whole number from 1 to {_LARGEST} was wanted for {key} in config.json",
            f"it is {str(value)[:60]}",
            "Check where this checkpoint is from",
        )
    return value
