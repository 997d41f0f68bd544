"""Grammars compiled for a model's vocabulary, and followed token by token, in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from edgemoe.errors import UserError
from edgemoe.grammar.confined import Cancellation, Connection, VocabularyProcess
from edgemoe.grammar.process import COMPILE_SECONDS, GRAMMAR_BYTES, GUESSES, TOKEN_SECONDS
from edgemoe.machine.packages import install_extra
from edgemoe.storage.files.untrusted import foreign_code

PACKAGE = "llguidance"

_COMPILING = f"{COMPILE_SECONDS} s of computing and {GRAMMAR_BYTES >> 20} MiB to compile"

_FOLLOWING = f"{TOKEN_SECONDS} s of computing for a token and {GRAMMAR_BYTES >> 20} MiB for an answer"


class Vocabulary:
    """A model's tokens as grammars read them. A table of 152,000 words takes some seconds, and 84 MB of a process.

    Args:
        tokenizer: a fast tokenizer of transformers.
        words: number of the model's logits; the tokenizer may have more or fewer tokens. Logits without a token are
            never allowed.
        ends: token ids that end an answer.

    Attributes:
        process: starts the processes of grammars.

    Raises:
        UserError: llguidance is missing, or no token ends an answer.
        ModelRefused: the tokenizer has no form that llguidance reads.
    """

    def __init__(self, tokenizer: Any, words: int, ends: frozenset[int]) -> None:
        if find_spec(PACKAGE) is None:
            raise UserError("the packages of grammars", f"no {PACKAGE}", f"run {install_extra('serve')}")
        if not ends:
            raise UserError("a model with a token that ends an answer", "none", "leave the schema out")
        self.words, self._ends, self._tokenizer = words, ends, tokenizer
        with foreign_code("a tokenizer whose tokens are texts of bytes"):
            table = max(words, *(number + 1 for number in tokenizer.get_vocab().values()))
            added = {str(text): int(token) for text, token in tokenizer.get_added_vocab().items()}
        self.process = VocabularyProcess(self._written, table, sorted(ends), list(added.values()))
        self._added = added
        self.process.begin()

    @cached_property
    def specials(self) -> dict[str, int]:
        """Text -> id of the tokens that plain text does not match.

        Raises:
            UserError: llguidance cannot read the tokenizer.
        """
        special = set(self.process.special())
        return {text: token for text, token in self._added.items() if token in special}

    def is_end(self, token: int) -> bool:
        """Whether the token ends an answer."""
        return token in self._ends

    def _written(self) -> str:
        with foreign_code("a tokenizer whose tokens are texts of bytes"):
            fast = copy(self._tokenizer.backend_tokenizer)
            fast.no_padding()
            fast.no_truncation()
            return str(fast.to_str())


class Grammar:
    """A compiled grammar, for any number of answers. Its process ends with it. Thread-safe.

    Args:
        vocabulary: the vocabulary of the model.
        text: the text of the grammar (edgemoe.grammar.lark).
        cancellation: ends the compilation from another thread.

    Attributes:
        bytes: memory that the compiled grammar takes in its process.

    Raises:
        UserError: it cannot be enforced, or compiling it takes more time or memory than there is for one.
        Cancelled: it was cancelled.
    """

    def __init__(self, vocabulary: Vocabulary, text: str, cancellation: Cancellation | None = None) -> None:
        self.vocabulary, wanted = vocabulary, cancellation or Cancellation()
        self._process = vocabulary.process.start()
        wanted.watch(self._process)
        try:
            self._process.send(text.encode())
            self.bytes = int(self._process.receive(_COMPILING))
        finally:
            wanted.watch(None)

    @property
    def ended(self) -> bool:
        """Whether the system has ended the grammar's process."""
        return self._process.ended

    def start(self) -> Connection:
        """Returns a connection to a process that follows one answer."""
        return self._process.start()


class Matcher:
    """The state of one answer under a grammar: a logits processor of transformers.

    Its process starts with the first mask, and computes the next one as soon as it has a token.

    Args:
        grammar: the grammar of the answer.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._process: Connection | None = None
        self._mask: np.ndarray[Any, np.dtype[np.bool_]] | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns float32 scores [1, vocab] with -inf for each token that cannot come next.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        allowed = torch.from_numpy(self.allowed())
        return scores.masked_fill(~allowed[: scores.shape[-1]], -torch.inf)

    def allowed(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Bool [vocab]: the tokens that can come next; one that ends the answer only where the grammar may end.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        if self._process is None:
            self._process = self._grammar.start()
        if self._mask is None:
            bits = np.frombuffer(self._process.receive(_FOLLOWING), np.uint8)
            count = self._grammar.vocabulary.words
            self._mask = np.unpackbits(bits, bitorder="little", count=count).view(np.bool_)
        return self._mask

    def first_allowed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the first of some tokens, as far as they can come next, one after another; the state stays.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        words = self._grammar.vocabulary.words
        if not (tokens and tokens[0] < words and self.allowed()[tokens[0]]):
            return []
        assert self._process is not None
        self._process.send(b"".join(token.to_bytes(4, "little") for token in tokens) + GUESSES)
        return tokens[: int(self._process.receive(_FOLLOWING))]

    def take(self, token: int) -> None:
        """Goes on after a token that was chosen.

        Raises:
            UserError: the grammar is too complex to follow.
        """
        self.allowed()
        self._mask = None
        assert self._process is not None
        self._process.send(token.to_bytes(4, "little"))
