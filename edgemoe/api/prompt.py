"""The start that an answer continues: text, messages or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from edgemoe.api.pictures import ModelPictures
from edgemoe.api.template import Message, encode_chat
from edgemoe.api.value_types import with_type
from edgemoe.engine.engine import Engine
from edgemoe.errors import UserError
from edgemoe.kv.pictures import PictureTokens
from edgemoe.storage.files.untrusted import foreign_code

Prompt = str | Sequence[Message] | Sequence[int]
"""Text that is continued as it is; messages {"role": ..., "content": ...}, put into the chat template; or token ids.
Content is text, or a list of parts {"type": "text", "text": ...} and pictures (edgemoe.api.pictures.bytes_of)."""


class Prompts:
    """Makes token ids of prompts for one model. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        engine: the engine that computes them.

    Attributes:
        pictures: the pictures of messages.
    """

    def __init__(self, tokenizer: Any, engine: Engine) -> None:
        self._tokenizer = tokenizer
        self.pictures = ModelPictures(engine.store, engine.plan.minimum_vram_bytes)

    def encode(self, prompt: Prompt, template: Mapping[str, object] | None = None) -> list[int]:
        """Returns the token ids of a prompt (Model.encode).

        Raises:
            UserError: it is neither text nor messages nor token ids; a picture is refused.
        """
        if isinstance(prompt, str):
            with foreign_code("a tokenizer and a tokenizer_config.json that encode text"):
                return list(self._tokenizer(prompt, verbose=False)["input_ids"])
        if isinstance(prompt, PictureTokens):
            return PictureTokens(prompt, prompt.pictures)
        if isinstance(prompt, Sequence):
            tokens = [int(part) for part in prompt if isinstance(part, Integral)]
            messages = [part for part in prompt if isinstance(part, Mapping)]
            if len(tokens) == len(prompt):
                return tokens
            if len(messages) == len(prompt):
                plain, found = self.pictures.split(messages)
                return self.pictures.placed(encode_chat(self._tokenizer, plain, template or {}), found)
        raise UserError(
            "a text, a list of messages or a list of token ids as the prompt",
            with_type(prompt)[:200],
            'give for example "Hello" or [{"role": "user", "content": "Hello"}]',
        )
