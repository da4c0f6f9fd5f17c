"""The runner alone: what it says of rows, what it holds, and that nothing compiles once it is warm."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles.runner_rig import (
    BUCKETS,
    GREEDY,
    NUM_VALID,
    SIZES,
    blocks,
    export,
    make_runner,
    pending,
    row,
    run,
    small_config,
    small_model,
    span,
)

from gdn_jax.model import LanguageModel
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.plan import RowResult, StepPlan
from gdn_jax.serving.runner import runner as runner_module
from gdn_jax.serving.runner.lanes import MAX_BANNED
from gdn_jax.serving.runner.prompt_scores import ScoredPrompt
from gdn_jax.serving.runner.runner import RequestSampling, Runner
from gdn_jax.serving.runner.sampling import RowSampling
from gdn_jax.state import RecurrentState

BAD = 7  # a token whose embedding is not a number


def broken_model(dtype: str = "float32") -> LanguageModel:
    """A model whose embedding of one token is NaN."""
    model = small_model(dtype)
    table = model.decoder.embed_tokens.weight
    table[...] = table[...].at[BAD].set(jnp.nan)
    return model


@pytest.fixture(scope="module")
def broken() -> LanguageModel:
    return broken_model()


def scoring(prompt: Sequence[int], num_top: int) -> RequestSampling:
    scored = ScoredPrompt(token_ids=list(prompt), num_top=num_top)
    return RequestSampling(row=RowSampling(), num_logprobs=None, scored_prompt=scored)


def soundness(results: Sequence[RowResult]) -> list[bool]:
    return [result.finite for result in results]


# A row's numbers.


@pytest.mark.parametrize("place", [0, 63, 64, 69], ids=["first", "before-a-boundary", "at-a-boundary", "last"])
def test_a_span_with_a_nan_in_any_place_is_told_though_it_emits_nothing(broken: LanguageModel, place: int) -> None:
    tokens = [1 + index % 5 for index in range(70)]
    tokens[place] = BAD
    rows = (span("bad", 0, tokens), span("sound", 1, range(10, 30)), span("emits", 2, range(10, 30), emits=True))
    results = run(make_runner(broken), *rows)
    assert soundness(results) == [False, True, True]
    assert [len(result.tokens) for result in results] == [0, 0, 1]


def test_a_nan_that_only_the_last_layer_made_is_told_since_it_is_exported_as_hidden_vector() -> None:
    """The feed-forward of the last layer reaches neither states nor pages, but the vector that a slot keeps."""
    model = small_model()
    down = model.decoder.layers[1].mlp.down_proj.weight
    down[...] = down[...].at[0, 0].set(jnp.inf)
    results = run(make_runner(model), span("a", 0, range(10, 30)))
    assert soundness(results) == [False]


def test_a_pending_token_with_nan_is_told_and_its_neighbours_are_not(broken: LanguageModel) -> None:
    runner = make_runner(broken)
    run(runner, *(span(name, lane, range(10, 30)) for lane, name in enumerate("abc")))
    results = run(runner, pending("a", 0, BAD, 20), pending("b", 1, 9, 20), pending("c", 2, 9, 20))
    assert soundness(results) == [False, True, True]
    results = run(runner, *(pending(name, lane, 9, 21, num_replay=1) for lane, name in enumerate("abc")))
    assert soundness(results) == [False, True, True]  # what the bad token left in the state


def test_a_closing_row_is_sound_since_the_step_that_ran_its_tokens_was(broken: LanguageModel) -> None:
    runner = make_runner(broken)
    run(runner, span("a", 0, range(10, 73)))
    assert soundness(run(runner, pending("a", 0, 9, 63))) == [True]
    closing = pending("a", 0, 0, 64, tokens=(), num_replay=1, emits=False, exports=(export(64, 5),))
    (result,) = run(runner, closing)
    assert (result.tokens, result.saved, result.finite) == ((), (64,), True)


def test_a_state_beyond_float16_is_told_where_states_are_stored_so() -> None:
    """Its computation is sound, and so are the outputs: the gated norm takes any size."""
    model = small_model()
    projection = model.decoder.layers[0].mixer.in_proj_qkv.weight
    projection[...] = projection[...] * 1e5
    found = {}
    for name in ("float32", "float16"):
        runner = make_runner(model, sizes=replace(SIZES, state_dtype=name))
        results = [*run(runner, span("a", 0, range(10, 30)))]
        results += run(runner, pending("a", 0, 9, 20))
        found[name] = soundness(results)
    assert found == {"float32": [True, True], "float16": [False, False]}


def test_saved_boundaries_are_those_the_kernels_stored(broken: LanguageModel) -> None:
    runner = make_runner(broken)
    whole = span("a", 0, range(10, 138), exports=(export(64, 4), export(128, 5)))
    assert [result.saved for result in run(runner, whole)] == [(64, 128)]
    hidden = np.asarray(runner.state.hidden)
    assert np.isfinite(hidden[[4, 5]]).all()
    assert not np.isfinite(hidden[6]).any()


# What a step costs.


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect what JAX traces or compiles, eager operations too."""
    events: list[str] = []
    live = [True]

    def listen(event: str, duration: float, **_: object) -> None:
        if live[0] and ("trace" in event or "compile" in event):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    live[0] = False  # a listener cannot be taken back


def test_compilations_are_seen() -> None:
    with compilations() as events:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones((3, 7)))
    assert events


def test_nothing_is_traced_after_warm_up_whatever_requests_ask_for(broken: LanguageModel) -> None:
    buckets = replace(BUCKETS, table_blocks=(2, 4))
    runner, reports = make_runner(broken, buckets=buckets), []
    runner.warm_up(lambda done, total: reports.append((done, total)))
    assert reports == [(done, 5) for done in range(1, 6)]
    assert not np.isfinite(np.asarray(runner.state.hidden)).any()  # padding alone changes nothing
    runner.reset()
    asked = [
        GREEDY,
        RequestSampling(row=RowSampling(banned=tuple(range(65)), banned_until=99), num_logprobs=20),
        RequestSampling(row=RowSampling(banned=tuple(range(MAX_BANNED)), banned_until=99), num_logprobs=None),
        RequestSampling(row=RowSampling(temperature=0.7, top_k=3, top_p=0.5, min_p=0.1, seed=2**63), num_logprobs=0),
        scoring(range(10, 30), num_top=4),
    ]
    with compilations() as events:
        for sampling in asked:
            run(runner, span("a", 0, range(10, 30), emits=True), sampling=sampling)
            run(runner, pending("a", 0, 9, 20), sampling=sampling)
            runner.forget(row("a").request_id)
        run(runner, *(span(name, lane, range(10, 30)) for lane, name in enumerate("abc")))
        mixed = (pending("a", 0, 9, 20), pending("b", 1, 9, 20), span("d", 2, range(64), emits=True))
        run(runner, *mixed)
        run(runner, span("e", 0, range(64), new_blocks=blocks(1, 2, 3, 4)))
    assert events == []
    assert runner.num_compiled == 5


def test_a_step_asks_the_device_once_and_gets_one_array_per_call(broken: LanguageModel, monkeypatch: Any) -> None:
    runner = make_runner(broken)
    run(runner, *(span(name, lane, range(10, 30)) for lane, name in enumerate("ab")))
    asked: list[list[jax.Array]] = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda arrays: asked.append(arrays) or device_get(arrays))
    wanting = RequestSampling(row=RowSampling(), num_logprobs=5)
    results = run(runner, pending("a", 0, 9, 20), span("c", 2, range(8), emits=True), sampling=wanting)
    assert [len(result.tokens) for result in results] == [1, 1]
    assert [len(arrays) for arrays in asked] == [2]
    assert all(array.dtype == jnp.int32 for array in asked[0])


def test_a_step_gets_bare_arrays_since_a_tree_of_modules_takes_milliseconds_to_take_apart(
    broken: LanguageModel,
) -> None:
    runner = make_runner(broken)
    assert type(runner._params) is tuple
    assert all(isinstance(leaf, jax.Array) for leaf in runner._params)
    assert len(runner._params) == len(jax.tree.leaves(nnx.state(broken)))


def test_scores_of_prompts_come_with_the_one_transfer_of_the_step(
    broken: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(broken)
    asked: list[list[jax.Array]] = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda arrays: asked.append(arrays) or device_get(arrays))
    (result,) = run(runner, span("a", 0, range(10, 30)), sampling=scoring(range(10, 99), num_top=3))
    assert [len(one.top_ids) for one in result.prompt_logprobs] == [3] * 20  # the last one's next is in the next span
    assert result.tokens == result.logprobs == ()
    assert [[array.dtype for array in arrays] for arrays in asked] == [[jnp.int32, jnp.int32]]


def test_each_span_scores_the_tokens_after_its_own_up_to_the_prompts_end(broken: LanguageModel) -> None:
    """In one call or in two, beside others, and where a span goes on beyond the prompt."""
    prompt = list(range(10, 110))
    alone = run(make_runner(broken), span("a", 0, prompt), sampling=scoring(prompt, num_top=2))[0].prompt_logprobs
    assert len(alone) == 99
    runner = make_runner(broken)
    runner.add(row("a").request_id, scoring(prompt, num_top=2))
    runner.add(row("b").request_id, GREEDY)
    first = [span("b", 1, range(30, 55)), span("a", 0, prompt[:64])]
    later = span("a", 0, [*prompt[64:], 5, 6], start=64, read_anchor=1, table_start=2, new_blocks=())
    parts = [runner.run(StepPlan(index=0, rows=tuple(rows))).rows for rows in (first, [later])]
    assert [len(result.prompt_logprobs) for result in parts[0]] == [0, 64]
    together = [*parts[0][1].prompt_logprobs, *parts[1][0].prompt_logprobs]
    assert [one.top_ids for one in together] == [one.top_ids for one in alone]
    assert [one.rank for one in together] == [one.rank for one in alone]
    np.testing.assert_allclose([one.chosen for one in together], [one.chosen for one in alone], atol=1e-5, rtol=0)


# What it holds.


def pool_arrays(runner: Runner) -> list[jax.Array]:
    return jax.tree.leaves(runner.state)


def test_old_pools_are_gone_before_new_ones_are_made(broken: LanguageModel, monkeypatch: Any) -> None:
    """Both at once do not fit a device that the pools were made to fill."""
    runner = make_runner(broken)
    old = [weakref.ref(array) for array in pool_arrays(runner)]
    alive: list[int] = []
    make_state = runner_module.make_device_state

    def watching(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        alive.append(sum(ref() is not None for ref in old))
        return make_state(*args, **kwargs)

    monkeypatch.setattr(runner_module, "make_device_state", watching)
    assert all(ref() is not None for ref in old)
    runner.reset()
    assert alive == [0]
    assert all(not np.any(array) for array in pool_arrays(runner))


def test_pools_that_could_not_be_made_again_stop_the_engine_with_words(broken: LanguageModel, monkeypatch: Any) -> None:
    runner = make_runner(broken)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner_module, "make_device_state", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.reset()
    with pytest.raises(InvariantError, match="pools are lost"):
        run(runner, span("a", 0, range(10, 30)))


def test_a_row_of_a_request_that_nobody_made_known_is_a_bug(broken: LanguageModel) -> None:
    runner = make_runner(broken)
    run(runner, span("a", 0, range(10, 30)))
    runner.forget(row("a").request_id)
    with pytest.raises(InvariantError, match="request a has a row and was never made known"):
        runner._assign_lane(span("a", 0, range(10, 30)))


def test_a_finished_request_clears_its_lane_and_not_one_that_another_has_got(broken: LanguageModel) -> None:
    """A preempted request loses its lane without a word; its next owner's parameters stay."""
    runner = make_runner(broken)
    hot = RequestSampling(row=RowSampling(temperature=0.5), num_logprobs=2)
    run(runner, span("a", 0, range(10, 30)), span("b", 1, range(10, 30)), sampling=hot)
    run(runner, span("c", 0, range(10, 30)), sampling=hot)
    runner.forget(row("a").request_id)
    assert [runner._lanes.num_top(lane) for lane in (0, 1)] == [2, 2]
    runner.forget(row("b").request_id)
    assert [runner._lanes.num_top(lane) for lane in (0, 1)] == [2, None]
    runner.forget(row("nobody").request_id)
    runner.add(row("d").request_id, scoring([5, 6], num_top=0))
    runner.forget(row("d").request_id)
    assert runner._scored == {}


def test_a_model_without_head_has_no_pages_for_it() -> None:
    assert small_config().num_mtp_layers == 0
    runner = make_runner()
    assert runner.state.mtp is None
    assert sum(isinstance(layer, RecurrentState) for layer in runner.state.layers) == 1
    assert small_config().vocab_size > NUM_VALID
