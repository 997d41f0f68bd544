"""Grammars compiled for a model's vocabulary, and followed token by token."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.grammar.schema import refused
from edgemoe.storage.files.untrusted import foreign_code

if TYPE_CHECKING:
    from llguidance import LLMatcher

PACKAGE = "llguidance"

MOST_ITEMS = 10_000
"""Of the parser in a row: an object of 2,000 optional properties."""

MOST_LEXER_STATES = 20_000
"""Of a grammar, 1 to 2 kB each."""


class Vocabulary:
    """A model's tokens as grammars read them. Made once a model: a table of 152,000 words takes some seconds and 84 MB.

    Args:
        tokenizer: a fast tokenizer of transformers.
        words: number of the model's logits; the tokenizer may have more or fewer tokens. Logits without a token are
            never allowed.
        ends: token ids that end an answer.

    Raises:
        UserError: llguidance is missing, or no token ends an answer.
        ModelRefused: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any, words: int, ends: frozenset[int]) -> None:
        if find_spec(PACKAGE) is None:
            raise UserError(
                "the packages of edgemoe[serve]", f"no {PACKAGE}", "run pip install 'edgemoe[serve]'"
            )
        if not ends:
            raise UserError("a model with a token that ends an answer", "none", "leave the schema out")
        with foreign_code("a tokenizer whose tokens are texts of bytes"):
            from llguidance.hf import from_tokenizer

            table = max(words, *(number + 1 for number in tokenizer.get_vocab().values()))
            self.table = from_tokenizer(tokenizer, n_vocab=table, eos_token=sorted(ends))
            added = {str(text): int(token) for text, token in tokenizer.get_added_vocab().items()}
        self.words, self._ends = words, ends
        self.specials = {text: token for text, token in added.items() if self.table.is_special_token(token)}

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return token in self._ends


class Grammar:
    """A compiled grammar, for any number of answers. Thread-safe.

    Args:
        vocabulary: the vocabulary of the model.
        text: the text of the grammar (edgemoe.grammar.lark).

    Raises:
        UserError: it cannot be enforced, or is too large.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            max_items_in_row=MOST_ITEMS, max_lexer_states=MOST_LEXER_STATES, verbose_errors=False
        )
        self.vocabulary = vocabulary
        self._first = LLMatcher(
            vocabulary.table, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits
        )
        Matcher(self).allowed()

    def start(self) -> LLMatcher:
        """A state before the first token."""
        return self._first.deep_copy()


class Matcher:
    """The state of one answer under a grammar: a logits processor of transformers.

    Args:
        grammar: the grammar of the answer.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._vocabulary, self._state = grammar.vocabulary, grammar.start()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores [1, vocab] with -inf for each token that cannot come next.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        allowed = torch.from_numpy(self.allowed())
        return scores.masked_fill(~allowed[: scores.shape[-1]], -torch.inf)

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Bool [vocab]: the tokens that can come next; one that ends the answer only where the grammar may end."""
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            found = " ".join(self._state.get_error().split())
            if found.startswith("NoExtension"):
                found = "one that no answer can have"
            raise refused("a JSON schema that can be enforced", found[:300])
        return np.unpackbits(bits, bitorder="little", count=self._vocabulary.words).view(np.bool_)

    def take(self, token: int) -> None:
        """Goes on behind a token that was chosen."""
        self._state.consume_token(token)
