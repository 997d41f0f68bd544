"""The start that an answer continues: text, messages or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgemoe.api.template import Message, encode_chat
from edgemoe.storage.files.untrusted import foreign_code

Prompt = str | Sequence[Message] | Sequence[int]
"""Text that is continued as it is; messages {"role": ..., "content": ...}, put into the chat template; or token ids."""


def encoded(tokenizer: Any, prompt: Prompt, template: Mapping[str, object] | None = None) -> list[int]:
    """Returns the token ids of a prompt (Model.encode)."""
    if isinstance(prompt, str):
        with foreign_code("a tokenizer and a tokenizer_config.json that encode text"):
            return list(tokenizer(prompt, verbose=False)["input_ids"])
    tokens = [part for part in prompt if isinstance(part, int)]
    if tokens or not prompt:
        return tokens
    messages = [part for part in prompt if not isinstance(part, int)]
    return encode_chat(tokenizer, messages, template or {})
