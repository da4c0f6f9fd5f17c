"""Which drafts stand, against the rule token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from gdn_jax.serving.runner.accept import count_standing


def by_the_rule(window: np.ndarray, choices: np.ndarray, sound: np.ndarray, num_new: int) -> int:
    """Plain decoding of one row: a draft stands iff it is what the target draws, and all before it stand."""
    count = min(num_new, 1) if sound[0] or num_new == 1 else 0
    while count and count < num_new and window[count] == choices[count - 1] and sound[count]:
        count += 1
    return count


def count(window: np.ndarray, choices: np.ndarray, sound: np.ndarray, num_new: np.ndarray) -> list[int]:
    arrays = (jnp.asarray(array) for array in (window, choices, sound, num_new))
    return np.asarray(count_standing(*arrays)).tolist()


@pytest.mark.parametrize("width", [1, 2, 4, 9])
def test_drafts_stand_as_the_rule_says(width: int) -> None:
    """Runs of every length occur, also agreement after a disagreement."""
    rng = np.random.RandomState(width)
    rows = 1000
    window = rng.randint(0, 50, (rows, width)).astype(np.int32)
    choices = np.roll(window, -1, axis=1)
    choices[rng.rand(rows, width) < 0.1] = 99
    sound = rng.rand(rows, width) < 0.9
    num_new = rng.randint(0, width + 1, rows).astype(np.int32)
    expected = [by_the_rule(*row) for row in zip(window, choices, sound, num_new.tolist(), strict=True)]
    assert count(window, choices, sound, num_new) == expected
    assert set(expected) == set(range(width + 1))


def test_a_draft_whose_numbers_are_not_finite_waits_to_be_the_pending_token() -> None:
    """There its request ends, as in plain decoding; what was drawn before it is emitted."""
    window, choices = np.asarray([[5, 6, 7, 8]], np.int32), np.asarray([[6, 7, 8, 9]], np.int32)
    sound, num_new = np.asarray([[True, True, False, True]]), np.asarray([4], np.int32)
    assert count(window, choices, sound, num_new) == [2]


def test_a_window_that_is_not_sound_from_its_start_stands_for_nothing_unless_it_is_the_pending_token_alone() -> None:
    """Drafts may have spoilt the numbers before them; the next step tells."""
    window, choices = np.asarray([[5, 6]] * 2, np.int32), np.asarray([[6, 7]] * 2, np.int32)
    assert count(window, choices, np.asarray([[False, True]] * 2), np.asarray([2, 1], np.int32)) == [0, 1]
