"""Loads a model's tokenizer, once it has worked in a confined process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from edgemoe.errors import ModelRefused, UserError
from edgemoe.machine.confined import confined
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, foreign_code, read_json

VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")
"""Files of a tokenizer. Without any of them transformers makes an empty tokenizer and raises no error."""

CPU_SECONDS = 20.0
"""Limit on loading and trying a tokenizer; one of 256,000 words takes some two seconds."""

MEMORY_BYTES = 1 << 30
"""Limit on the memory of loading and trying a tokenizer, in addition to the program's own."""

_SAMPLE = (
    "".join(map(chr, range(32, 0x250))) + "\n\t مرحبا 你好 こんにちは 🙂 " + "a" * 500 + " " * 50 + "1" * 50
)
"""Text that a new tokenizer is tried with, besides the strings of its own rules."""

_MOST_RULES = 1 << 16
"""Characters of these strings that are tried."""

_IDS_AT_ONCE = 256

_WANTED = "a fast tokenizer in {}"

_ACTION = "convert from a checkpoint with tokenizer.json"


def has_tokenizer(directory: Path) -> bool:
    """Whether a model's directory has a file of a tokenizer. Whether it works is found out by check_tokenizer."""
    return any((directory / name).exists() for name in VOCABULARIES)


def check_tokenizer(directory: Path) -> None:
    """Loads and uses the tokenizer of a model in a confined process, where a hostile one ends.

    Raises:
        UserError: there is no file of a tokenizer.
        ModelRefused: one that would run code from the model directory, cannot be loaded, takes too long or too much
            memory, or gives texts ids that the model does not have. An added token without a row of the embedding may
            be there: a prompt with it is refused.
    """
    if not has_tokenizer(directory):
        raise UserError(_WANTED.format(directory), f"none of {', '.join(VOCABULARIES)}", _ACTION)
    words = bounded_config(read_json(directory, "config.json"))["vocab_size"]
    wrong = confined(lambda: try_tokenizer(directory, words), seconds=CPU_SECONDS, memory=MEMORY_BYTES)
    if wrong is not None:
        raise ModelRefused(f"a tokenizer in {directory} that works", wrong, CHECK_ORIGIN)


def load_tokenizer(directory: Path) -> Any:
    """Loads the fast tokenizer of a store, once it has passed check_tokenizer.

    Raises:
        UserError, ModelRefused: as check_tokenizer, or it is no fast one.
    """
    check_tokenizer(directory)
    wanted = _WANTED.format(directory)
    with foreign_code(wanted, _ACTION):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if not tokenizer.is_fast:
        found = f"{type(tokenizer).__name__} without tokenizer.json"
        raise UserError(wanted, found, "save the tokenizer with save_pretrained and convert again")
    return tokenizer


def try_tokenizer(directory: Path, words: int) -> str | None:
    """Loads a tokenizer, encodes a sample with all strings of its rules, and decodes every id that it has.

    Args:
        directory: the directory of the store.
        words: ids that the model has, from 0.

    Returns:
        what is wrong; None: nothing. Whatever a library raises passes.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if not tokenizer.is_fast:
        return None
    beyond = {token: i for token, i in tokenizer.get_vocab().items() if i >= words}
    # Many fine-tunes have a padding token after the last row of the embedding, which no text gives.
    for token in sorted(beyond.keys() - tokenizer.get_added_vocab().keys(), key=beyond.__getitem__):
        return f"token {token!r} with id {beyond[token]}, where config.json has vocab_size {words}"
    ids = tokenizer(_SAMPLE + " ".join(_rules(directory))[:_MOST_RULES])["input_ids"]
    if used := [i for i in ids if i >= words]:
        return f"id {used[0]} in each text, where config.json has vocab_size {words}"
    stream = DecodeStream(skip_special_tokens=True)
    for token in ids[:_IDS_AT_ONCE]:
        stream.step(tokenizer.backend_tokenizer, token)
    tokenizer.decode(ids, skip_special_tokens=True)
    every = range(max(tokenizer.get_vocab().values(), default=-1) + 1)
    for start in range(0, len(every), _IDS_AT_ONCE):
        tokenizer.decode(list(every[start : start + _IDS_AT_ONCE]), skip_special_tokens=True)
    return None


def _rules(directory: Path) -> Iterator[str]:
    """The strings in the rules of tokenizer.json, which a rule may wait for."""
    path = directory / "tokenizer.json"
    parsed = json.loads(path.read_bytes()) if path.exists() else {}
    pending = [parsed.get(part) for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder")]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)
