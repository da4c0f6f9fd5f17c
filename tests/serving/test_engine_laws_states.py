"""What stands in the cache is right, what nobody owns never counts, and a step of padding alone changes nothing."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.engine_rig import (
    Oracle,
    ask,
    assert_right,
    cached,
    greedy,
    idle,
    make_llm,
    poison_what_nobody_owns,
    put_state,
    random_ids,
    runner_of,
    scheduler_of,
    step,
    tiny_oracle,
    tokens_of,
)

from gdn_jax import LLM
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.state import KVPages, ModelState, RecurrentState


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


# Every published checkpoint equals a fresh computation of its tokens.


@pytest.mark.parametrize("mode", ["align", "all"])
def test_every_checkpoint_and_block_equals_a_fresh_computation_after_every_step(oracle: Oracle, mode: str) -> None:
    """Saved by prefill, by folds and by closing rows; with hits, preemptions and evictions in between."""
    llm = make_llm(prefix_cache=mode, state_interval=64, num_blocks=8, num_state_slots=6, audit=True)
    prompts = [random_ids(seed, 90 + 20 * seed) for seed in range(3)]
    outputs = ask(llm, prompts, greedy(70))
    turn = [*prompts[0], *tokens_of(outputs)[0], 5, 6]
    outputs += ask(llm, [turn, random_ids(7, 64)], greedy(20))
    assert cached(outputs[-2:]) == [128, 0]
    assert_right(outputs, oracle)
    stats = llm.stats()
    assert min(stats.preemptions, stats.saves - stats.checkpoints, stats.evictions, stats.checkpoints) > 0


def test_a_checkpoint_or_page_that_something_overwrites_stops_an_audited_engine() -> None:
    for kind in (RecurrentState, KVPages):
        llm = make_llm(state_interval=64, audit=True)
        ask(llm, [random_ids(1, 70)], greedy(2))
        holdings = scheduler_of(llm).holdings
        (slot,), (page,) = holdings.checkpoints.names().values(), holdings.blocks.names().values()
        runner = runner_of(llm)
        layers = list(runner.state.layers)
        index = next(index for index, layer in enumerate(layers) if isinstance(layer, kind))
        if kind is RecurrentState:
            layers[index] = replace(layers[index], conv=layers[index].conv.at[slot, 0, 0].add(1.0))
        else:
            layers[index] = replace(layers[index], v=layers[index].v.at[page, 0, 0, 0].add(1.0))
        put_state(runner, replace(runner.state, layers=tuple(layers)))
        with pytest.raises(InvariantError, match="differs from a fresh computation"):
            ask(llm, [[1, 2, 3]], greedy(2))


def slot_content(llm: LLM, tokens: list[int], boundary: int) -> list[np.ndarray]:
    """Return the arrays of the checkpoint after so many tokens."""
    scheduler = scheduler_of(llm)
    names = llm._engine._scheduler.holdings.checkpoints.names()
    probe = scheduler.add("probe", [*tokens[:boundary], 0], max_tokens=1)  # type: ignore[arg-type]
    slot = names[probe.chain.name(probe.tokens, boundary)]
    scheduler.abort(probe.request_id)
    state = runner_of(llm).state
    layers = [layer for layer in state.layers if isinstance(layer, RecurrentState)]
    arrays = [*(layer.recurrent for layer in layers), *(layer.conv for layer in layers), state.hidden]
    return [np.asarray(array[slot]) for array in arrays]


def test_a_state_exported_inside_a_span_has_the_bits_of_a_span_that_ends_there() -> None:
    settings = {"deterministic": True, "state_interval": 64}
    prompt = random_ids(1, 256)
    whole = make_llm(**settings)
    ask(whole, [prompt], greedy(1))
    for boundary in (64, 128, 192):
        part = make_llm(**settings)
        ask(part, [prompt[:boundary]], greedy(1))
        found, expected = slot_content(whole, prompt, boundary), slot_content(part, prompt, boundary)
        for array, other in zip(found, expected, strict=True):
            assert np.isfinite(array).all()
            np.testing.assert_array_equal(array, other)


# Unowned slots and pages never reach an output.


def test_what_nobody_owns_may_hold_nan_at_any_time(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    prompt = random_ids(1, 130)
    stream = llm.stream(prompt, greedy(40))
    step(llm, 5)
    poison_what_nobody_owns(llm)
    late = ask(llm, [random_ids(2, 65), [*prompt, 3]], greedy(8))
    assert cached(late) == [0, 128]
    assert_right([*late, list(stream)[-1]], oracle)


def test_nan_in_one_requests_state_ends_that_request_alone_and_none_of_it_is_found(
    oracle: Oracle, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm()
    prompts = [random_ids(seed, 70) for seed in range(3)]
    streams = [llm.stream(prompt, greedy(20)) for prompt in prompts]
    step(llm, 4)
    slot = scheduler_of(llm).running()[1].slot
    runner = runner_of(llm)
    layers = tuple(
        replace(layer, recurrent=layer.recurrent.at[slot].set(jnp.nan)) if isinstance(layer, RecurrentState) else layer
        for layer in runner.state.layers
    )
    put_state(runner, replace(runner.state, layers=layers))
    ends = [list(stream)[-1] for stream in streams]
    assert [end.outputs[0].finish_reason for end in ends] == ["length", "error", "length"]
    assert len(ends[1].outputs[0].token_ids) == 5  # of four steps, and of the one that was in flight
    assert "not finite" in caplog.text
    assert_right([ends[0], ends[2]], oracle)
    assert idle(llm.stats())
    again = ask(llm, prompts, greedy(8))  # on slots and pages that held NaN
    assert cached(again) == [64, 64, 64]  # from checkpoints that were published before
    assert_right(again, oracle)


@pytest.mark.parametrize("length", [60, 130, 300])
def test_a_prompt_whose_numbers_go_wrong_leaves_nothing_to_hit(oracle: Oracle, length: int) -> None:
    """Parameters are broken during the first call; a long prompt goes on with sound ones if it is not ended there."""
    llm = make_llm(state_interval=64, max_num_batched_tokens=64 if length == 300 else 256)
    runner, prompt = runner_of(llm), random_ids(1, length)
    sound = runner._params
    runner._params = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), sound)
    stream = llm.stream(prompt, greedy(8))
    step(llm)
    runner._params = sound
    (broken,) = stream
    assert (broken.outputs[0].finish_reason, broken.outputs[0].token_ids) == ("error", [])
    stats = llm.stats()
    assert idle(stats)
    assert (stats.checkpoints, stats.saves) == (0, 0)
    assert scheduler_of(llm).holdings.blocks.names() == {}
    again = ask(llm, [prompt], greedy(8))
    assert cached(again) == [0]
    assert_right(again, oracle)


# A dummy step changes nothing.


def content(state: ModelState) -> list[np.ndarray]:
    """Return every array of a state, without what padding may write: the null slot and the null page."""
    pooled: list[Any] = []
    for layer in state.layers:
        pooled += [layer.k, layer.v] if isinstance(layer, KVPages) else [layer.recurrent, layer.conv]
    others = [leaf for leaf in jax.tree.leaves(state) if not any(leaf is one for one in [*pooled, state.hidden])]
    return [*(np.array(array)[1:] for array in [*pooled, state.hidden]), *map(np.array, others)]


def test_steps_of_padding_alone_change_nothing_even_in_the_middle_of_an_answer(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    prompt = random_ids(1, 100)
    stream = llm.stream(prompt, greedy(40))
    step(llm, 10)
    before = content(runner_of(llm).state)
    runner_of(llm).warm_up()
    for old, new in zip(before, content(runner_of(llm).state), strict=True):
        np.testing.assert_array_equal(old, new)  # NaN equals NaN
    assert_right([list(stream)[-1]], oracle)
    warm = ask(llm, [[*prompt, 4]], greedy(8))
    assert cached(warm) == [64]
    assert_right(warm, oracle)


def test_the_first_answer_after_warm_up_is_that_of_an_engine_without(oracle: Oracle) -> None:
    plain, warmed = make_llm(), make_llm()
    runner_of(warmed).warm_up()
    prompts = [random_ids(1, 66), random_ids(2, 3)]
    first, second = (ask(llm, prompts, greedy(8)) for llm in (plain, warmed))
    assert tokens_of(first) == tokens_of(second)
    assert_right(second, oracle)
