"""An n-gram model with interpolated, modified Kneser-Ney smoothing: what a trained model has to beat.

    P_n(w | h) = max(c(hw) - D_n(c(hw)), 0) / c(h) + (D1 N1(h) + D2 N2(h) + D3 N3(h)) / c(h) P_{n-1}(w | h')

c counts occurrences at the highest order, and different left neighbours below it; h' is h without its oldest token; N1,
N2 and N3 count the words that followed h once, twice and more often; P_0 is uniform (Chen and Goodman 1999, section
4.1.6). A document stands alone: its first tokens have pads before them, which are never predicted.

An n-gram is one integer, so the order times the bits of a token id must fit in 63.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Tokens = np.ndarray  # int64 [T]


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Counts of all n-grams of one order, sorted.

    Attributes:
        keys: the n-grams as integers, ascending.
        counts: how often each stands, or how many left neighbours it has.
        discounts: taken from counts of 1, of 2 and of 3 or more.
        sums: four running sums from 0 on: of the counts, and of how many counts are 1, 2, and 3 or more.
    """

    keys: np.ndarray
    counts: np.ndarray
    discounts: tuple[float, float, float]
    sums: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class NgramModel:
    """Probabilities of tokens after the `order - 1` before them."""

    def __init__(self, documents: Iterable[Tokens], *, order: int, vocab_size: int, pad: int) -> None:
        """Count.

        Args:
            documents: token ids of each, with its end token.
            order: tokens of an n-gram, at least 1.
            vocab_size: number of token ids.
            pad: the id that stands before a document's first token; elsewhere only documents may end with it.

        Raises:
            ValueError: n-grams of this order do not fit in an integer, or there is no token.
        """
        self.order, self.vocab_size, self.pad = order, vocab_size, pad
        self._bits = int(vocab_size - 1).bit_length()
        if order * self._bits > 63:
            raise ValueError(f"an n-gram must fit in 63 bits; got {order} tokens of {self._bits} bits; lower the order")
        keys, counts = np.unique(self._ngrams(documents), return_counts=True)
        if keys.size == 0:
            raise ValueError("an n-gram model needs some text; got none")
        orders = []
        for length in range(order, 0, -1):
            orders.append(_make_order(keys, counts))
            mask = (1 << (self._bits * (length - 1))) - 1
            keys, counts = np.unique(keys & mask, return_counts=True)  # each different n-gram is one left neighbour
        self._orders = orders[::-1]

    def nats(self, documents: Iterable[Tokens], *, skip: int = 0) -> tuple[float, int]:
        """Return the sum of -log P over the tokens of documents, and their number.

        Args:
            documents: token ids of each.
            skip: tokens at the start of each document that are seen, but not counted.
        """
        documents = [np.asarray(document, np.int64) for document in documents]
        kept = [np.arange(len(document)) >= skip for document in documents]
        if not documents:
            return 0.0, 0
        ngrams = self._ngrams(documents)[np.concatenate(kept)]
        return float(-np.log(self.probabilities(ngrams)).sum()), len(ngrams)

    def probabilities(self, ngrams: np.ndarray) -> np.ndarray:
        """Return P(last token | the others) of n-grams of the model's order, as integers."""
        probability = np.full(ngrams.shape, 1.0 / self.vocab_size)
        for length, counted in enumerate(self._orders, start=1):
            probability = self._interpolate(counted, ngrams & ((1 << (self._bits * length)) - 1), probability)
        return probability

    def pack(self, tokens: Iterable[int]) -> int:
        """Return an n-gram of up to the model's order as an integer, pads before it."""
        key = 0
        for token in [self.pad] * self.order + [int(token) for token in tokens]:
            key = (key << self._bits | token) & ((1 << (self._bits * self.order)) - 1)
        return key

    def _interpolate(self, counted: _Order, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
        context = keys >> self._bits << self._bits
        low = np.searchsorted(counted.keys, context)
        high = np.searchsorted(counted.keys, context + ((1 << self._bits) - 1), side="right")  # + 1 may not fit
        total, *kinds = (running[high] - running[low] for running in counted.sums)
        at = np.minimum(np.searchsorted(counted.keys, keys), len(counted.keys) - 1)
        count = np.where(counted.keys[at] == keys, counted.counts[at], 0)
        kept = np.maximum(count - np.array([0.0, *counted.discounts])[np.minimum(count, 3)], 0.0)
        given = sum(discount * kind for discount, kind in zip(counted.discounts, kinds, strict=True))
        return np.where(total > 0, (kept + given * lower) / np.maximum(total, 1), lower)

    def _ngrams(self, documents: Iterable[Tokens]) -> np.ndarray:
        """Return the n-gram that ends at each token of each document."""
        pads = np.full(self.order - 1, self.pad, np.int64)
        parts, is_token = [], []
        for document in documents:
            parts += [pads, np.asarray(document, np.int64)]
            is_token += [np.zeros(len(pads), bool), np.ones(len(document), bool)]
        if not parts:
            return np.zeros(0, np.int64)
        stream = np.concatenate(parts)
        keys = np.zeros(len(stream), np.int64)
        for back in range(self.order):
            keys[back:] |= stream[: len(stream) - back] << (self._bits * back)
        return keys[np.concatenate(is_token)]


def _make_order(keys: np.ndarray, counts: np.ndarray) -> _Order:
    n1, n2, n3, n4 = (max(int(np.count_nonzero(counts == n)), 1) for n in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    discounts = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    kinds = (counts, counts == 1, counts == 2, counts >= 3)
    return _Order(
        keys=keys,
        counts=counts,
        discounts=tuple(float(np.clip(d, 0.0, n)) for n, d in enumerate(discounts, start=1)),
        sums=tuple(np.concatenate([[0], np.cumsum(kind, dtype=np.int64)]) for kind in kinds),
    )
