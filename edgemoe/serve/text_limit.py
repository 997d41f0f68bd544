"""A bound on the characters of a prompt, so that a text far beyond the context is refused before it is tokenized.

Tokenizing takes some hundred bytes of memory for each byte of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgemoe.errors import ContextExceeded
from edgemoe.serve.errors import ApiError
from edgemoe.storage.files.untrusted import foreign_code


class TextLimit:
    """Refuses texts that have more characters than the context has places for the longest token.

    Args:
        tokenizer: the tokenizer of the model.
        context: largest number of tokens of a sequence.
    """

    def __init__(self, tokenizer: Any, context: int) -> None:
        with foreign_code("a tokenizer with a vocabulary"):
            longest = max(map(len, tokenizer.get_vocab()), default=1)
        self._context, self.characters = context, context * longest

    def require_chat(self, messages: Sequence[Mapping[str, object]], template: Mapping[str, object]) -> None:
        """Counts the characters of messages and of the chat template's other variables.

        Roles and names of a message's own fields do not count: a template may write them as less. Pictures have a bound
        of their own (edgemoe.vision.reader).

        Raises:
            ContextExceeded: they are more than a prompt can have.
        """
        texts = [_words(value) for message in messages for name, value in message.items() if name != "role"]
        self.require(texts, dict(template))

    def require(self, *values: object) -> None:
        """Counts the characters of all texts in JSON values.

        Raises:
            ContextExceeded: they are more than a prompt can have.
        """
        count = sum(map(_characters, values))
        if count > self.characters:
            wanted = (
                f"a prompt of at most {self._context} tokens, which have at most {self.characters} characters"
            )
            raise ContextExceeded(wanted, f"{count} characters", "send a shorter one, or raise --context")


def require_known(tokens: Sequence[int], vocab: int, param: str) -> None:
    """Raises ApiError, naming the field, where a token id is none of the model's."""
    wrong = next((token for token in tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        message = f"expected token ids of 0 to {vocab - 1}, got {wrong}: leave it out"
        raise ApiError(400, message, param=param)


def _words(value: object) -> object:
    """A field of a message without its pictures."""
    if not isinstance(value, list):
        return value
    return [part for part in value if not (isinstance(part, dict) and part.get("type") == "image_url")]


def _characters(value: object) -> int:
    """Characters of all texts in a JSON value, names of fields included."""
    count, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            count += len(one)
        elif isinstance(one, dict):
            count += sum(map(len, one))
            waiting += one.values()
        elif isinstance(one, list):
            waiting += [each for each in one if isinstance(each, (str, dict, list))]
    return count
