"""Token choice against exact distributions and a NumPy oracle; independence of rows; log probabilities; seeds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax, softmax
from scipy.stats import chisquare

from gdn_jax.serving.runner.sampling import (
    RowSampling,
    derive_seed,
    filter_logits,
    gumbel_noise,
    pack_rows,
    samplable,
    sample_tokens,
    sibling_seed,
    token_logprobs,
)
from gdn_jax.serving.sampling_params import SamplingParams

LEAST_P_VALUE = 1e-3  # seeds are fixed, so this decides once; a wrong distribution gives p far below 1e-6 here
ROWS, WINDOW, VOCAB = 8, 32, 300  # one shape for most tests, compiled once
FILTER_ROWS, FILTER_VOCAB = 16, 80
sample = jax.jit(sample_tokens)
filtered = jax.jit(filter_logits)
noise_of = jax.jit(gumbel_noise, static_argnums=2)
logprobs = jax.jit(token_logprobs, static_argnames=("num_top", "num_valid_tokens"))


def choose(logits: np.ndarray, rows: list[RowSampling], position: np.ndarray, num_valid_tokens: int) -> np.ndarray:
    """Return the tokens of [rows, window, V] logits, padded to the common shape with what must not matter."""
    num_rows, window, vocab = logits.shape
    padded = np.full((ROWS, WINDOW, VOCAB), 7.0, np.float32)
    padded[:num_rows, :window, :vocab] = logits
    places = np.zeros((ROWS, WINDOW), np.int32)
    places[:num_rows, :window] = position
    inputs = pack_rows(rows, num_rows=ROWS, num_banned=3)
    tokens = sample(jnp.asarray(padded), inputs, jnp.asarray(places), num_valid_tokens=num_valid_tokens)
    return np.asarray(tokens)[:num_rows, :window]


def keep(logits: np.ndarray, rows: list[RowSampling]) -> np.ndarray:
    """Return the filtered [rows, V] logits, computed in the common shape of the filter tests."""
    num_rows, vocab = logits.shape
    padded = np.full((FILTER_ROWS, FILTER_VOCAB), -np.inf, np.float32)
    padded[:num_rows, :vocab] = logits
    return np.asarray(filtered(jnp.asarray(padded), pack_rows(rows, num_rows=FILTER_ROWS, num_banned=0)))[
        :num_rows, :vocab
    ]


def oracle(logits: np.ndarray, row: RowSampling) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens a row keeps, and its token's distribution in float64, one obvious step after the other.

    Refuses a case whose top-p or min-p border is too close to call in float32, unless it is exact in both.
    """
    x = logits.astype(np.float64) / row.temperature
    order = sorted(range(len(x)), key=lambda token: (-logits[token], token))
    kept = order[: row.top_k] if row.top_k > 0 else order
    if row.top_p < 1:
        before = np.cumsum(softmax(x[kept]))[:-1]  # probability ahead of each token but the first, which always stays
        margin = np.abs(before - row.top_p)
        assert np.all((margin > 1e-6) | (margin == 0)), "top-p border too close to call"
        kept = [kept[0], *(token for token, mass in zip(kept[1:], before, strict=True) if mass < row.top_p)]
    if row.min_p > 0:
        share = np.exp(x - x.max())
        assert np.all((np.abs(share - row.min_p) > 1e-6) | (share == row.min_p)), "min-p border too close to call"
        kept = [token for token in kept if share[token] >= row.min_p]
    distribution = np.zeros(len(x))
    distribution[kept] = softmax(x[kept])
    return np.isin(np.arange(len(x)), kept), distribution


CHI_SQUARE_ROWS = [
    RowSampling(temperature=1.0, seed=1),
    RowSampling(temperature=0.5, seed=2),
    RowSampling(temperature=3.0, seed=3),
    RowSampling(temperature=1.0, top_k=5, seed=4),
    RowSampling(temperature=1.0, top_p=0.8, seed=5),
    RowSampling(temperature=1.5, min_p=0.1, seed=6),
    RowSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**63 + 9),
]


def test_sampled_frequencies_are_those_of_the_exact_distribution() -> None:
    draws, vocab = 20_000, 24
    logits = np.random.default_rng(0).normal(size=vocab).astype(np.float32) * 1.5
    inputs = pack_rows(CHI_SQUARE_ROWS, num_rows=len(CHI_SQUARE_ROWS), num_banned=0)
    shape = (len(CHI_SQUARE_ROWS), draws)
    tokens = np.asarray(
        sample(
            jnp.broadcast_to(logits, (*shape, vocab)),
            inputs,
            jnp.broadcast_to(jnp.arange(draws, dtype=jnp.int32), shape),
            num_valid_tokens=vocab,
        )
    )
    for row, drawn in zip(CHI_SQUARE_ROWS, tokens, strict=True):
        expected = oracle(logits, row)[1] * draws
        counts = np.bincount(drawn, minlength=vocab)
        assert counts[expected == 0].sum() == 0, row
        common = expected >= 5  # the usual least expected count; the rest is pooled into one cell
        cells = [np.append(values[common], values[~common].sum()) for values in (counts, expected)]
        nonzero = cells[1] > 0
        assert chisquare(cells[0][nonzero], cells[1][nonzero]).pvalue > LEAST_P_VALUE, row


@pytest.mark.parametrize("varied", ["position", "seed"])
def test_neighbouring_positions_and_neighbouring_seeds_draw_independently(varied: str) -> None:
    draws = 8192
    along = [RowSampling(temperature=1.0, seed=index if varied == "seed" else 3) for index in range(draws)]
    position = jnp.arange(draws, dtype=jnp.int32) if varied == "position" else jnp.full(draws, 3, jnp.int32)
    inputs = pack_rows(along, num_rows=draws, num_banned=0)
    tokens = np.asarray(sample(jnp.zeros((draws, 4)), inputs, position, num_valid_tokens=4))
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert chisquare(pairs).pvalue > LEAST_P_VALUE


def test_equal_seeds_give_equal_tokens_and_other_seeds_other_tokens() -> None:
    rows = [RowSampling(temperature=1.0, seed=seed) for seed in (7, 7, 8, 7 + 2**32, 7 + 2**64, -1, 2**64 - 1)]
    tokens = choose(np.zeros((7, WINDOW, VOCAB)), rows, np.arange(WINDOW), VOCAB)
    first, again, other, high_word, wrapped, negative, unsigned = tokens.tolist()
    assert first == again == wrapped
    assert negative == unsigned
    assert len({tuple(first), tuple(other), tuple(high_word), tuple(negative)}) == 4


CROWD = [
    RowSampling(temperature=0.0),
    RowSampling(temperature=1.0, seed=1),
    RowSampling(temperature=0.8, top_k=20, top_p=0.9, seed=2),
    RowSampling(temperature=0.8, top_k=64, min_p=0.02, seed=3),
    RowSampling(temperature=1.2, top_k=200, seed=4),
    RowSampling(temperature=1.0, top_p=0.7, seed=5),
    RowSampling(temperature=2.0, top_k=3, seed=6, banned=(4, 9), banned_until=40),
    RowSampling(temperature=0.0, top_k=5, banned=(290,), banned_until=1000),
]


def test_a_rows_tokens_are_the_same_bits_alone_permuted_and_in_any_company() -> None:
    logits = np.random.default_rng(0).normal(size=(len(CROWD), WINDOW, VOCAB)) * 2
    logits = np.round(logits * 4) / 4  # ties everywhere
    position = 20 + np.arange(WINDOW)

    def together(rows: list[int]) -> np.ndarray:
        return choose(logits[rows], [CROWD[row] for row in rows], position, 298)

    def alone(row: int) -> np.ndarray:
        inputs = pack_rows([CROWD[row]], num_rows=1, num_banned=2)
        one = jnp.asarray(logits[row : row + 1], jnp.float32)
        return np.asarray(sample(one, inputs, jnp.asarray(position, jnp.int32)[None], num_valid_tokens=298))[0]

    everyone = together(list(range(8)))
    shuffled = [5, 2, 7, 0, 3, 6, 1, 4]
    without_sort = [0, 2, 3, 7]  # no row needs more than the first 64 tokens ranked
    np.testing.assert_array_equal(np.stack([alone(row) for row in range(8)]), everyone)
    np.testing.assert_array_equal(together(shuffled), everyone[shuffled])
    np.testing.assert_array_equal(together(without_sort), everyone[without_sort])
    assert len(np.unique(everyone)) > 20


def test_filtered_logits_are_the_same_bits_whether_the_neighbours_need_a_sort_or_not() -> None:
    logits = jax.random.normal(jax.random.key(1), (2, 5000)) * 3
    asked = RowSampling(temperature=0.9, top_k=50, top_p=0.95)
    beside = [RowSampling(temperature=1.0, top_p=0.5), RowSampling(temperature=1.0, top_k=4), RowSampling()]
    first, *others = [
        np.asarray(filtered(logits, pack_rows([asked, neighbour], num_rows=2, num_banned=0)))[0] for neighbour in beside
    ]
    assert 1 < np.sum(first > -np.inf) < 50
    for other in others:
        np.testing.assert_array_equal(first, other)


def test_a_window_draws_what_its_positions_would_draw_one_by_one() -> None:
    logits = np.random.default_rng(2).normal(size=(3, 4, VOCAB)).astype(np.float32)
    logits[:, :, :3] += 4.0
    rows = [RowSampling(temperature=1.0, seed=seed, banned=(seed,), banned_until=102) for seed in range(3)]
    position = np.asarray([[100, 101, 102, 103], [7, 8, 9, 10], [0, 1, 2, 3]], np.int32)
    window = choose(logits, rows, position, VOCAB)
    inputs = pack_rows(rows, num_rows=3, num_banned=1)
    for t in range(4):
        single = sample(jnp.asarray(logits[:, t]), inputs, jnp.asarray(position[:, t]), num_valid_tokens=VOCAB)
        np.testing.assert_array_equal(single, window[:, t])


ORACLE_ROWS = [
    RowSampling(temperature=1.0),
    RowSampling(temperature=1.0, top_k=1),
    RowSampling(temperature=0.7, top_k=3),
    RowSampling(temperature=1.0, top_k=70),
    RowSampling(temperature=1.0, top_k=10_000),
    RowSampling(temperature=1.0, top_p=1e-10),
    RowSampling(temperature=1.0, top_p=1e-60),
    RowSampling(temperature=1.3, top_p=0.5),
    RowSampling(temperature=1.0, top_p=0.999),
    RowSampling(temperature=1.0, min_p=0.3),
    RowSampling(temperature=1.0, min_p=1.0),
    RowSampling(temperature=0.9, top_k=7, top_p=0.6, min_p=0.2),
    RowSampling(temperature=1e-3, top_k=40, top_p=0.9),
    RowSampling(temperature=100.0, top_p=0.3),
    RowSampling(temperature=100, min_p=0.97),
    RowSampling(temperature=1e30, top_k=9),
]


def oracle_logits(case: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(len(ORACLE_ROWS), FILTER_VOCAB)).astype(np.float32) * 2
    if case == "ties":
        logits = np.round(logits)
    if case == "masked":
        logits[:, rng.permutation(FILTER_VOCAB)[:-5]] = -np.inf
    if case == "extreme":
        logits += 1e4 * rng.choice([-1, 0, 1], size=logits.shape).astype(np.float32)
    return logits


@pytest.mark.parametrize("case", ["plain", "ties", "masked", "extreme"])
def test_the_filters_agree_with_the_oracle(case: str) -> None:
    logits = oracle_logits(case)
    for row, ours, raw in zip(ORACLE_ROWS, keep(logits, ORACLE_ROWS), logits, strict=True):
        kept, distribution = oracle(raw, row)
        np.testing.assert_array_equal(ours > -np.inf, kept & np.isfinite(raw), err_msg=str(row))
        # Scaled logits are rounded twice, 6e-8 of their size each; those that matter lie within 30 of the largest.
        np.testing.assert_allclose(
            softmax(ours.astype(np.float64)), distribution, rtol=5e-6, atol=1e-12, err_msg=str(row)
        )


def test_a_vocabulary_of_one_token_always_gives_that_token() -> None:
    rows = [RowSampling(), *ORACLE_ROWS[:12]]
    inputs = pack_rows(rows, num_rows=len(rows), num_banned=0)
    position = jnp.zeros(len(rows), jnp.int32)
    tokens = sample(jnp.full((len(rows), 1), -3.0), inputs, position, num_valid_tokens=1)
    np.testing.assert_array_equal(tokens, np.zeros(len(rows), np.int32))


def test_top_p_keeps_the_fewest_tokens_that_reach_it_when_the_border_is_exact() -> None:
    rows = [RowSampling(temperature=1.0, top_p=top_p) for top_p in (0.25, 0.250001, 0.5, 0.75, 0.750001)]
    kept = keep(np.zeros((5, 4)), rows) == 0
    assert kept.sum(axis=1).tolist() == [1, 2, 2, 3, 4]
    assert np.all(kept[:, :-1] >= kept[:, 1:])  # of equal tokens, those of lower id stay


def test_greedy_takes_the_largest_logit_lowest_id_first_and_so_does_top_k_1() -> None:
    logits = np.asarray([[0.0, 2.0, 2.0], [-0.0, 0.0, -1.0], [-np.inf, -5.0, -5.0]])[:, None]
    for row in (RowSampling(), RowSampling(temperature=9e-6), RowSampling(temperature=50.0, top_k=1)):
        assert choose(logits, [row] * 3, np.zeros((3, 1)), 3)[:, 0].tolist() == [1, 0, 1]


def test_what_counts_as_greedy_is_what_the_parameters_say() -> None:
    for temperature in (0.0, 9.9e-6, 1e-5, 1.0):
        packed = pack_rows([RowSampling(temperature=temperature)], num_rows=1, num_banned=0)
        assert (float(packed.temperature[0]) == 0) is SamplingParams(temperature=temperature).greedy


def test_ids_beyond_the_tokenizer_are_never_chosen_however_large_their_logits() -> None:
    logits = np.zeros((4, WINDOW, 12))
    logits[..., 10:] = 1e4
    rows = [
        RowSampling(),
        *(RowSampling(temperature=1.0, top_k=top_k, top_p=p) for top_k, p in ((0, 1), (2, 1), (0, 0.9))),
    ]
    tokens = choose(logits, rows, np.arange(WINDOW), 10)
    assert tokens.max() < 10
    assert set(tokens[2].tolist()) == {0, 1}  # masked before top-k, which else would keep the two of them


def test_end_tokens_are_banned_up_to_their_position_and_padding_bans_no_token() -> None:
    logits = np.full((2, 4, VOCAB), -9.0)
    logits[..., 2], logits[..., VOCAB - 1] = 9.0, 8.0  # -1 as an index would mean the last token
    rows = [
        RowSampling(banned=(2,), banned_until=12),
        RowSampling(temperature=0.1, banned=(2, VOCAB - 1), banned_until=13),
    ]
    tokens = choose(logits, rows, 10 + np.arange(4), VOCAB)
    assert tokens[0].tolist() == [VOCAB - 1, VOCAB - 1, 2, 2]
    assert not set(tokens[1, :3].tolist()) & {2, VOCAB - 1}
    assert tokens[1, 3] == 2


def test_a_row_of_nan_changes_no_other_row_and_is_reported() -> None:
    logits = np.random.default_rng(3).normal(size=(4, WINDOW, 40))
    broken = logits.copy()
    broken[1] = np.nan
    broken[2, :, 7] = np.nan
    rows = [RowSampling(temperature=1.0, top_p=0.9, seed=5)] * 4
    before, after = (choose(values, rows, np.arange(WINDOW), 40) for values in (logits, broken))
    np.testing.assert_array_equal(after[[0, 3]], before[[0, 3]])
    assert after.min() >= 0
    assert after.max() < 40
    reported = samplable(jnp.asarray(broken[:, 0]), num_valid_tokens=40)
    assert reported.tolist() == [True, False, False, True]


def test_a_row_is_samplable_by_its_valid_ids_alone() -> None:
    logits = jnp.asarray([[0.0, -jnp.inf, jnp.nan], [-jnp.inf, -jnp.inf, 0.0], [jnp.inf, 0.0, 0.0]])
    assert samplable(logits, num_valid_tokens=2).tolist() == [True, False, False]


def test_noise_of_a_token_does_not_depend_on_the_width_of_the_vocabulary() -> None:
    seed, position = jnp.asarray([5, 6], jnp.uint32), jnp.int32(3)
    np.testing.assert_array_equal(noise_of(seed, position, 600), noise_of(seed, position, 640)[:600])


def test_noise_is_standard_gumbel_and_reaches_beyond_what_23_random_bits_can() -> None:
    draws = 2**20
    noise = np.asarray(noise_of(jnp.asarray([0, 23], jnp.uint32), jnp.int32(0), draws))
    assert np.all(np.isfinite(noise))
    # Four standard errors; the Gumbel distribution has variance pi^2 / 6 and kurtosis 5.4.
    variance = math.pi**2 / 6
    assert abs(noise.mean() - np.euler_gamma) < 4 * math.sqrt(variance / draws)
    assert abs(noise.var() - variance) < 4 * variance * math.sqrt(4.4 / draws)
    assert noise.max() > -math.log(2.0**-23)


def oracle_ranks(logits: np.ndarray, valid: int) -> np.ndarray:
    order = sorted(range(valid), key=lambda token: (-logits[token], token))
    return np.argsort(order) + 1


def test_logprobs_are_the_raw_log_softmax_and_ranks_are_distinct_also_among_ties() -> None:
    vocab, valid, num_top = 30, 27, 5
    logits = np.round(np.random.default_rng(3).normal(size=(vocab,)).astype(np.float32) * 3)
    logits[[4, 11]] = -np.inf
    every = jnp.broadcast_to(jnp.asarray(logits), (valid, vocab))
    report = logprobs(every, jnp.arange(valid, dtype=jnp.int32), num_top=num_top, num_valid_tokens=valid)
    expected, ranks = log_softmax(logits.astype(np.float64)), oracle_ranks(logits, valid)
    leaders = np.argsort(ranks)[:num_top]
    np.testing.assert_allclose(report.logprob, expected[:valid], rtol=1e-5, atol=1e-6)  # float32 sums of 30 terms
    np.testing.assert_array_equal(report.rank, ranks)
    np.testing.assert_array_equal(report.top_ids, np.broadcast_to(leaders, (valid, num_top)))
    np.testing.assert_allclose(report.top_logprobs[0], expected[leaders], rtol=1e-5, atol=1e-6)


def test_logprobs_keep_their_precision_under_a_large_common_offset() -> None:
    logits = jnp.asarray([[1e4, 1e4, -1e4]])
    report = logprobs(logits, jnp.asarray([1], jnp.int32), num_top=2, num_valid_tokens=3)
    # float32 at 1e4 has steps of 1e-3: the offset has to go before the logarithm is added.
    np.testing.assert_allclose(report.logprob, [-math.log(2)], rtol=1e-6)
    np.testing.assert_allclose(report.top_logprobs, [[-math.log(2)] * 2], rtol=1e-6)


def test_logprobs_stay_finite_at_extreme_logits_and_a_broken_row_stays_alone() -> None:
    logits = jnp.asarray([[1e4, -1e4, 0.0], [-jnp.inf] * 3, [jnp.nan, 0.0, 0.0], [3e38, -3e38, -jnp.inf]])
    report = logprobs(logits, jnp.asarray([1, 0, 1, 0], jnp.int32), num_top=1, num_valid_tokens=3)
    np.testing.assert_allclose(np.asarray(report.logprob)[[0, 3]], [-2e4, 0.0])
    assert float(report.logprob[1]) == -math.inf
    np.testing.assert_array_equal(np.asarray(report.top_ids)[[0, 3], 0], [0, 0])


@pytest.mark.parametrize(("num_top", "listed"), [(0, 0), (2, 2), (20, 3)])
def test_no_more_alternatives_are_listed_than_there_are_tokens(num_top: int, listed: int) -> None:
    logits = jnp.asarray([[[0.0, 1.0, 2.0, 9.0]]])
    report = logprobs(logits, jnp.asarray([[1]], jnp.int32), num_top=num_top, num_valid_tokens=3)
    assert report.top_ids.tolist() == [[[2, 1, 0][:listed]]]
    assert report.rank.tolist() == [[2]]
    assert report.logprob.shape == (1, 1)


def test_padding_rows_are_greedy_and_packing_keeps_every_number() -> None:
    row = RowSampling(temperature=2, top_k=-1, top_p=0.5, min_p=0.25, seed=2**40 + 3, banned=(7,), banned_until=9)
    packed = pack_rows([row], num_rows=2, num_banned=2)
    assert packed.temperature.tolist() == [2.0, 0.0]
    assert packed.top_k.tolist() == [0, 0]
    assert packed.top_p.tolist() == [0.5, 1.0]
    assert packed.min_p.tolist() == [0.25, 0.0]
    assert packed.seed.tolist() == [[256, 3], [0, 0]]
    assert packed.banned.tolist() == [[7, -1], [-1, -1]]
    assert packed.banned_until.tolist() == [9, 0]


def test_numbers_beyond_the_device_types_are_packed_as_the_largest_that_mean_the_same() -> None:
    packed = pack_rows([RowSampling(temperature=1e300, top_k=10**12)], num_rows=1, num_banned=0)
    assert np.isfinite(packed.temperature).all()
    assert packed.top_k.tolist() == [2**31 - 1]


@pytest.mark.parametrize(("num_rows", "num_banned"), [(1, 2), (2, 1)])
def test_requests_that_do_not_fit_the_bucket_are_an_error_with_the_numbers(num_rows: int, num_banned: int) -> None:
    with pytest.raises(
        ValueError, match=f"2 requests with up to 2 banned ids do not fit {num_rows} rows of {num_banned}"
    ):
        pack_rows([RowSampling(), RowSampling(banned=(1, 2))], num_rows=num_rows, num_banned=num_banned)


def test_derived_seeds_are_the_same_in_every_process_and_for_every_release() -> None:
    assert derive_seed(0, 0) == 4132154754381755557
    assert sibling_seed(0, 1) == 5305403089500013047


def test_derived_seeds_are_all_different() -> None:
    requests = {derive_seed(engine_seed, index) for engine_seed in (-1, 0, 1) for index in range(20)}
    siblings = {
        sibling_seed(seed, sibling) for seed in (0, derive_seed(0, 0), derive_seed(0, 1)) for sibling in range(20)
    }
    assert len(requests | siblings) == 60 + 60 - 2  # siblings 0 of the two derived seeds are those requests
    assert all(0 <= seed < 2**64 for seed in requests | siblings)


def test_the_first_sibling_has_the_requests_own_seed() -> None:
    assert sibling_seed(123, 0) == 123
