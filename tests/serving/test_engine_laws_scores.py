"""Log probabilities of prompts are those of the oracle: chunked, cached, preempted, beside others, once per prompt."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from oracles.engine_rig import (
    LOGPROB_ERROR,
    Oracle,
    ask,
    assert_right,
    cached,
    fail_once,
    floor,
    greedy,
    idle,
    make_llm,
    random_ids,
    record_plans,
    runner_of,
    scheduler_of,
    step,
    tiny_oracle,
    tokens_of,
)

from gdn_jax import LLM, RequestOutput, RequestOutputKind
from gdn_jax.serving.core.plan import Phase
from gdn_jax.serving.runner import runner as runner_module

LENGTHS = (1, 2, 63, 64, 65, 130)
VALID = 318  # ids with a text, in the tiny model


@pytest.fixture
def oracle() -> Oracle:
    return tiny_oracle()


def assert_scored(outputs: Sequence[RequestOutput], oracle: Oracle, num_top: int) -> None:
    """Compare every number of every prompt token's report with the oracle's."""
    for output in outputs:
        prompt, reports = output.prompt_token_ids, output.prompt_logprobs
        assert reports is not None
        assert len(reports) == len(prompt)
        assert reports[0] is None
        if len(prompt) == 1:
            continue
        rows = oracle.logprobs(prompt[:1], prompt[1:])
        for token, report, row in zip(prompt[1:], reports[1:], rows, strict=True):
            assert report is not None
            assert next(iter(report)) == token
            found = [report[token].logprob, *(entry.logprob for other, entry in report.items() if other != token)]
            expected = [row[token], *(row[other] for other in report if other != token)]
            np.testing.assert_allclose(found, expected, atol=LOGPROB_ERROR, rtol=0)
            ranked = sorted((entry.rank, entry.logprob) for entry in report.values())
            assert [rank for rank, _ in ranked][:num_top] == list(range(1, num_top + 1))
            likeliest = np.sort(row[:VALID])[::-1][:num_top]
            np.testing.assert_allclose([value for _, value in ranked][:num_top], likeliest, atol=LOGPROB_ERROR, rtol=0)
            ahead = int((row[:VALID] > row[token] + 2 * LOGPROB_ERROR).sum())
            tied = int((row[:VALID] > row[token] - 2 * LOGPROB_ERROR).sum())
            assert ahead < report[token].rank <= max(tied, 1)
            assert len(report) == num_top + (report[token].rank > num_top)


def values(outputs: Sequence[RequestOutput]) -> list[list[float]]:
    """Each prompt's own log probabilities."""
    return [
        [
            report[token].logprob
            for token, report in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
            if report
        ]
        for output in outputs
    ]


@pytest.mark.parametrize("num_top", [0, 5])
@pytest.mark.parametrize("budget", [64, 256])
def test_every_token_is_scored_the_first_time_and_the_second(oracle: Oracle, budget: int, num_top: int) -> None:
    llm = make_llm(state_interval=64, max_num_batched_tokens=budget)
    prompts = [random_ids(length, length) for length in LENGTHS]
    for _ in range(2):  # the second time every block and checkpoint is there
        outputs = ask(llm, prompts, greedy(4, prompt_logprobs=num_top))
        assert_scored(outputs, oracle, num_top)
        assert_right(outputs, oracle)
        assert cached(outputs) == [0] * len(prompts)
    assert cached(ask(llm, prompts, greedy(4))) == [floor(length - 1) for length in LENGTHS]
    assert idle(llm.stats())


def test_an_engine_that_drafts_scores_the_same(oracle: Oracle) -> None:
    llm = make_llm(speculative_tokens=2, max_num_batched_tokens=64)
    prompts = [random_ids(length, length) for length in (1, 65, 130)]
    for _ in range(2):
        outputs = ask(llm, prompts, greedy(8, prompt_logprobs=2))
        assert_scored(outputs, oracle, 2)
        assert_right(outputs, oracle)
    assert idle(llm.stats())


def test_a_prompt_is_scored_though_its_answer_is_not_and_text_is_not_asked_for(oracle: Oracle) -> None:
    outputs = ask(make_llm(), [random_ids(1, 70)], greedy(2, logprobs=None, prompt_logprobs=20, detokenize=False))
    assert_scored(outputs, oracle, 20)
    assert outputs[0].outputs[0].logprobs is None
    reports = outputs[0].prompt_logprobs or []
    assert {entry.decoded_token for report in reports if report for entry in report.values()} == {None}


def test_only_who_asks_is_scored_and_neighbours_get_what_they_always_get(oracle: Oracle) -> None:
    llm = make_llm(prefix_cache="none")
    stream = llm.stream(random_ids(1, 40), greedy(30))
    step(llm, 3)
    prompts = [random_ids(seed, 60 + seed) for seed in range(2, 5)]
    plans = record_plans(llm)
    outputs = ask(llm, prompts, greedy(6), greedy(6, prompt_logprobs=3), greedy(6))
    assert {row.phase for row in plans[0].rows} == {Phase.PREFILL, Phase.DECODE}
    assert [output.prompt_logprobs is None for output in outputs] == [True, False, True]
    assert_scored(outputs[1:2], oracle, 3)
    assert_right([*outputs, list(stream)[-1]], oracle)


@pytest.mark.parametrize("mode", ["none", "all"])
def test_completions_of_one_prompt_are_scored_once_and_start_from_its_checkpoint(oracle: Oracle, mode: str) -> None:
    llm = make_llm(prefix_cache=mode)
    plans = record_plans(llm)
    prompt = random_ids(7, 120)
    for _ in range(2):
        outputs = ask(llm, [prompt], greedy(6, n=2, prompt_logprobs=2))
        assert_scored(outputs, oracle, 2)
        assert_right(outputs, oracle)
    starts = [row.start for plan in plans for row in plan.rows if row.phase is Phase.PREFILL]
    assert starts == ([0, 64] if mode == "all" else [0, 0]) * 2


def preempt(llm: LLM) -> None:
    """Preempt the request that runs, as a shortage of blocks would."""
    scheduler = scheduler_of(llm)
    (request,) = scheduler.running()
    scheduler._preempt(request)


@pytest.mark.parametrize("steps", [1, 2, 3, 5], ids=["one-chunk", "two-chunks", "answering", "third-token"])
def test_a_preempted_prompt_has_no_token_twice(oracle: Oracle, steps: int) -> None:
    llm = make_llm(max_num_batched_tokens=64)
    stream = llm.stream(random_ids(8, 150), greedy(6, prompt_logprobs=1))
    step(llm, steps)
    preempt(llm)
    plans = record_plans(llm)
    last = list(stream)[-1]
    # Nothing of it is looked up until all of it has been scored; then it is a request like any other.
    assert plans[0].rows[0].start == (0 if steps < 3 else 128)
    assert_scored([last], oracle, 1)
    assert_right([last], oracle)
    assert idle(llm.stats())


def test_prompts_that_push_each_other_out_are_scored_whole(oracle: Oracle) -> None:
    llm = make_llm(state_interval=64, num_blocks=8)
    outputs = ask(llm, [random_ids(index, 100 + index) for index in range(4)], greedy(60, prompt_logprobs=1))
    assert llm.stats().preemptions > 0
    assert_scored(outputs, oracle, 1)
    assert_right(outputs, oracle)
    assert idle(llm.stats())


def test_a_prompt_half_scored_when_anothers_step_fails_is_scored_anew(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(max_num_batched_tokens=64, max_num_seqs=2)
    stream = llm.stream(random_ids(9, 150), greedy(4, prompt_logprobs=1))
    step(llm)
    urgent, soon = random_ids(1, 64), greedy(1)
    fail_once(monkeypatch.setattr, "prefill_step", RuntimeError("lost"))
    (failed,) = ask(llm, [urgent], soon, priority=[-1])  # takes the whole budget, so the other has no row
    assert failed.outputs[0].finish_reason == "error"
    last = list(stream)[-1]
    assert_scored([last], oracle, 1)
    assert_right([last], oracle)


def test_a_prompt_that_is_not_finite_ends_without_a_report() -> None:
    llm = make_llm()
    runner = runner_of(llm)
    leaves = runner._params
    runner._params = tuple(leaf * math.nan for leaf in leaves)
    (output,) = ask(llm, [random_ids(1, 70)], greedy(2, prompt_logprobs=1))
    assert (output.outputs[0].finish_reason, output.prompt_logprobs) == ("error", None)
    assert idle(llm.stats())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_stream_brings_the_report_with_the_first_token(oracle: Oracle, kind: RequestOutputKind) -> None:
    llm = make_llm(max_num_batched_tokens=64)
    items = list(llm.stream(random_ids(3, 100), greedy(4, prompt_logprobs=2, output_kind=kind)))
    assert len(items) == (1 if kind is RequestOutputKind.FINAL_ONLY else 4)
    assert_scored(items[:1], oracle, 2)
    for item in items[1:]:
        assert (item.prompt_logprobs is None) == (kind is RequestOutputKind.DELTA)
    (whole,) = ask(llm, [random_ids(3, 100)], greedy(4, prompt_logprobs=2, output_kind=kind))
    assert values([whole]) == values(items[:1])


def test_a_step_without_prompts_to_score_runs_and_brings_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_num_batched_tokens=64)
    scored: list[int] = []
    real = runner_module.score_prompts

    def count(static, params, hidden, next_ids):
        scored.append(int((next_ids >= 0).sum()))
        return real(static, params, hidden, next_ids)

    monkeypatch.setattr(runner_module, "score_prompts", count)
    tokens = tokens_of(ask(llm, [random_ids(2, 100)], greedy(3)))
    assert scored == []
    ask(llm, [[5]], greedy(3, prompt_logprobs=0))
    assert scored == []
    assert tokens_of(ask(llm, [random_ids(2, 100)], greedy(3, prompt_logprobs=0))) == tokens
    assert scored == [64, 35]
