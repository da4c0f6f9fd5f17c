"""Penalties, biases and bad words against a NumPy oracle, in steps of one token and in windows of drafts."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.numpy_adjust import Wishes, adjusted

from gdn_jax.serving.runner.adjust import (
    MAX_BIASES,
    MAX_WORD_TOKENS,
    MAX_WORDS,
    LaneHistory,
    RowAdjustments,
    adjust_logits,
    extend_history,
    history_bytes_per_lane,
    make_history,
    pack_adjustments,
    pack_history,
)
from gdn_jax.serving.runner.lanes import LaneSampling
from gdn_jax.serving.runner.sampling import RowSampling, SampledRows, sample_tokens

LANES, ROWS, WINDOW, VOCAB = 5, 4, 4, 12  # one shape for all tests, compiled once
OFF = Wishes()
adjust = jax.jit(adjust_logits)
extend = jax.jit(extend_history)


def as_numbers(wishes: Wishes) -> RowAdjustments:
    return RowAdjustments(
        presence=wishes.presence_penalty,
        frequency=wishes.frequency_penalty,
        repetition=wishes.repetition_penalty,
        biases=tuple(wishes.logit_bias.items()),
        bad_words=tuple(map(tuple, wishes.bad_words)),
    )


class Crowd:
    """Requests on lanes, with their histories on the device, and the same as lists of tokens."""

    def __init__(self, wishes: Sequence[Wishes], prompts: Sequence[Sequence[int]], lanes: Sequence[int]) -> None:
        self.wishes, self.prompts, self.lanes = wishes, prompts, lanes
        self.outputs: list[list[int]] = [[] for _ in wishes]
        sampling = LaneSampling(LANES)
        self.history = make_history(LANES, VOCAB)
        for wish, prompt, lane in zip(wishes, prompts, lanes, strict=True):
            sampling.assign(lane, RowSampling(), None, as_numbers(wish))
            self.place(lane, pack_history(prompt, [], VOCAB))
        padded = [*lanes, *[LANES] * (ROWS - len(lanes))]
        self.rows: SampledRows = sampling.gather(np.asarray(padded, np.int32), np.ones((ROWS,), np.bool_))

    def place(self, lane: int, row: LaneHistory) -> None:
        self.history = jax.tree.map(lambda array, new: array.at[lane].set(new), self.history, row)

    def emit(self, tokens: Sequence[Sequence[int]]) -> None:
        """Append up to WINDOW tokens to each request's output, in one step."""
        emitted = np.full((ROWS, WINDOW), 7, np.int32)  # what is not emitted must not count
        for index, each in enumerate(tokens):
            emitted[index, : len(each)] = each
            self.outputs[index] += each
        counts = np.zeros((ROWS,), np.int32)
        counts[: len(tokens)] = [len(each) for each in tokens]
        self.history = extend(self.history, self.rows, jnp.asarray(emitted), jnp.asarray(counts))

    def window(self, logits: np.ndarray, drafts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the adjusted [requests, WINDOW, V] logits at each place of a window of WINDOW - 1 drafts."""
        return self.adjust(logits, drafts, range(WINDOW))

    def adjust(self, logits: np.ndarray, after: Sequence[Sequence[int]], num_after: Sequence[int]) -> np.ndarray:
        padded = np.full((ROWS, len(num_after), VOCAB), 3.5, np.float32)
        padded[: len(logits)] = logits
        proposed = np.full((ROWS, WINDOW - 1), 5, np.int32)
        proposed[: len(after)] = after
        places = jnp.asarray(list(num_after), jnp.int32)
        found = adjust(jnp.asarray(padded), self.rows, self.history, after=jnp.asarray(proposed), num_after=places)
        np.testing.assert_array_equal(np.asarray(found)[len(logits) :], padded[len(logits) :])  # padding keeps its bits
        return np.asarray(found)[: len(logits)]

    def expected(self, logits: np.ndarray, drafts: Sequence[Sequence[int]]) -> np.ndarray:
        """Return what the oracle says of the same places."""
        return np.stack(
            [
                [
                    adjusted(logits[row, place], self.wishes[row], self.prompts[row], [*output, *drafts[row][:place]])
                    for place in range(WINDOW)
                ]
                for row, output in enumerate(self.outputs)
            ]
        )


def random_logits(seed: int, num_rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_rows, WINDOW, VOCAB)).astype(np.float32) * 3


def agree(found: np.ndarray, expected: np.ndarray) -> None:
    # Three float32 operations on numbers of up to a few hundred.
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-5)


tokens = st.integers(0, 4)  # few, so that they repeat; the rest of the vocabulary stands for what never occurs
wishes = st.builds(
    Wishes,
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.5, 1e9, -1e9]), max_size=3),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=4), max_size=4),
)
spans = st.lists(tokens, max_size=6)
drafts_of_a_window = st.lists(tokens, min_size=WINDOW - 1, max_size=WINDOW - 1)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_place_of_a_window_is_adjusted_for_the_tokens_before_it_and_each_of_them_once(data: Any) -> None:
    """Also what a window kept of its drafts counts by token, and never twice."""
    num = data.draw(st.integers(1, ROWS))
    each = [data.draw(st.lists(kind, min_size=num, max_size=num)) for kind in (st.just(OFF) | wishes, spans)]
    lanes = data.draw(st.permutations(range(LANES)))[:num]
    crowd = Crowd(each[0], each[1], lanes)
    for step in range(data.draw(st.integers(0, 4))):
        crowd.emit([data.draw(st.lists(tokens, max_size=WINDOW)) for _ in range(num)])
        logits = random_logits(step, num)
        drafts = [data.draw(drafts_of_a_window) for _ in range(num)]
        agree(crowd.window(logits, drafts), crowd.expected(logits, drafts))


ALL = Wishes(
    presence_penalty=0.4,
    frequency_penalty=0.3,
    repetition_penalty=1.7,
    logit_bias={1: 2.0, 11: -3.0},
    bad_words=[[9], [1, 2], [2, 3, 4]],
)


def test_a_window_has_the_same_bits_as_plain_decode_place_by_place() -> None:
    window = Crowd([ALL, OFF, replace(ALL, frequency_penalty=-0.7)], [[1, 2]] * 3, [2, 0, 4])
    window.emit([[3, 3], [4], [1]])
    logits, drafts = random_logits(1, 3), [[1, 2, 3], [2, 3, 4], [3, 3, 1]]
    found = window.window(logits, drafts)
    for place in range(WINDOW):
        one = window.adjust(logits[:, place : place + 1], [[0] * 3] * 3, [0])
        np.testing.assert_array_equal(one[:, 0], found[:, place])
        window.emit([[row[place]] if place < 3 else [] for row in drafts])


def test_a_draft_sees_the_drafts_made_before_it_and_not_what_lies_behind_them() -> None:
    crowd = Crowd([ALL, ALL], [[5], [6]], [1, 3])
    crowd.emit([[1], [2, 2]])
    logits, drafts = random_logits(2, 2), [[2, 3, 0], [3, 4, 0]]
    expected = crowd.expected(logits, drafts)
    for made in range(WINDOW - 1):
        buffer = [[*row[:made], *[8] * (WINDOW - 1 - made)] for row in drafts]
        agree(crowd.adjust(logits[:, made : made + 1], buffer, [made])[:, 0], expected[:, made])


def test_a_row_has_the_same_bits_alone_and_beside_rows_that_ask_for_anything() -> None:
    logits, drafts = random_logits(3, 3), [[1, 2, 3]] * 3
    together = Crowd([OFF, ALL, Wishes(repetition_penalty=0.2)], [[1], [2], [3]], [0, 1, 2])
    together.emit([[1], [1], [1]])
    found = together.window(logits, drafts)
    np.testing.assert_array_equal(found[0], logits[0])
    alone = Crowd([ALL], [[2]], [4])
    alone.emit([[1]])
    np.testing.assert_array_equal(alone.window(logits[1:2], drafts[1:2])[0], found[1])


@pytest.mark.parametrize(
    "wishes",
    [
        Wishes(presence_penalty=1.0),
        Wishes(frequency_penalty=1.0),
        Wishes(repetition_penalty=2.0),
        Wishes(logit_bias={3: 1.0}),
        Wishes(bad_words=[[2]]),
    ],
)
def test_each_wish_alone_is_granted(wishes: Wishes) -> None:
    crowd = Crowd([wishes], [[5, 6]], [0])
    crowd.emit([[2, 2, 4]])
    logits, drafts = random_logits(4, 1), [[2, 5, 4]]
    found = crowd.window(logits, drafts)
    assert not np.array_equal(found, logits)
    agree(found, crowd.expected(logits, drafts))


def test_presence_and_frequency_count_the_output_alone_and_repetition_the_prompt_too() -> None:
    logits = np.full((3, WINDOW, VOCAB), 2.0, np.float32)
    asked = [Wishes(presence_penalty=1.0), Wishes(frequency_penalty=1.0), Wishes(repetition_penalty=2.0)]
    crowd = Crowd(asked, [[1, 1]] * 3, [0, 1, 2])
    crowd.emit([[2, 2, 2]] * 3)
    found = crowd.window(logits, [[1, 9, 9]] * 3)
    assert found[:, 0, [1, 2, 3]].tolist() == [[2, 1, 2], [2, -1, 2], [1, 1, 2]]
    assert found[:, 1, [1, 2, 3]].tolist() == [[1, 1, 2], [1, -1, 2], [1, 1, 2]]


def test_a_bad_word_is_banned_only_where_all_tokens_before_its_last_stand_in_the_output() -> None:
    words = [[1, 2, 3], [7] * 31 + [4]]
    crowd = Crowd([Wishes(bad_words=words)] * 2, [[1, 2], [7]], [0, 1])
    logits = np.zeros((2, WINDOW, VOCAB), np.float32)
    crowd.emit([[2], [7, 7, 7, 7]])  # the 1 before the 2 is the prompt's
    assert np.isfinite(crowd.window(logits, [[0, 0, 0], [7, 7, 7]])).all()
    for _ in range(6):
        crowd.emit([[1], [7] * 4])
    found = crowd.window(logits, [[2, 1, 2], [7, 7, 7]])
    banned = [np.argwhere(np.isinf(each)).tolist() for each in found]
    assert banned == [[[1, 3], [3, 3]], [[3, 4]]]  # 28 + 3 sevens
    assert len(words[1]) == MAX_WORD_TOKENS


def test_masked_logits_stay_masked_and_huge_wishes_make_no_nan() -> None:
    wishes = Wishes(repetition_penalty=1e300, logit_bias={0: 1e300, 1: 100.0}, bad_words=[[3]])
    crowd = Crowd([wishes, replace(wishes, repetition_penalty=1e-300)], [list(range(VOCAB))] * 2, [0, 1])
    logits = random_logits(5, 2)
    logits[:, :, 1::4], logits[:, :, 2] = -np.inf, 0.0
    found = crowd.window(logits, [[1, 2, 3]] * 2)
    assert not np.isnan(found).any()
    assert not np.isposinf(found).any()
    np.testing.assert_array_equal(np.isinf(found), np.isinf(logits) | (np.arange(VOCAB) == 3))


def test_a_bias_never_brings_back_an_id_without_text_or_a_banned_end_token() -> None:
    crowd = Crowd([Wishes(logit_bias={10: 100.0, 2: 100.0, 4: 50.0})], [[1]], [0])
    inputs = replace(crowd.rows.parameters(), banned=jnp.full((ROWS, 1), 2), banned_until=jnp.full((ROWS,), 6))

    def choose(logits: jax.Array, position: jax.Array) -> jax.Array:
        after, num_after = jnp.zeros((ROWS, WINDOW - 1), jnp.int32), jnp.arange(WINDOW)
        change = partial(adjust_logits, rows=crowd.rows, history=crowd.history, after=after, num_after=num_after)
        return sample_tokens(logits, inputs, position, num_valid_tokens=10, adjust=change)

    logits = jnp.zeros((ROWS, WINDOW, VOCAB)).at[:, :, 10].set(5.0)
    position = jnp.broadcast_to(jnp.arange(4, 4 + WINDOW)[None], (ROWS, WINDOW))
    assert jax.jit(choose)(logits, position).tolist() == [[4, 4, 2, 2], *[[0] * 4] * 3]


def test_what_is_not_asked_for_costs_no_history() -> None:
    """Rows that do not adjust, rows of padding, and tokens beyond those emitted leave every lane as it was."""
    crowd = Crowd([OFF, ALL], [[1], [2]], [0, 3])
    before = jax.tree.map(np.asarray, crowd.history)
    crowd.emit([[1, 2, 3], []])
    for found, expected in zip(jax.tree.leaves(crowd.history), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, expected)
    crowd.emit([[1], [6, 6, 1]])
    changed = np.argwhere(np.asarray(crowd.history.counts) != before.counts)
    assert changed.tolist() == [[3, 1], [3, 6]]
    assert np.asarray(crowd.history.tail)[3, -4:].tolist() == [-1, 6, 6, 1]


@pytest.mark.parametrize("length", [0, 1, MAX_WORD_TOKENS - 1, 50])
def test_a_history_packed_at_once_is_that_of_the_tokens_one_by_one(length: int) -> None:
    output = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    grown, packed = Crowd([ALL], [[1, 5]], [2]), Crowd([ALL], [[]], [2])
    for token in output:
        grown.emit([[token]])
    packed.place(2, pack_history([1, 5], output, VOCAB))
    for found, expected in zip(jax.tree.leaves(packed.history), jax.tree.leaves(grown.history), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_bytes_of_a_lane_are_those_of_its_history() -> None:
    arrays = jax.tree.leaves(make_history(3, 1000))
    assert sum(array.nbytes for array in arrays) == 4 * history_bytes_per_lane(1000)


def test_neither_counts_nor_logits_are_copied_within_a_step() -> None:
    """The counts of all lanes are large; the logits given are used again, those that the loop changes are its own."""
    crowd = Crowd([ALL], [[1]], [0])
    leaves, tree = jax.tree.flatten((crowd.history, crowd.rows))

    def step(logits: jax.Array, *leaves: jax.Array) -> tuple[Any, ...]:
        history, rows = jax.tree.unflatten(tree, leaves)
        masked = jnp.where(jnp.arange(VOCAB)[None, None] < 10, logits, -jnp.inf)
        after, num_after = jnp.zeros((ROWS, WINDOW - 1), jnp.int32), jnp.arange(WINDOW)
        found = adjust_logits(masked, rows, history, after=after, num_after=num_after)
        chosen = jnp.argmax(found, axis=2).astype(jnp.int32)
        history = extend_history(history, rows, chosen, jnp.ones((ROWS,), jnp.int32))
        return chosen, logits.sum(), history.counts, history.tail

    compiled = jax.jit(step, donate_argnums=(1, 2)).lower(jnp.zeros((ROWS, WINDOW, VOCAB)), *leaves).compile()
    copied = [line.split(" copy(")[0].split()[-1] for line in compiled.as_text().splitlines() if " copy(" in line]
    assert not [shape for shape in copied if f",{VOCAB}]" in shape]
    assert compiled.memory_analysis().alias_size_in_bytes >= crowd.history.counts.nbytes


@pytest.mark.parametrize(
    "request_of",
    [
        RowAdjustments(biases=tuple((index, 1.0) for index in range(MAX_BIASES + 1))),
        RowAdjustments(bad_words=((1,),) * (MAX_WORDS + 1)),
        RowAdjustments(bad_words=((1,) * (MAX_WORD_TOKENS + 1),)),
        RowAdjustments(bad_words=((),)),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(request_of: RowAdjustments) -> None:
    with pytest.raises(ValueError, match=f"do not fit {MAX_BIASES} biases and {MAX_WORDS} words"):
        pack_adjustments(request_of)


def test_the_largest_request_fits() -> None:
    packed = pack_adjustments(
        RowAdjustments(
            biases=tuple((index, 1.0) for index in range(MAX_BIASES)),
            bad_words=tuple((index,) * MAX_WORD_TOKENS for index in range(MAX_WORDS)),
        )
    )
    assert packed["bias_ids"].min() >= 0
    assert packed["word_starts"].min() >= 0
    assert packed["word_ends"].tolist() == list(range(MAX_WORDS))
