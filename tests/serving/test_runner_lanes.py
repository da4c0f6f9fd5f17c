"""Sampling parameters by lane: what each row gets, what padding gets, and that shapes never change."""

import jax
import numpy as np
import pytest

from gdn_jax.serving.runner.adjust import RowAdjustments
from gdn_jax.serving.runner.lanes import MAX_BANNED, LaneSampling
from gdn_jax.serving.runner.sampling import RowSampling, SampledRows

ADJUSTED = RowAdjustments(presence=1.0, repetition=1.1, biases=((5, 2.0),), bad_words=((1, 2),))
HOT = RowSampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=2**40 + 3, banned=(4, 9), banned_until=30)


def gather(lanes: LaneSampling, *lane: int) -> SampledRows:
    """Return rows that emit on these lanes."""
    return lanes.gather(np.asarray(lane), np.ones(len(lane), np.bool_))


def shapes(rows: SampledRows) -> list[tuple[int, ...]]:
    return [array.shape for array in jax.tree.leaves(rows.lanes)]


def test_rows_get_the_parameters_of_their_lanes_in_their_own_order_and_padding_is_greedy() -> None:
    lanes = LaneSampling(4)
    lanes.assign(1, HOT, 3)
    lanes.assign(3, RowSampling(temperature=2.0, seed=5), None)
    sampled = gather(lanes, 3, 1, 4, 4)
    assert sampled.lane.tolist() == [3, 1, 4, 4]
    found = sampled.parameters()
    np.testing.assert_allclose(found.temperature, [2.0, 0.7, 0.0, 0.0])
    assert found.top_k.tolist() == [0, 5, 0, 0]
    assert found.seed.tolist() == [[0, 5], [2**8, 3], [0, 0], [0, 0]]
    assert found.banned[1, :3].tolist() == [4, 9, -1]
    assert found.banned_until.tolist() == [0, 30, 0, 0]


def test_log_probabilities_are_wanted_if_any_row_of_the_step_wants_them() -> None:
    lanes = LaneSampling(3)
    lanes.assign(0, RowSampling(), 0)  # of the chosen token alone, which counts
    lanes.assign(1, RowSampling(), None)
    wanted = [bool(gather(lanes, lane, 3).want_logprobs()) for lane in (0, 1, 2)]
    assert wanted == [True, False, False]
    assert [lanes.num_top(lane) for lane in (0, 1, 2)] == [0, None, None]


def test_any_number_of_banned_ids_leaves_every_shape_as_it_was() -> None:
    lanes = LaneSampling(2)
    before = shapes(gather(lanes, 2))
    for count in (1, 64, 65, MAX_BANNED):
        lanes.assign(0, RowSampling(banned=tuple(range(count)), banned_until=9), None)
        sampled = gather(lanes, 0)
        assert shapes(sampled) == before
        assert int((sampled.parameters().banned >= 0).sum()) == count
    with pytest.raises(ValueError, match="do not fit"):
        lanes.assign(0, RowSampling(banned=tuple(range(MAX_BANNED + 1))), None)


def test_a_released_lane_is_as_one_that_nobody_had() -> None:
    lanes, fresh = LaneSampling(2), LaneSampling(2)
    lanes.assign(0, HOT, 3, ADJUSTED)
    gather(lanes, 0)
    lanes.release(0)
    for found, expected in zip(*map(jax.tree.leaves, (gather(lanes, 0), gather(fresh, 0))), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert lanes.num_top(0) is None


def test_what_a_step_was_given_does_not_change_with_the_next_request() -> None:
    """The device may read an array after the host has gone on; on a CPU the two may share memory."""
    lanes = LaneSampling(40)
    lanes.assign(0, HOT, None)
    given = gather(lanes, 0)
    lanes.assign(0, RowSampling(temperature=3.0, banned=(7,)), None)
    gather(lanes, 0)
    np.testing.assert_allclose(given.lanes.temperature[0], 0.7)
    assert given.lanes.banned[0, :2].tolist() == [4, 9]


def test_steps_between_two_admissions_send_lane_numbers_alone() -> None:
    lanes = LaneSampling(2)
    lanes.assign(0, HOT, None)
    first, second = (gather(lanes, 0) for _ in range(2))
    assert all(a is b for a, b in zip(*(jax.tree.leaves(given.lanes) for given in (first, second)), strict=True))
    lanes.assign(1, RowSampling(seed=8), None)
    third = gather(lanes, 0)
    assert third.lanes.seed is not first.lanes.seed
    assert third.lanes.banned is first.lanes.banned  # the long one did not change
