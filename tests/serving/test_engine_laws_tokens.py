"""The same tokens, however they are computed: cold, warm, chunked, batched, preempted, hit into generated text.

On a tiny float32 model whose every answer a float64 oracle judges. Pools start full of NaN (see the rig), so every test
also shows that what nobody owns never counts.
"""

from pathlib import Path
from typing import Any

import pytest
from oracles.checkpoints import write_checkpoint
from oracles.engine_rig import (
    Oracle,
    ask,
    assert_right,
    cached,
    floor,
    greedy,
    idle,
    make_llm,
    random_ids,
    record_plans,
    runner_of,
    step,
    tiny_oracle,
    tokens_of,
)

from gdn_jax import SamplingParams
from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.runner.prompt_scores import score_prompts
from gdn_jax.serving.runner.steps import advance_step, prefill_step

LENGTHS = (1, 3, 63, 64, 65, 130)
MODES = ("none", "align", "all")


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


@pytest.mark.parametrize("budget", [64, 256])
@pytest.mark.parametrize("mode", MODES)
def test_alone_batched_chunked_and_warm_give_the_oracles_tokens(oracle: Oracle, mode: str, budget: int) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, max_num_batched_tokens=budget)
    prompts = [random_ids(length, length) for length in LENGTHS]
    batched = ask(llm, prompts, greedy(12))
    assert_right(batched, oracle)
    assert cached(batched) == [0] * len(prompts)
    for prompt, before in zip(prompts, tokens_of(batched), strict=True):
        alone = ask(llm, [prompt], greedy(12))
        assert_right(alone, oracle)
        assert tokens_of(alone) == [before]
        assert cached(alone) == [0 if mode == "none" else floor(len(prompt) - 1)]
    assert idle(llm.stats())


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_go_on_as_if_nothing_had_happened(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode, state_interval=64, num_blocks=8)
    prompts = [random_ids(index, 100 + index) for index in range(4)]
    outputs = ask(llm, prompts, greedy(60))
    stats = llm.stats()
    assert stats.preemptions > 0
    assert (stats.hit_tokens > 0) == (mode != "none")  # who returns starts from what it left
    assert_right(outputs, oracle)
    assert idle(stats)
    roomy = make_llm(prefix_cache=mode, state_interval=64)
    assert tokens_of(ask(roomy, prompts, greedy(60))) == tokens_of(outputs)
    assert roomy.stats().preemptions == 0


def test_one_slot_serves_everybody_in_turn_and_hands_over_nothing(oracle: Oracle, caplog: Any) -> None:
    """A request whose hit is in the only slot takes that checkpoint over; an unrelated one starts from nothing."""
    llm = make_llm(num_state_slots=1)
    assert "max_num_seqs is 1 instead of 4" in caplog.text
    first, second = random_ids(1, 118), random_ids(2, 70)  # the first one's turn ends one token past a boundary
    (answer,) = tokens_of(ask(llm, [first], greedy(12)))
    turn = [*first, *answer, *random_ids(3, 9)]
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
    prompt = random_ids(1, 100)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(generated)))
    outputs = ask(llm, [[*prompt, *answer, *random_ids(5, 9)]], greedy(12))
    assert cached(outputs) == [128]
    assert_right(outputs, oracle)


def test_a_turn_that_edits_the_generated_text_hits_an_interval_checkpoint_inside_it(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64)
    prompt = random_ids(1, 70)
    (answer,) = tokens_of(ask(llm, [prompt], greedy(130)))
    outputs = ask(llm, [[*prompt, *answer[:70], *random_ids(6, 20)]], greedy(12))
    assert cached(outputs) == [128]
    assert_right(outputs, oracle)


def test_decode_rows_run_beside_a_prefill_of_the_whole_budget(oracle: Oracle) -> None:
    llm = make_llm(prefix_cache="none")
    stream = llm.stream(random_ids(1, 40), greedy(30))
    step(llm, 3)
    plans = record_plans(llm)
    (late,) = ask(llm, [random_ids(2, 256)], greedy(12))
    assert {row.phase for row in plans[0].rows} == {Phase.PREFILL, Phase.DECODE}
    assert len(plans[0].rows[1].tokens) == 256
    assert_right([late, list(stream)[-1]], oracle)


def test_packed_prompts_leave_each_their_own_checkpoint(oracle: Oracle) -> None:
    llm = make_llm(prefix_cache="align")
    prompts = [random_ids(seed, length) for seed, length in ((1, 5), (2, 70), (3, 1), (4, 66))]
    plans = record_plans(llm)
    assert_right(ask(llm, prompts, greedy(4)), oracle)
    assert len(plans[0].rows) == 4  # one call
    for prompt in prompts:
        outputs = ask(llm, [[*prompt, 9, 9]], greedy(8))
        assert cached(outputs) == [floor(len(prompt) + 1)]
        assert_right(outputs, oracle)


def test_a_mixture_of_experts_gives_the_oracles_tokens_cold_warm_and_batched(tmp_path: Path) -> None:
    layers = ("linear_attention", "full_attention")
    folder = write_checkpoint(tmp_path, "q35-moe", 3, dtype="float32", layer_types=layers, num_experts=6, vision=False)
    oracle = Oracle(folder, 318)
    llm = make_llm(folder, deterministic=True, max_num_batched_tokens=64, state_interval=64)
    prompts = [clear_routes(oracle, length) for length in (3, 65, 130)]
    cold = ask(llm, prompts, greedy(8))
    assert_right(cold, oracle)
    warm = ask(llm, prompts, greedy(8))
    assert cached(warm) == [0, 64, 128]
    assert tokens_of(warm) == tokens_of(cold)
    assert_right(warm, oracle)


def clear_routes(oracle: Oracle, length: int) -> list[int]:
    """Return a prompt on which float32 chooses the same experts as float64, also for its continuation."""
    for seed in range(100):
        oracle.model.smallest_router_gap = 1.0
        prompt = random_ids(seed, length)
        oracle.model.greedy(prompt, 8)
        if oracle.model.smallest_router_gap > 1e-5:
            return prompt
    raise AssertionError(f"no prompt of {length} tokens has clear routes")


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
    alone = ask(llm, prompts[:1], params[0])
    warm = ask(llm, [prompts[3]], params[3])
    assert (cached(alone), cached(warm)) == ([0], [128])
    assert tokens_of(alone) + tokens_of(warm) == [together[0], together[3]]
    assert len({tuple(tokens) for tokens in together}) == 4


@pytest.mark.parametrize("budget", [64, 250])
def test_after_warm_up_a_mixed_workload_compiles_nothing(oracle: Oracle, budget: int) -> None:
    """A budget of 250 tokens is no size that steps are compiled for."""
    llm = make_llm(state_interval=64, max_num_batched_tokens=budget)
    runner_of(llm).warm_up()
    steps = prefill_step, advance_step, score_prompts
    traced = [each._cache_size() for each in steps]
    stream = llm.stream(random_ids(1, 30), greedy(40))
    step(llm, 2)
    outputs = ask(llm, [random_ids(length, length) for length in (1, 64, 100, 256, 300, 5, 80)], greedy(6))
    outputs += ask(llm, [random_ids(length, length) for length in (70, 300)], greedy(3, prompt_logprobs=2))
    outputs += ask(llm, [random_ids(300, 300)], greedy(3))
    assert cached(outputs[-1:]) == [256]
    assert_right([*outputs, list(stream)[-1]], oracle)
    assert [each._cache_size() for each in steps] == traced
