"""The laws of the engine, on a tiny float32 model whose every answer a float64 oracle knows.

Cold, warm, chunked, batched, preempted and hit into generated text, a request gives the same tokens; after the last one
nothing is held. Pools start full of NaN (see the rig), so every test also shows that what nobody owns never counts.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from oracles.checkpoints import write_checkpoint
from oracles.engine_rig import (
    Oracle,
    ask,
    assert_right,
    cached,
    greedy,
    idle,
    make_llm,
    random_ids,
    runner_of,
    scheduler_of,
    tiny_oracle,
    tokens_of,
)

from gdn_jax import LLM, SamplingParams
from gdn_jax.serving.core.errors import InvariantError
from gdn_jax.serving.core.plan import Phase, StepPlan, StepResult
from gdn_jax.state import KVPages, RecurrentState

LENGTHS = (1, 3, 63, 64, 65, 130)
NEAR_BOUNDARIES = (*range(62, 67), *range(126, 131))
MODES = ("none", "align", "all")


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


def floor(count: int) -> int:
    """The last boundary at or before a token count."""
    return count // 64 * 64


def step(llm: LLM, times: int = 1) -> None:
    """Run steps for whoever is live."""
    for _ in range(times):
        llm._step()


# Law 1: the same tokens, however they are computed.


@pytest.mark.parametrize("budget", [64, 256])
@pytest.mark.parametrize("mode", MODES)
def test_alone_batched_chunked_and_warm_give_the_oracles_tokens(oracle: Oracle, mode: str, budget: int) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, max_num_batched_tokens=budget)
    prompts = [oracle.lively(length, 12) for length in LENGTHS]
    batched = ask(llm, prompts, greedy(12))
    assert_right(batched, oracle)
    assert cached(batched) == [0] * len(prompts)
    for prompt in prompts:
        alone = ask(llm, [prompt], greedy(12))
        assert_right(alone, oracle)
        assert cached(alone) == [0 if mode == "none" else floor(len(prompt) - 1)]
    assert idle(llm.stats())


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_go_on_as_if_nothing_had_happened(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, num_blocks=8)
    prompts = [oracle.lively(100 + index, 100, seed=index) for index in range(4)]
    outputs = ask(llm, prompts, greedy(100))
    assert llm.stats().preemptions > 0
    assert_right(outputs, oracle)
    assert idle(llm.stats())


def test_one_slot_serves_everybody_in_turn_and_hands_over_nothing(oracle: Oracle, caplog: Any) -> None:
    """A request whose hit is in the only slot takes that checkpoint over; an unrelated one starts from nothing."""
    llm = make_llm(num_state_slots=1)
    assert "max_num_seqs is 1 instead of 4" in caplog.text
    first, second = oracle.lively(118, 12), oracle.lively(70, 12)  # the first one's turn ends one token past a boundary
    (answer,) = tokens_of(ask(llm, [first], greedy(12)))
    turn = [*first, *answer, *random_ids(1, 9)]
    for prompt, hit in (
        (turn, 128),
        (turn, 0),
        (second, 0),
        (first, 0),
        (second, 0),
        (turn, 0),
        (first, 0),
        (turn, 128),
    ):
        outputs = ask(llm, [prompt], greedy(12))
        assert cached(outputs) == [hit]
        assert_right(outputs, oracle)


@pytest.mark.parametrize("generated", [30, 65])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_the_next_turn_hits_into_the_generated_text(oracle: Oracle, mode: str, generated: int) -> None:
    llm = make_llm(prefix_cache=mode)
    prompt = oracle.lively(100, generated)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(generated)))
    turn = [*prompt, *answer, *random_ids(5, 9)]
    outputs = ask(llm, [turn], greedy(12))
    assert cached(outputs) == [128]
    assert_right(outputs, oracle)


def test_a_turn_that_edits_the_generated_text_hits_an_interval_checkpoint_inside_it(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    prompt = oracle.lively(70, 130)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(130)))
    edited = [*prompt, *answer[:70], *random_ids(6, 20)]
    outputs = ask(llm, [edited], greedy(12))
    assert cached(outputs) == [128]
    assert_right(outputs, oracle)


def test_decode_rows_run_beside_a_prefill_of_the_whole_budget(oracle: Oracle) -> None:
    llm = make_llm(prefix_cache="none")
    running, long = oracle.lively(40, 30), oracle.lively(256, 12)
    stream = llm.stream(running, greedy(30))
    step(llm, 3)
    plans = record_plans(llm)
    (late,) = ask(llm, [long], greedy(12))
    assert {row.phase for row in plans[0].rows} == {Phase.PREFILL, Phase.DECODE}
    assert len(plans[0].rows[1].tokens) == 256
    assert_right([late, *list(stream)[-1:]], oracle)


def test_a_mixture_of_experts_gives_the_oracles_tokens_cold_warm_and_batched(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "q35-moe", 3, dtype="float32", hidden_size=48, num_experts=6, vision=False)
    oracle = Oracle(folder, 318)
    # Prompts on which float32 may choose another expert than float64 are of no use.
    prompts: list[list[int]] = []
    for length in (3, 65, 130):
        seed = 0
        while True:
            oracle.model.smallest_router_gap = 1.0
            prompt = oracle.lively(length, 8, seed=seed)
            if oracle.model.smallest_router_gap > 1e-5:
                break
            seed += 1
        prompts.append(prompt)
    llm = make_llm(folder, deterministic=True, state_interval=64)
    assert_right(ask(llm, prompts, greedy(8)), oracle)
    warm = ask(llm, prompts, greedy(8))
    assert_right(warm, oracle)
    assert cached(warm) == [0, 64, 128]


def test_deterministic_bfloat16_answers_are_equal_bits_cold_warm_and_batched() -> None:
    llm = make_llm(dtype="bfloat16", deterministic=True, max_num_batched_tokens=64, state_interval=64)
    prompts = [random_ids(length, length) for length in (20, 65, 150)]
    cold = [ask(llm, [prompt], greedy(12))[0] for prompt in prompts]
    warm = ask(llm, prompts, greedy(12))
    assert cached(warm) == [0, 64, 128]
    for one, other in zip(cold, warm, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def test_sampled_tokens_depend_on_seed_and_prompt_alone() -> None:
    llm = make_llm()
    prompts = [random_ids(length, length) for length in (5, 64, 100, 130)]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(4)]
    together = tokens_of(ask(llm, prompts, *params))
    alone = [tokens_of(ask(llm, [prompt], one))[0] for prompt, one in zip(prompts, params, strict=True)]
    assert alone == together
    assert len({tuple(tokens) for tokens in together}) == 4


# Law 8: the length of a hit is that of the rules, and every warm answer is right.


@pytest.mark.parametrize("mode", ["align", "all"])
def test_hits_near_boundaries_are_as_long_as_the_rules_say(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode)
    for length in NEAR_BOUNDARIES:
        llm.reset_prefix_cache()
        prompt = oracle.lively(length, 5)
        (answer,) = tokens_of(ask(llm, [prompt], greedy(5)))
        resend = ask(llm, [prompt], greedy(5))
        sibling = ask(llm, [[*prompt, *random_ids(1, 6)]], greedy(3))
        turn = ask(llm, [[*prompt, *answer, *random_ids(2, 6)]], greedy(3))
        assert cached(resend) == [floor(length - 1)], length
        assert cached(sibling) == [floor(length)], length
        assert cached(turn) == [floor(length + 5 - 1)], length
        for outputs in (resend, sibling, turn):
            assert_right(outputs, oracle)


def test_a_prompt_of_whole_blocks_still_runs_its_last_token_and_its_extension_still_hits(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(128, 8)
    assert cached(ask(llm, [prompt], greedy(8))) == [0]
    resend = ask(llm, [prompt], greedy(8))
    longer = ask(llm, [[*prompt, *random_ids(3, 40)]], greedy(8))
    assert (cached(resend), cached(longer)) == ([64], [128])
    assert_right([*resend, *longer], oracle)


def test_text_inserted_in_the_middle_ends_the_hit_there(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    blocks = [random_ids(seed, 64) for seed in range(4)]
    ask(llm, [[*blocks[0], *blocks[1], 7]], greedy(2))
    outputs = ask(llm, [[*blocks[0], *blocks[2], *blocks[1], 7]], greedy(8))
    assert cached(outputs) == [64]
    assert_right(outputs, oracle)


@pytest.mark.parametrize(("mode", "third"), [("align", 192), ("all", 192)])
def test_prompts_that_part_inside_a_block_share_the_blocks_before_it(oracle: Oracle, mode: str, third: int) -> None:
    """In `align` the second request to part there leaves the junction for the third; `all` has it at once."""
    llm = make_llm(prefix_cache=mode, state_interval=64)
    common = random_ids(1, 64 * 3 + 32)
    prompts = [[*common, *random_ids(seed, 100)] for seed in (11, 12, 13)]
    hits = [cached(ask(llm, [prompt], greedy(2)))[0] for prompt in prompts]
    assert hits == [0, 0 if mode == "align" else 192, third]
    outputs = ask(llm, prompts, greedy(8))
    assert_right(outputs, oracle)
    assert llm.stats().gap_tokens == (192 if mode == "align" else 0)


def test_decode_far_beyond_the_prompt_keeps_the_prompts_checkpoint(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(192, 250)
    ask(llm, [prompt], greedy(250))
    outputs = ask(llm, [[*prompt, 5]], greedy(8))
    assert cached(outputs) == [192]
    assert_right(outputs, oracle)


def test_each_turn_of_a_growing_conversation_reuses_the_one_before(oracle: Oracle) -> None:
    llm = make_llm()
    text = oracle.lively(50, 20)
    expected = 0
    for turn in range(5):
        (output,) = ask(llm, [text], greedy(20))
        assert output.num_cached_tokens == expected
        assert_right([output], oracle)
        answer = output.outputs[0].token_ids
        expected = floor(len(text) + len(answer) - 1)
        text = [*text, *answer, *random_ids(100 + turn, 30)]
    assert expected > 200


def test_states_may_go_while_blocks_stay_and_the_answer_is_still_right(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(200, 8)
    ask(llm, [prompt], greedy(8))
    scheduler_of(llm).holdings.checkpoints.drop_all()
    outputs = ask(llm, [prompt], greedy(8))
    assert cached(outputs) == [0]
    assert llm.stats().gap_tokens == 192
    assert_right(outputs, oracle)


# Laws 5 and 6: same step, same prefix; nobody starves.


@pytest.mark.parametrize("count", [2, 4])
def test_twins_in_one_step_read_nothing_that_the_other_is_writing(oracle: Oracle, count: int) -> None:
    llm = make_llm(state_interval=64)
    prompt = oracle.lively(130, 12)
    outputs = ask(llm, [prompt] * count, greedy(12))
    assert_right(outputs, oracle)
    assert idle(llm.stats())


def test_siblings_wait_for_the_first_ones_prompt_and_start_from_it(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(130, 12)
    outputs = ask(llm, [prompt], greedy(12, n=3))
    assert_right(outputs, oracle)
    assert len(outputs[0].outputs) == 3
    assert llm.stats().hit_tokens == 2 * 128
    assert llm.stats().prefilled_tokens == 130 + 2 * 2


def test_many_more_siblings_than_lanes_all_come_back(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(65, 6)
    outputs = ask(llm, [prompt], greedy(6, n=9))
    assert_right(outputs, oracle)
    assert len(outputs[0].outputs) == 9


def test_two_long_prompts_advance_on_a_budget_that_is_no_multiple_of_a_block(oracle: Oracle) -> None:
    llm = make_llm(max_num_batched_tokens=127, prefix_cache="all", state_interval=64)
    prompts = [oracle.lively(450, 4, seed=seed) for seed in range(2)]
    assert_right(ask(llm, prompts, greedy(4)), oracle)


def test_short_prompts_are_not_held_up_by_a_long_one_before_them(oracle: Oracle) -> None:
    llm = make_llm(max_num_batched_tokens=64 * 2)
    ends = record_ends(llm)
    prompts = [oracle.lively(450, 2), oracle.lively(20, 2), oracle.lively(21, 2)]
    assert_right(ask(llm, prompts, greedy(2)), oracle)
    assert ends[-1] == "0"


def test_lower_priority_numbers_go_first(oracle: Oracle) -> None:
    llm = make_llm(max_num_seqs=1)
    ends = record_ends(llm)
    prompts = [oracle.lively(20, 4, seed=seed) for seed in range(3)]
    outputs = ask(llm, prompts, greedy(4), priority=[5, -1, 0])
    assert ends == ["1", "2", "0"]
    assert_right(outputs, oracle)  # in the order of the prompts all the same


# Law 4: nothing stays held.


@pytest.mark.parametrize("steps", [0, 1, 2, 4, 7])
def test_a_stream_left_in_the_middle_frees_everything_and_the_same_prompt_then_answers_right(
    oracle: Oracle, steps: int
) -> None:
    llm = make_llm(max_num_batched_tokens=64, state_interval=64)
    prompt = oracle.lively(200, 12)
    stream = llm.stream(prompt, greedy(12))
    step(llm, steps)
    stream.close()
    assert idle(llm.stats())
    retry = ask(llm, [prompt], greedy(12))
    assert cached(retry) == [floor(min(64 * steps, 199))]
    assert_right(retry, oracle)


def test_a_stream_that_nobody_reads_is_dropped_with_its_iterator() -> None:
    llm = make_llm()
    stream = llm.stream(random_ids(1, 30), greedy())
    assert llm.stats().waiting == 1
    del stream
    assert idle(llm.stats())


def test_waiting_requests_that_are_aborted_leak_nothing(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(130, 8)
    ask(llm, [prompt], greedy(8))
    before = llm.stats().checkpoints
    for _ in range(50):
        streams = [llm.stream(prompt, greedy(8)) for _ in range(6)]  # two more than there are lanes
        step(llm)
        for stream in streams:
            stream.close()
    assert idle(llm.stats())
    assert llm.stats().checkpoints == before
    assert_right(ask(llm, [prompt], greedy(8)), oracle)


def test_a_request_that_ends_in_its_first_step_gives_everything_back() -> None:
    llm = make_llm()
    long = llm.stream(random_ids(1, 40), greedy(60))
    for seed in range(40):
        ask(llm, [random_ids(seed, 3), random_ids(seed, 70)], greedy(1))
    list(long)
    assert idle(llm.stats())


def test_a_finished_neighbour_of_an_aborted_stream_leaves_nothing_behind() -> None:
    llm = make_llm()
    ending, going_on = llm.stream(random_ids(1, 62), greedy(4)), llm.stream(random_ids(2, 30), greedy(40))
    list(ending)
    going_on.close()
    assert idle(llm.stats())
    read_late, dropped = llm.stream(random_ids(3, 62), greedy(4)), llm.stream(random_ids(4, 30), greedy(40))
    step(llm, 4)  # the first one ends unread, and its closing row is still to come
    dropped.close()
    assert idle(llm.stats())
    assert [len(output.outputs[0].token_ids) for output in read_late][-1] == 4


def test_books_of_any_length_are_those_of_a_fresh_engine_after_hundreds_of_requests() -> None:
    llm = make_llm()
    for seed in range(60):
        ask(llm, [random_ids(seed + part, 1 + seed % 5) for part in range(5)], greedy(1 + seed % 2))
    engine, scheduler, runner = llm._engine, scheduler_of(llm), runner_of(llm)
    for book in (llm._live, engine._cutters, runner._requests, scheduler._requests, scheduler._waiting):
        assert len(book) == 0
    scheduler.check()
    assert idle(llm.stats())


# Sharing.


def test_a_cache_salt_separates_and_an_equal_one_shares(oracle: Oracle) -> None:
    llm = make_llm()
    prompt = oracle.lively(130, 8)
    hits = []
    for salt in ("", "alice", "bob", "alice", ""):
        outputs = ask(llm, [prompt], greedy(8), cache_salt=salt)
        assert_right(outputs, oracle)
        hits += cached(outputs)
    assert hits == [0, 0, 0, 128, 128]


def test_a_reset_cache_knows_nothing_and_requests_under_way_go_on(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64, max_num_batched_tokens=64)
    prompts = [oracle.lively(150, 60, seed=seed) for seed in range(2)]
    streams = [llm.stream(prompt, greedy(60)) for prompt in prompts]
    for steps in (2, 20):  # in the middle of prefill and of decode
        step(llm, steps)
        llm.reset_prefix_cache()
        assert llm.stats().checkpoints == 0
    assert_right([list(stream)[-1] for stream in streams], oracle)
    assert llm.stats().checkpoints == 0  # what they compute belongs to the old cache
    cold = ask(llm, prompts, greedy(8))
    assert cached(cold) == [0, 0]
    assert cached(ask(llm, prompts, greedy(8))) == [128, 128]
    assert_right(cold, oracle)


# Law 3 and faults of the device.


def test_what_nobody_owns_may_hold_nan_at_any_time(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    prompt = oracle.lively(130, 40)
    stream = llm.stream(prompt, greedy(40))
    step(llm, 5)
    poison_what_nobody_owns(llm)
    late = ask(llm, [oracle.lively(65, 8), [*prompt, 3]], greedy(8))
    assert cached(late) == [0, 128]
    assert_right([*late, list(stream)[-1]], oracle)


def test_nan_in_one_requests_state_ends_that_request_alone(oracle: Oracle, caplog: Any) -> None:
    llm = make_llm()
    prompts = [oracle.lively(70, 20, seed=seed) for seed in range(3)]
    streams = [llm.stream(prompt, greedy(20)) for prompt in prompts]
    step(llm, 4)
    slot = scheduler_of(llm)._running[1].slot
    runner = runner_of(llm)
    layers = tuple(
        replace(layer, recurrent=layer.recurrent.at[slot].set(jnp.nan)) if isinstance(layer, RecurrentState) else layer
        for layer in runner._state.layers
    )
    runner._state = replace(runner._state, layers=layers)
    ends = [list(stream)[-1] for stream in streams]
    assert [end.outputs[0].finish_reason for end in ends] == ["length", "error", "length"]
    assert len(ends[1].outputs[0].token_ids) == 4
    assert "not finite" in caplog.text
    assert_right([ends[0], ends[2]], oracle)
    assert idle(llm.stats())
    assert_right(ask(llm, prompts, greedy(8)), oracle)  # on slots and pages that held NaN


@pytest.mark.parametrize("name", ["prefill_step", "advance_step"])
def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(
    oracle: Oracle, name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    llm = make_llm(state_interval=64)
    prompts = [oracle.lively(130, 12, seed=seed) for seed in range(2)]
    ask(llm, prompts, greedy(12))
    fail_once(monkeypatch, name, RuntimeError("the device says no"))
    outputs = ask(llm, prompts, greedy(12))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert all(len(tokens) < 12 for tokens in tokens_of(outputs))
    assert "the device says no" in caplog.text
    stats = llm.stats()
    assert idle(stats)
    assert (stats.failed_steps, stats.checkpoints) == (1, 0)
    again = ask(llm, prompts, greedy(12))
    assert cached(again) == [0, 0]
    assert_right(again, oracle)


def test_requests_that_had_no_row_in_a_failed_step_are_run_again(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts fill the budget, so the third holds blocks and a slot without a row when the step fails."""
    llm = make_llm(max_num_batched_tokens=256)
    prompts = [oracle.lively(length, 8, seed=3) for length in (40, 300, 128)]
    streams = [llm.stream(prompt, greedy(8)) for prompt in prompts]
    step(llm, 2)
    last = scheduler_of(llm)._waiting[-1:] + scheduler_of(llm)._running[-1:]
    fail_once(monkeypatch, "advance_step", RuntimeError("lost"))
    ends = [list(stream)[-1] for stream in streams]
    reasons = [end.outputs[0].finish_reason for end in ends]
    assert last
    assert "error" in reasons
    assert_right([end for end in ends if end.outputs[0].finish_reason != "error"], oracle)
    assert idle(llm.stats())


def test_an_interrupt_in_the_middle_of_a_step_only_sends_its_rows_back_to_wait(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm()
    prompt = oracle.lively(70, 12)
    stream = llm.stream(prompt, greedy(12))
    step(llm, 3)
    fail_once(monkeypatch, "advance_step", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ask(llm, [oracle.lively(20, 4)], greedy(4))
    assert llm.stats().waiting == 1  # the interrupted call's own request is gone
    assert_right([*list(stream)[-1:], *ask(llm, [prompt], greedy(12))], oracle)
    assert idle(llm.stats())


def test_a_contradiction_in_the_books_stops_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    monkeypatch.setattr(runner_of(llm), "_requests", {})
    monkeypatch.setattr(runner_of(llm), "add", lambda *args: None)
    with pytest.raises(InvariantError, match="never made known"):
        ask(llm, [[1, 2, 3]], greedy())


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Let the next call of a step function raise."""
    from gdn_jax.serving.runner import runner as module

    real = getattr(module, name)

    def fails(*args: Any) -> Any:
        monkeypatch.setattr(module, name, real)
        raise error

    monkeypatch.setattr(module, name, fails)


def record_plans(llm: LLM) -> list[StepPlan]:
    """Keep every plan that runs from now on."""
    plans: list[StepPlan] = []
    runner = runner_of(llm)
    run = runner.run

    def keep(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return run(plan)

    runner.run = keep  # type: ignore[method-assign]
    return plans


def record_ends(llm: LLM) -> list[str]:
    """Keep the ids of requests in the order they end in."""
    ends: list[str] = []
    engine = llm._engine
    real = engine.step

    def keep() -> Any:
        outputs = real()
        ends.extend(output.request_id for output in outputs if output.output.finish_reason is not None)
        return outputs

    engine.step = keep  # type: ignore[method-assign]
    return ends


def poison_what_nobody_owns(llm: LLM) -> None:
    """Fill with NaN every slot and page that is neither held nor published."""
    holdings, runner = scheduler_of(llm).holdings, runner_of(llm)
    running = scheduler_of(llm)._running
    slots = {*holdings.checkpoints.names().values(), *(request.slot for request in running)}
    pages = {*holdings.blocks.names().values(), *(block for request in running for block in request.blocks)}

    def wipe(array: Any, keep: set[Any]) -> Any:
        free = [index for index in range(array.shape[0]) if index not in keep]
        return array.at[jnp.asarray(free)].set(jnp.nan)

    layers = tuple(
        KVPages(k=wipe(layer.k, pages), v=wipe(layer.v, pages))
        if isinstance(layer, KVPages)
        else replace(layer, recurrent=wipe(layer.recurrent, slots), conv=wipe(layer.conv, slots))
        for layer in runner._state.layers
    )
    runner._state = replace(runner._state, layers=layers, hidden=wipe(runner._state.hidden, slots))
