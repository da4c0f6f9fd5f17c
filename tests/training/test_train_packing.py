"""Rows of text: every token of an epoch once, borders where documents begin, and nothing but seed and step counts."""

import numpy as np
import pytest

from gdn_jax.training.batch import TrainBatch
from gdn_jax.training.corpus import Corpus, DomainTokens
from gdn_jax.training.packing import DomainStream, Packer, held_out_batches
from gdn_jax.training.prefetch import prefetched

T = 16


def make_domain(seed: int, *, num_documents: int = 23, first: int = 0) -> DomainTokens:
    """Return documents whose tokens are all different, so that a token says where it stood."""
    lengths = np.random.default_rng(seed).integers(1, 40, num_documents)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return DomainTokens(tokens=np.arange(first, first + starts[-1], dtype=np.int32), starts=starts)


@pytest.fixture
def domains() -> dict[str, DomainTokens]:
    return {"a": make_domain(1), "b": make_domain(2, first=10_000)}


def make_packer(domains: dict[str, DomainTokens], *, seed: int = 5, rows: int = 6) -> Packer:
    return Packer(domains, {"a": 3.0, "b": 1.0}, rows=rows, length=T, seed=seed)


def true_documents(domain: DomainTokens, ids: np.ndarray) -> np.ndarray:
    return np.searchsorted(domain.starts, ids - domain.tokens[0], side="right") - 1


def test_an_epoch_has_every_token_once_in_an_order_of_its_own():
    domain = make_domain(3)
    stream = DomainStream(domain, (0,))
    size = stream.epoch_tokens
    first, second = (stream.row(epoch * size, size)[0] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(domain.tokens)
    assert not np.array_equal(first, second)
    assert sorted(np.concatenate([stream.row(start, 7)[0] for start in range(0, 7 * size, 7)])) == sorted(
        np.tile(domain.tokens, 7)
    )


def test_rows_are_consecutive_slices_and_read_the_same_in_any_order():
    domain = make_domain(4)
    stream, fresh = DomainStream(domain, (1,)), DomainStream(domain, (1,))
    whole = stream.row(0, 40 * T)[0]
    for index in (39, 0, 17, 1):
        assert np.array_equal(fresh.row(index * T, T)[0], whole[index * T : (index + 1) * T])


def test_document_numbers_change_exactly_where_documents_do(domains):
    packer = make_packer(domains)
    for step in range(20):
        batch = packer.batch(step)
        for ids, document in zip(batch.token_ids, batch.document, strict=True):
            true = true_documents(domains["a" if ids[0] < 10_000 else "b"], ids)
            assert document[0] == 0
            assert set(np.diff(document)) <= {0, 1}
            changes = (np.diff(true) != 0) | (
                np.diff(ids) != 1
            )  # the same document again, in the next epoch, is another
            assert np.array_equal(np.diff(document) == 1, changes)


def test_domains_come_in_proportion_and_evenly_spread(domains):
    packer = make_packer(domains, rows=8)
    of_b = np.array([(packer.batch(step).token_ids[:, 0] >= 10_000).sum() for step in range(128)])
    assert of_b.sum() == 256
    assert set(of_b) <= {1, 2, 3}


def test_steps_of_all_rows_cover_a_domain_without_gaps(domains):
    packer = make_packer(domains)
    rows = np.concatenate([packer.batch(step).token_ids for step in range(200)])
    of_a = rows[rows[:, 0] < 10_000].ravel()
    seen = np.bincount(of_a, minlength=len(domains["a"].tokens))
    assert seen.min() >= 10
    assert seen.max() - seen.min() <= 1


def test_a_batch_is_a_function_of_seed_and_step(domains):
    one, other = make_packer(domains), make_packer(domains)
    late = one.batch(7)
    for step in (9, 3, 7):
        batch = other.batch(step)
    assert np.array_equal(batch.token_ids, late.token_ids)
    assert np.array_equal(batch.document, late.document)
    assert not np.array_equal(make_packer(domains, seed=6).batch(7).token_ids, late.token_ids)
    assert not np.array_equal(one.batch(8).token_ids, late.token_ids)


def test_prefetched_batches_equal_those_made_one_by_one(domains):
    packer, fresh = make_packer(domains), make_packer(domains)
    with prefetched(packer.batch, 2, 9) as batches:
        steps = list(batches)
    assert len(steps) == 7
    for step, batch in enumerate(steps, 2):
        assert np.array_equal(batch.token_ids, fresh.batch(step).token_ids)
        assert np.array_equal(batch.document, fresh.batch(step).document)


def test_a_failure_in_the_thread_reaches_the_loop_and_an_early_end_leaves_no_thread():
    def make(step: int) -> TrainBatch:
        if step == 3:
            raise ValueError("broken row")
        return TrainBatch(token_ids=np.zeros((1, T), np.int32), document=np.zeros((1, T), np.int32))

    with prefetched(make, 0, 10**9) as batches, pytest.raises(ValueError, match="broken row"):
        for _ in batches:
            pass


@pytest.mark.parametrize("most_tokens", [1, 3 * T, 10**6])
def test_held_out_rows_hold_the_beginning_once_and_padding_has_no_target(domains, most_tokens):
    corpus = Corpus(train={}, held_out=domains, end_token=7)
    batches = held_out_batches(corpus, "b", rows=4, length=T, most_tokens=most_tokens)
    ids = np.concatenate([batch.token_ids for batch in batches])
    document = np.concatenate([batch.document for batch in batches])
    used = min(max(most_tokens // T, 1) * T, len(domains["b"].tokens))
    assert len(ids) % 4 == 0
    assert np.array_equal(ids.ravel()[:used], domains["b"].tokens[:used])
    assert set(ids.ravel()[used:]) <= {7}
    flat = np.arange(ids.size).reshape(ids.shape)
    same = document[:, 1:] == document[:, :-1]
    true = true_documents(domains["b"], np.where(flat < used, ids, 10_000))
    assert np.array_equal(same, (true[:, 1:] == true[:, :-1]) & (flat[:, 1:] < used))
    assert not document[:, 0].any()
