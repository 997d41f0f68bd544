"""The start that an answer continues: text, messages or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from edgemoe.api.template import Message, encode_chat
from edgemoe.api.value_types import with_type
from edgemoe.errors import UserError
from edgemoe.storage.files.untrusted import foreign_code

Prompt = str | Sequence[Message] | Sequence[int]
"""Text that is continued as it is; messages {"role": ..., "content": ...}, put into the chat template; or token ids."""


def encoded(tokenizer: Any, prompt: Prompt, template: Mapping[str, object] | None = None) -> list[int]:
    """Returns the token ids of a prompt (Model.encode).

    Raises:
        UserError: it is neither text nor messages nor token ids.
    """
    if isinstance(prompt, str):
        with foreign_code("a tokenizer and a tokenizer_config.json that encode text"):
            return list(tokenizer(prompt, verbose=False)["input_ids"])
    if isinstance(prompt, Sequence):
        tokens = [int(part) for part in prompt if isinstance(part, Integral)]
        messages = [part for part in prompt if isinstance(part, Mapping)]
        if len(tokens) == len(prompt):
            return tokens
        if len(messages) == len(prompt):
            return encode_chat(tokenizer, messages, template or {})
    raise UserError(
        "a text, a list of messages or a list of token ids as the prompt",
        with_type(prompt)[:200],
        'give for example "Hello" or [{"role": "user", "content": "Hello"}]',
    )
