"""Whether a chat can run a model, as far as that is known without its weights: before a conversion, and at a start."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig

from edgemoe.errors import ModelRefused
from edgemoe.families.ahead import require_layers_ahead
from edgemoe.families.head import head_of
from edgemoe.families.table import family_of
from edgemoe.layers.dense_tensors import check_dense
from edgemoe.layers.head import check_head
from edgemoe.layers.skeleton import skeleton
from edgemoe.models.tokenizer import check_tokenizer
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.head_weights import HeadWeights
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, foreign_code, read_json, shortened
from edgemoe.storage.store.dense import DenseWeights

_GENERATION = "generation_config.json"

_RANGES = {
    "temperature": (0, 1000),
    "top_p": (0, 1),
    "top_k": (-1, 10_000_000),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""Key of generation_config.json -> least and largest value that a sampler is given."""


def check_runnable(checkpoint: Checkpoint, dense_bits: int, head_bits: int = 8) -> None:
    """Refuses a checkpoint whose store a chat would refuse.

    Args:
        checkpoint: the checkpoint to convert; no weights are read.
        dense_bits: bits of the store's dense weights, one of manifest.DENSE_BITS.
        head_bits: bits of its embedding and head, one of dense_shapes.HEAD_BITS.

    Raises:
        ModelRefused, MissingTensor: its experts or dense tensors contradict config.json, or
            transformers does not accept a value of config.json or generation_config.json.
        UserError, ModelRefused: no tokenizer, or one that does not work.
    """
    # A GGUF file contains its companions, which are unpacked elsewhere.
    directory = checkpoint.companions()[0].parent
    check_sizes(checkpoint, directory, dense_bits, head_bits)
    generation_config(directory)
    check_tokenizer(directory)


def check_sizes(checkpoint: Checkpoint, directory: Path, dense_bits: int, head_bits: int = 8) -> None:
    """Refuses a checkpoint that does not have exactly the tensors of the model that its config.json describes.

    Args:
        checkpoint: no weights are read.
        directory: the directory that has its config.json, for messages.
        dense_bits, head_bits: bits of a dense weight in the store, and of embedding and head.

    Raises:
        ModelRefused, MissingTensor: a tensor is missing, has another shape or is too many, or config.json has a value
            that transformers does not accept.
    """
    family = family_of(checkpoint.config, directory)
    experts = ExpertWeights(checkpoint, family)
    require_layers_ahead(family, checkpoint.names(), directory)
    dense = DenseWeights(checkpoint, experts.names, family, dense_bits, head_bits).specs()
    head = head_of(family, checkpoint.config, checkpoint.names())
    if head:
        dense_of_head = HeadWeights(checkpoint, head, dense_bits).dense.specs()
        check_head(skeleton(directory, checkpoint.config), head, dense_of_head, directory)
    check_dense(directory, checkpoint.config, dense)


def generation_config(directory: Path) -> GenerationConfig:
    """Loads the model's generation_config.json, or transformers' defaults without one.

    Raises:
        ModelRefused: a value that no sampler can use, with its key.
    """
    if not (directory / _GENERATION).exists():
        return GenerationConfig()
    values = read_json(directory, _GENERATION)
    with foreign_code(f"values in {directory / _GENERATION} that transformers accepts", values=values):
        config = GenerationConfig.from_pretrained(directory)
    for key, (least, most) in _RANGES.items():
        value = getattr(config, key)
        if value is not None and not (_is_number(value) and least <= value <= most):
            raise _refused(f"a number from {least} to {most} for {key}", value, directory)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [] if ends == [None] else ends
    if not all(type(end) is int and end >= 0 for end in ends):
        raise _refused("token ids for eos_token_id", config.eos_token_id, directory)
    return config


def _refused(expectation: str, value: object, directory: Path) -> ModelRefused:
    return ModelRefused(f"{expectation} in {directory / _GENERATION}", shortened(value), CHECK_ORIGIN)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
