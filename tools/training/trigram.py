"""A trigram model: the baseline that puts a neural network's perplexity into proportion."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tools.training.batches import Batch

Array = np.ndarray

DISCOUNT = 0.75
"""Subtracted from every count and given to the shorter context: interpolated absolute discounting (Ney et al. 1994)."""


class _Order:
    """Counts of n-grams by context.

    Args:
        contexts: int64 [n], a number for each context.
        words: int64 [n], the word after each context.
        vocabulary: number of words.
    """

    def __init__(self, contexts: Array, words: Array, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._grams, self._counts = np.unique(contexts * vocabulary + words, return_counts=True)
        owners = self._grams // vocabulary
        self._contexts, first, self._kinds = np.unique(owners, return_index=True, return_counts=True)
        self._totals = np.add.reduceat(self._counts, first)

    def blend(self, contexts: Array, words: Array, shorter: Array) -> Array:
        """Probabilities float64 [m] of words int64 [m] in contexts int64 [m]; `shorter`: in the shorter contexts."""
        at = np.searchsorted(self._contexts, contexts).clip(max=len(self._contexts) - 1)
        seen = self._contexts[at] == contexts
        grams = contexts * self._vocabulary + words
        gram_at = np.searchsorted(self._grams, grams).clip(max=len(self._grams) - 1)
        counts = np.where(self._grams[gram_at] == grams, self._counts[gram_at], 0)
        totals = np.maximum(self._totals[at], 1)
        own = np.maximum(counts - DISCOUNT, 0) / totals
        left = DISCOUNT * self._kinds[at] / totals
        return np.where(seen, own + left * shorter, shorter)


class Trigram:
    """Counts of one, two and three tokens in a row.

    Args:
        texts: int [tokens] each; no n-gram spans two texts.
        vocabulary: number of tokens; as a token this number means "before the start".
    """

    def __init__(self, texts: Sequence[Array], vocabulary: int) -> None:
        self._width = vocabulary + 1
        wide = [np.concatenate([[vocabulary, vocabulary], text.astype(np.int64)]) for text in texts]
        third = np.concatenate([w[2:] for w in wide])
        second, first = np.concatenate([w[1:-1] for w in wide]), np.concatenate([w[:-2] for w in wide])
        self._single = (np.bincount(third, minlength=self._width) + 1) / (len(third) + self._width)
        self._pairs = _Order(second, third, self._width)
        self._triples = _Order(first * self._width + second, third, self._width)

    def probabilities(self, first: Array, second: Array, third: Array) -> Array:
        """Probabilities float64 [m] of `third` after `first` and `second`, int64 [m] each."""
        shorter = self._pairs.blend(second, third, self._single[third])
        return self._triples.blend(first * self._width + second, third, shorter)

    def loss(self, batches: Sequence[Batch]) -> float:
        """The mean loss of the counted tokens in nats; contexts end at the start of a row or conversation."""
        nats, counted_tokens = 0.0, 0
        for batch in batches:
            tokens, positions = batch.tokens.numpy(), batch.positions.numpy()
            rows, columns = np.nonzero(batch.counted.numpy()[:, 1:])
            columns = columns + 1
            third, second = tokens[rows, columns], tokens[rows, columns - 1]
            before = tokens[rows, np.maximum(columns - 2, 0)]
            first = np.where(positions[rows, columns] >= 2, before, self._width - 1)
            nats -= float(np.log(self.probabilities(first, second, third)).sum())
            counted_tokens += len(rows)
        return nats / counted_tokens
