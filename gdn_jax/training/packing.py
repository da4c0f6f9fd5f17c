"""Rows of text for each step: a function of the seed, the step and the corpus, and of nothing else.

A domain's stream is its epochs one after the other; an epoch is all its documents once, in an order drawn for it. Rows
are consecutive slices of a stream, so a document cut at a row's end goes on in the domain's next row. Which domain a
row is drawn from follows a fixed cycle, in which every domain comes in proportion to its weight and evenly spread: so
the place of any row in its domain's stream is known without looking at the rows before it.

With T = 4 and documents a b of lengths 3 and 6, the stream is a a a b | b b b b | b ..., and the rows' documents are
0 0 0 1 and 0 0 0 0.
"""

import zlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int, Integer

from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.corpus import Corpus, DomainTokens

_CYCLE = 1024  # rows; weights are rounded to shares of it


class DomainStream:
    """The endless stream of one domain's tokens, read at any place."""

    def __init__(self, tokens: DomainTokens, key: tuple[int, ...]) -> None:
        """Wrap a domain.

        Args:
            tokens: of the domain.
            key: seeds the orders of its epochs.
        """
        self._tokens = tokens
        self._key = key
        self._lengths = np.diff(tokens.starts)
        self._orders: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.epoch_tokens = int(tokens.starts[-1])

    def row(self, start: int, length: int) -> tuple[Integer[np.ndarray, "T"], Int[np.ndarray, "T"]]:
        """Return tokens `start : start + length` of the stream, and which document of the row each belongs to."""
        ids, documents, first = [], [], 0
        while length:
            epoch, offset = divmod(start, self.epoch_tokens)
            count = min(length, self.epoch_tokens - offset)
            part, document = self._slice(epoch, offset, count)
            ids.append(part)
            documents.append(document + first)
            first += int(document[-1]) + 1
            start, length = start + count, length - count
        return np.concatenate(ids), np.concatenate(documents)

    def _slice(self, epoch: int, offset: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        order, borders = self._order(epoch)
        first = int(np.searchsorted(borders, offset, side="right")) - 1
        last = int(np.searchsorted(borders, offset + count, side="left"))
        # Tokens of each of the documents first:last that lie inside, and what leads from the epoch's to the corpus'.
        inside = np.diff(np.clip(borders[first : last + 1], offset, offset + count))
        shift = self._tokens.starts[order[first:last]] - borders[first:last]
        ids = self._tokens.tokens[np.arange(offset, offset + count) + np.repeat(shift, inside)]
        return ids, np.repeat(np.arange(last - first, dtype=np.int32), inside)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the epoch's documents in order, and where each begins in the epoch."""
        if epoch not in self._orders:
            order = np.random.default_rng([*self._key, epoch]).permutation(len(self._lengths))
            borders = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths[order])])
            self._orders = {epoch: (order, borders), **dict(list(self._orders.items())[:1])}  # a row spans two
        return self._orders[epoch]


class Packer:
    """Makes the batch of any step."""

    def __init__(
        self, domains: Mapping[str, DomainTokens], weights: Mapping[str, float], *, rows: int, length: int, seed: int
    ) -> None:
        """Prepare the streams.

        Args:
            domains: tokens of each domain.
            weights: share of the rows drawn from each domain.
            rows: of one step.
            length: T, tokens of a row.
            seed: of the orders of documents.
        """
        self._rows, self._length, self._seed = rows, length, seed
        self._streams = [DomainStream(tokens, (seed, zlib.crc32(name.encode()))) for name, tokens in domains.items()]
        self._cycle = _cycle(np.array([weights[name] for name in domains]))
        ones = self._cycle[:, None] == np.arange(len(self._streams))
        self._before = np.concatenate([np.zeros((1, ones.shape[1]), np.int64), np.cumsum(ones, axis=0)])

    def batch(self, step: int) -> TrainBatch:
        """Return the rows of a step, counted from 0, as NumPy arrays."""
        both = np.empty((2, self._rows, self._length), np.int32)
        # Shuffled within the step: who takes its first rows only would else see the same places of the cycle each time.
        order = np.random.default_rng([self._seed, step]).permutation(self._rows)
        for index in range(self._rows):
            cycles, place = divmod(step * self._rows + index, len(self._cycle))
            domain = self._cycle[place]
            nth = cycles * int(self._before[-1, domain]) + int(self._before[place, domain])
            both[0, order[index]], both[1, order[index]] = self._streams[domain].row(nth * self._length, self._length)
        return TrainBatch(token_ids=both[0], document=both[1])


def _cycle(weights: np.ndarray) -> np.ndarray:
    """Return which domain each row of a cycle is drawn from, every domain at least once and evenly spread."""
    shares = weights / weights.sum() * _CYCLE
    counts = np.maximum(np.floor(shares), 1).astype(np.int64)
    for domain in np.argsort(counts - shares, kind="stable")[: max(_CYCLE - int(counts.sum()), 0)]:
        counts[domain] += 1
    # The k-th of n rows wants to stand at (k + 1/2) / n of the cycle.
    wanted = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return np.repeat(np.arange(len(counts)), counts)[np.argsort(wanted, kind="stable")]


def held_out_batches(corpus: Corpus, domain: str, *, rows: int, length: int, most_tokens: int) -> list[TrainBatch]:
    """Return a domain's held-out documents, in order and each token at most once, in batches of one shape.

    The last row is padded with documents of one token, which have no target.

    Args:
        corpus: the text.
        domain: which.
        rows: of a batch.
        length: T, tokens of a row.
        most_tokens: read no more than the full rows that this many fill, but at least one row.
    """
    part = corpus.held_out[domain]
    used = min(len(part.tokens), max(most_tokens // length, 1) * length)
    num_rows = -(-used // (rows * length)) * rows
    ids = np.full(num_rows * length, corpus.end_token, np.int32)
    ids[:used] = part.tokens[:used]
    document = np.arange(len(ids)) + len(part.starts)  # no two alike: padding
    document[:used] = np.searchsorted(part.starts, np.arange(used), side="right")
    ids, document = ids.reshape(-1, rows, length), document.reshape(-1, rows, length)
    # Counted from 0 in each row, without gaps.
    steps = np.diff(document, axis=-1, prepend=document[..., :1]) != 0
    document = np.cumsum(steps, axis=-1).astype(np.int32)
    return [TrainBatch(token_ids=ids[index], document=document[index]) for index in range(len(ids))]
