"""Tokens that end an answer, from every file of a model that names one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgemoe.models.runnable import generation_config
from edgemoe.storage.convert.config import language_model
from edgemoe.storage.files.untrusted import foreign_code, read_json

TURN_ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    *("<|end_of_turn|>", "<|end_of_text|>", "<|endoftext|>", "<EOT>", "<|EOT|>", "<end_of_utterance>"),
    *("<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "[EOT]", "<|eot|>", "<|eom|>", "<|role_end|>"),
)
"""Tokens that end a turn or a text in the chat templates of published models."""

MESSAGE_END = "<|end|>"
"""In vocabularies with `<|return|>` this token ends a message, after which the turn goes on."""


def ends_of(directory: Path, tokenizer: Any) -> frozenset[int]:
    """Collects the ids of tokens that end an answer.

    They are the ends of generation_config.json and of config.json, a number or a list each, the tokenizer's end of
    sequence, and the members of TURN_ENDS that the tokenizer has as tokens of their own.

    Args:
        directory: the directory of the store.
        tokenizer: the model's tokenizer.

    Raises:
        ModelRefused: a value in generation_config.json that no sampler can use.
    """
    config = language_model(read_json(directory, "config.json"))
    named = generation_config(directory).eos_token_id, config.get("eos_token_id"), tokenizer.eos_token_id
    ends = {end for each in named for end in _ids(each)}
    with foreign_code(f"a tokenizer in {directory} that lists its tokens"):
        added = tokenizer.get_added_vocab()
    known = {name: added[name] for name in TURN_ENDS if name in added}
    if "<|return|>" in known:
        known.pop(MESSAGE_END, None)
    return frozenset(end for end in ends | {*known.values()} if end < config["vocab_size"])


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if type(each) is int and each >= 0]
