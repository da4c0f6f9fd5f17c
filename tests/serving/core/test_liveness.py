"""No request starves, for any budget of a block or more and any pools that admit it; the number of steps is bounded."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.core_rig import CoreRig

from gdn_jax.serving.core.errors import PromptTooLongError
from gdn_jax.serving.core.placement import CacheMode
from gdn_jax.serving.core.request import Request


def most_steps(rig: CoreRig, requests: list[Request]) -> int:
    """Return a bound on the steps that these requests may take.

    The first of the running requests advances in every step, by a block or by a token, and is preempted by nobody. What
    a preemption costs is a prefill; a request is preempted only for one before it, which then runs to its end
    undisturbed unless one before that comes, so each may prefill anew as often as there are others.
    """
    spans = [-(-(r.num_prompt + r.max_tokens) // (rig.budget // rig.block_size * rig.block_size)) for r in requests]
    alone = [span + request.max_tokens + 2 for span, request in zip(spans, requests, strict=True)]
    return sum(alone) + len(requests) * sum(spans)


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(list(CacheMode)),
    budget=st.integers(4, 24),
    num_blocks=st.integers(2, 16),
    num_slots=st.integers(2, 6),
    num_lanes=st.integers(1, 4),
    num_drafts=st.integers(0, 3),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_every_request_that_is_admitted_ends_in_a_bounded_number_of_steps(lengths, seed, **sizes) -> None:
    rig, dice = CoreRig(interval=4, max_model_len=60, **sizes), random.Random(seed)
    requests: list[Request] = []
    for number, (length, max_tokens, priority) in enumerate(lengths):
        prompt = [dice.randint(0, 1) for _ in range(length)]
        options = {"max_tokens": max_tokens, "priority": priority, "leader": f"r{dice.randint(0, number)}"}
        if (length + max_tokens - 1) // 4 + 1 > rig.num_blocks - 1:
            with pytest.raises(PromptTooLongError):
                rig.add(f"r{number}", prompt, **options)
        else:
            requests.append(rig.add(f"r{number}", prompt, **options))
    rig.run(most_steps(rig, requests) + 1)
    for request in requests:
        rig.check_answer(request)
    rig.idle()


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 8, 11])
def test_requests_that_arrive_all_the_time_do_not_keep_an_older_one_from_ending(budget: int) -> None:
    rig = CoreRig(budget=budget, num_blocks=14, num_slots=3, num_lanes=3, vocabulary=50)
    old = rig.add("old", list(range(25)), max_tokens=15)
    steps = 0
    while old.request_id not in rig.ended:
        rig.add(f"new{steps}", [steps % 50, 1, 2, 3, 4, 5], max_tokens=3)
        assert rig.step() is not None
        steps += 1
        assert steps <= 7 + 15  # a block at a time at worst, then a token at a time
    rig.finish()


def test_a_request_whose_hit_lies_in_the_only_slot_does_not_wait_for_another() -> None:
    for num_drafts in range(4):
        rig = CoreRig(num_slots=2, num_lanes=2, num_drafts=num_drafts, vocabulary=50)
        prompt = list(range(8))
        rig.serve("first", prompt, max_tokens=1)
        for number in range(4):
            rig.add(f"r{number}", [*prompt, number], max_tokens=5)
        rig.finish()
        assert rig.ended["r0"].num_cached == 8


def test_a_conversation_in_one_slot_never_deadlocks_and_still_hits() -> None:
    rig = CoreRig(num_slots=2, num_blocks=16, num_lanes=1, vocabulary=50, mode=CacheMode.ALIGN)
    text = list(range(8))
    hits = []
    for turn in range(6):
        request = rig.serve(f"turn{turn}", text, max_tokens=4)  # the turn ends on the grid or one token past it
        hits.append(request.num_cached)
        text = [*request.tokens, turn] if len(request.tokens) % 4 else [*request.tokens, turn, turn]
    assert any(hits)
    rig.idle()
