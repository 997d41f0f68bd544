"""The bytes of single tokens, read from the vocabulary: a part of a character has no text of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from edgemoe.storage.files.untrusted import foreign_code

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTexts:
    """The text that each token of a tokenizer adds to a text that is not empty. Thread-safe.

    Args:
        tokenizer: a fast tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        with foreign_code("a tokenizer that decodes the model's tokens"):
            decoder = tokenizer.backend_tokenizer.decoder
            steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
            self._added = {
                int(token): str(each.content) for token, each in tokenizer.added_tokens_decoder.items()
            }
            self._special = {int(token) for token in tokenizer.all_special_ids}
        kinds = {step["type"] for step in steps}
        self._letters = _letters() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ] + [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
        self.of = lru_cache(1 << 16)(self._of)

    def shown(self, token: int) -> bytes:
        """UTF-8 that the token adds to an answer, which has no special tokens."""
        return b"" if token in self._special else self.of(token)

    def _of(self, token: int) -> bytes:
        """UTF-8, or a part of a character's UTF-8; empty for an id that the tokenizer does not have."""
        if token in self._added:
            return self._added[token].encode()
        with foreign_code("a tokenizer that decodes the model's tokens"):
            word = self._tokenizer.convert_ids_to_tokens(token)
        if word is None:
            return b""
        if self._letters:
            return b"".join(self._letters.get(letter) or letter.encode() for letter in word)
        if self._falls_back and (byte := _BYTE.fullmatch(word)):
            return bytes.fromhex(byte[1])
        for pattern, content in self._replaced:
            word = word.replace(pattern, content)
        return str(word).encode(errors="replace")


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields the decoders that a decoder consists of."""
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _steps(part)
    else:
        yield decoder


def _letters() -> dict[str, bytes]:
    """The letter that byte-level vocabularies have for each byte -> the byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    pairs = [*((byte, byte) for byte in plain), *((256 + i, byte) for i, byte in enumerate(others))]
    return {chr(letter): bytes([byte]) for letter, byte in pairs}
