"""A tokenizer of byte-level BPE with a few tokens, as llama.cpp can have it."""

from __future__ import annotations

import json
from pathlib import Path

TOKENS = 40


def save_bpe(directory: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json with TOKENS tokens, the last one special."""
    vocabulary = {chr(ord("!") + i): i for i in range(TOKENS - 2)} | {'!"': TOKENS - 2}
    special = {"id": TOKENS - 1, "content": "<end>", "special": True, "normalized": False, "lstrip": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [special | {"rstrip": False, "single_word": False}],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [["!", '"']]},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
