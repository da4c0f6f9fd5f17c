"""The n-gram model that the trained one is compared with: a distribution, and the sums that define it."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.ngram import NgramModel

VOCAB, PAD = 7, 6
RNG = np.random.RandomState(0)
DOCUMENTS = [RNG.choice(VOCAB, size=n, p=[0.4, 0.2, 0.15, 0.1, 0.1, 0.05, 0.0]) for n in (40, 1, 25, 60)]


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_sum_to_one_after_any_context(order):
    model = NgramModel(DOCUMENTS, order=order, vocab_size=VOCAB, pad=PAD)
    for context in ([], [0], [0, 1], [5, 5, 5, 5], [6, 6], [2, 0, 0, 1]):
        ngrams = np.array([model.pack([*context, word]) for word in range(VOCAB)])
        probabilities = model.probabilities(ngrams)
        assert probabilities.min() > 0.0  # also of the token that no document has
        np.testing.assert_allclose(probabilities.sum(), 1.0, rtol=1e-12)


def by_hand(order: int, history: tuple[int, ...], word: int) -> float:
    """Compute P(word | history) from dictionaries; `history` has order - 1 tokens."""
    counts = Counter()
    for document in DOCUMENTS:
        padded = [PAD] * 2 + document.tolist()
        counts.update(tuple(padded[i - 2 : i + 1]) for i in range(2, len(padded)))
    for _ in range(3 - order):
        counts = Counter(ngram[1:] for ngram in counts)
    n1, n2, n3, n4 = (max(sum(c == n for c in counts.values()), 1) for n in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    discount = [0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
    discount = [min(max(d, 0), n) for n, d in enumerate(discount)]
    lower = 1 / VOCAB if order == 1 else by_hand(order - 1, history[1:], word)
    after = {ngram[-1]: c for ngram, c in counts.items() if ngram[:-1] == history}
    if not after:
        return lower
    taken = {c: discount[min(c, 3)] for c in after.values()}
    kept = max(after.get(word, 0) - taken.get(after.get(word, 0), 0), 0)
    return (kept + sum(taken[c] for c in after.values()) * lower) / sum(after.values())


def test_probabilities_equal_those_of_the_formula():
    model = NgramModel(DOCUMENTS, order=3, vocab_size=VOCAB, pad=PAD)
    for history in ((0, 0), (1, 0), (PAD, 3), (PAD, PAD), (5, 5), (4, 0)):
        for word in range(VOCAB):
            ngram = np.array([model.pack([*history, word])])
            np.testing.assert_allclose(model.probabilities(ngram)[0], by_hand(3, history, word), rtol=1e-12)


def test_nats_are_the_sum_over_documents_that_know_nothing_of_each_other():
    model = NgramModel(DOCUMENTS, order=3, vocab_size=VOCAB, pad=PAD)
    new = [np.array([0, 1, 2, 0]), np.array([3]), np.array([1, 1])]
    total, number = model.nats(new)
    alone = [model.nats([document]) for document in new]
    assert number == 7
    np.testing.assert_allclose(total, sum(nats for nats, _ in alone), rtol=1e-12)
    skipped, number = model.nats(new, skip=1)
    assert number == 4
    first = sum(-np.log(model.probabilities(np.array([model.pack(d[:1])]))[0]) for d in new)
    np.testing.assert_allclose(total - skipped, first, rtol=1e-12)


def test_all_63_bits_may_be_used():
    """The last context's n-grams end at the largest integer there is, and count like any others."""
    last = (1 << 21) - 1
    one, other = (NgramModel([np.array([token] * 6)], order=3, vocab_size=1 << 21, pad=0) for token in (last, 1))
    assert one.pack([last] * 3) == 2**63 - 1
    found, wanted = (model.probabilities(np.array([model.pack([t] * 3)])) for model, t in ((one, last), (other, 1)))
    np.testing.assert_array_equal(found, wanted)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="63 bits"):
        NgramModel(DOCUMENTS, order=5, vocab_size=8192, pad=0)
    with pytest.raises(ValueError, match="some text"):
        NgramModel([], order=2, vocab_size=VOCAB, pad=PAD)
