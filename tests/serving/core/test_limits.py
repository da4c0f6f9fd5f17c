"""What could never run is refused at once, with the numbers."""

import pytest

from gdn_jax.serving.core.errors import InvalidParameterError, InvalidPromptError, PromptTooLongError
from gdn_jax.serving.core.limits import Limits


def make_limits(**sizes) -> Limits:
    return Limits(**{"num_blocks": 5, "num_slots": 4, "num_lanes": 2, "budget": 64, "max_model_len": 500, **sizes})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"budget": 63}, r"max_num_batched_tokens must be at least one block \(64\); got 63"),
        ({"num_drafts": 64}, r"1 \+ num_drafts must be at most one block \(64\); got 65"),
        ({"num_lanes": 0}, "max_num_seqs must be at least 1; got 0"),
    ],
)
def test_sizes_that_could_serve_nobody_are_refused(sizes: dict, message: str) -> None:
    make_limits().check(64)
    with pytest.raises(ValueError, match=message):
        make_limits(**sizes).check(64)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "error", "message"),
    [
        (0, 1, InvalidPromptError, "at least one token"),
        (1, 0, InvalidParameterError, "max_tokens must be at least 1; got 0"),
        (400, 101, PromptTooLongError, r"max_model_len \(500\); got 400 \+ 101"),
        (200, 57, PromptTooLongError, r"200 \+ 57.*needs 5 blocks of 64 tokens, and there are 4"),
    ],
)
def test_a_request_that_could_never_run_to_its_end_is_refused(num_prompt, max_tokens, error, message: str) -> None:
    with pytest.raises(error, match=message):
        make_limits().admit(num_prompt=num_prompt, max_tokens=max_tokens, block_size=64)


def test_a_request_that_just_fits_is_not_refused() -> None:
    make_limits().admit(num_prompt=200, max_tokens=56, block_size=64)  # its last token is never run
    make_limits(num_blocks=9).admit(num_prompt=499, max_tokens=1, block_size=64)
