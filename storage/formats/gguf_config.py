"""A GGUF file's fields as the values of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.formats.gguf_rope import rope_parameters
from edgemoe.storage.formats.gguf_row import Architecture

REALS = (
    "rms_norm_eps",
    "norm_eps",
    "layer_norm_epsilon",
    "final_logit_softcapping",
    "rope_theta",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "routed_scaling_factor",
)
"""Config keys whose values are no sizes, but floating-point numbers."""

_TOKENS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields with a token that ends an answer: of a text, of a turn, of a message."""

_PRE = "tokenizer.ggml.pre"
_AHEAD = "nextn_predict_layers"
"""Field with the number of layers for multi-token prediction, which follow the model's own."""


def own_fields(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of an architecture without its name in front, and values that follow from others.

    Args:
        fields: all of a file.
        name: the architecture's name, which is the prefix of its fields.
    """
    own = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    heads, hidden = own.get("attention.head_count"), own.get("embedding_length")
    own.setdefault("rope.freq_base", 10000.0)
    if _is_size(heads):
        own.setdefault("attention.head_count_kv", heads)
        if _is_size(hidden):
            own.setdefault("attention.key_length", hidden // heads)
    inner, used = own.get("feed_forward_length"), own.get("expert_used_count")
    if _is_size(inner) and _is_size(used):
        own.setdefault("expert_feed_forward_length", inner // used)
    if (epsilon := own.get("attention.layer_norm_rms_epsilon")) is not None:
        own.setdefault("attention.layer_norm_epsilon", epsilon)
    return own | {_PRE: fields.get(_PRE)}


def config_of(
    name: str,
    architecture: Architecture,
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, list[float]],
    path: Path,
) -> dict[str, Any]:
    """The content of a config.json, before bounded_config.

    Args:
        name: the architecture's, in GGUF files.
        architecture: its transformers class and fields.
        fields: all of the file.
        shapes: shape of each tensor by its name in the file.
        factors: "long" and "short" -> factors of rotary frequencies, where the file has them.
        path: the file, for messages.

    Raises:
        MissingTensor: a field that the architecture needs is missing.
        ModelRefused: a value that no model has.
    """
    own = own_fields(fields, name)
    out = _named_values(name, architecture, own, path)
    out["num_hidden_layers"] = _layers(own, path)
    if isinstance(heads := out.get("num_key_value_heads"), list):
        out["num_key_value_heads"] = max((each for each in heads if type(each) is int), default=None)
    out["head_dim"] = own.get("attention.key_length")
    del out["rope_theta"]
    out["rope_parameters"] = rope_parameters(own, factors, path)
    out["vocab_size"] = shapes["token_embd.weight"][0]
    out["tie_word_embeddings"] = "output.weight" not in shapes
    for more in architecture.more:
        out |= more(own, shapes.keys(), out)
    return out | _special_tokens(fields) | {"torch_dtype": "bfloat16"}


def _named_values(
    name: str, architecture: Architecture, own: Mapping[str, Any], path: Path
) -> dict[str, Any]:
    """Values that the architecture implies, and values of single fields; raises as config_of."""
    for field, value in architecture.expected.items():
        if own.get(field, value) != value:
            raise _refused(f"{field} {value}", own[field], path)
    out = dict(architecture.fixed)
    for key, field in architecture.keys.items():
        if field not in own:
            raise MissingTensor(f"the field {name}.{field} in {path}", "no such field", "choose another file")
        out[key] = own[field]
    out |= {key: own[field] for key, field in architecture.optional.items() if field in own}
    for key in out.keys() & set(REALS):  # bounded_config checks the sizes
        if type(out[key]) is not float or not 0 < out[key] < 1e12:
            raise _refused(f"a number above 0 for {key}", out[key], path)
    return out


def layers_ahead(fields: Mapping[str, Any], name: str) -> int:
    """The number of layers for multi-token prediction, which config_of has checked."""
    return int(fields.get(f"{name}.{_AHEAD}", 0))


def _layers(own: Mapping[str, Any], path: Path) -> int:
    """The number of layers, without layers for multi-token prediction."""
    count, ahead = own["block_count"], own.get(_AHEAD, 0)
    if type(count) is not int or type(ahead) is not int or not 0 <= ahead < count:
        raise _refused(f"a block_count above {_AHEAD}", (count, ahead), path)
    return count - ahead


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, field in _TOKENS.items():
        if type(value := fields.get(f"tokenizer.ggml.{field}")) is int:
            out[key] = value
    ends = [fields.get(f"tokenizer.ggml.{field}") for field in _ENDS]
    if known := list(dict.fromkeys(end for end in ends if type(end) is int)):
        out["eos_token_id"] = known[0] if len(known) == 1 else known
    return out


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _refused(expectation: str, finding: object, path: Path) -> ModelRefused:
    return ModelRefused(f"{expectation} in {path}", shortened(finding), "choose another file")
