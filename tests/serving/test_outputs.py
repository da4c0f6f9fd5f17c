"""What a caller reads from a result: log probability reports, finish state, and how it prints."""

import dataclasses

import pytest

from gdn_jax.serving.outputs import CompletionOutput, Logprob, RequestOutput, position_logprobs


def name_of(token_id: int) -> str:
    return f"<{token_id}>"


def test_the_chosen_token_opens_the_report_and_the_likeliest_follow_in_order() -> None:
    report = position_logprobs(9, -5.0, 40, [(3, -0.1), (7, -2.5)], name_of)
    assert list(report.items()) == [
        (9, Logprob(logprob=-5.0, rank=40, decoded_token="<9>")),
        (3, Logprob(logprob=-0.1, rank=1, decoded_token="<3>")),
        (7, Logprob(logprob=-2.5, rank=2, decoded_token="<7>")),
    ]


def test_a_chosen_token_that_is_among_the_likeliest_is_reported_once_and_keeps_the_others_ranks() -> None:
    report = position_logprobs(3, -0.5, 1, [(3, -0.5), (7, -2.5)], name_of)
    assert [(token_id, entry.rank) for token_id, entry in report.items()] == [(3, 1), (7, 2)]


def test_zero_alternatives_still_report_the_chosen_token() -> None:
    assert list(position_logprobs(4, -1.0, 2, [], lambda _: None)) == [4]


@pytest.mark.parametrize(("reason", "finished"), [(None, False), ("stop", True), ("length", True), ("abort", True)])
def test_a_completion_is_finished_once_it_has_a_reason(reason: str | None, *, finished: bool) -> None:
    assert CompletionOutput(index=0, text="", token_ids=[], finish_reason=reason).finished() is finished


def test_a_result_prints_its_text_in_full_and_its_long_lists_in_short() -> None:
    completion = CompletionOutput(
        index=0, text="word " * 100, token_ids=list(range(300)), logprobs=[{}] * 300, finish_reason="length"
    )
    result = RequestOutput(
        request_id="r1",
        prompt="p" * 5000,
        prompt_token_ids=list(range(1000)),
        outputs=[completion],
        finished=True,
        num_cached_tokens=64,
    )
    shown = repr(result)
    assert completion.text in shown
    assert "token_ids=[0, 1, 2, 3, 4, 5, 6, 7, ... 300 in all]" in shown
    assert "num_cached_tokens=64" in shown
    assert "finish_reason='length'" in shown
    assert len(shown) < len(completion.text) + 500


def test_short_results_print_every_value_that_was_asked_for() -> None:
    completion = CompletionOutput(
        index=1, text="a\n", token_ids=[5], cumulative_logprob=-0.25, logprobs=[{}], stop_reason="x"
    )
    assert repr(completion) == (
        "CompletionOutput(index=1, text='a\\n', token_ids=[5], cumulative_logprob=-0.25, logprobs=<1 positions>, "
        "finish_reason=None, stop_reason='x')"
    )
    result = RequestOutput(
        request_id="7",
        prompt=None,
        prompt_token_ids=[1, 2],
        prompt_logprobs=[None, {}],
        finished=False,
        metrics={"t": 1.0},
    )
    assert repr(result) == (
        "RequestOutput(request_id='7', prompt=None, prompt_token_ids=[1, 2], outputs=[], finished=False, "
        "num_cached_tokens=0, prompt_logprobs=<2 positions>, metrics={'t': 1.0})"
    )


def test_results_are_values_that_nobody_changes_afterwards() -> None:
    completion = CompletionOutput(index=0, text="x", token_ids=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        completion.text = "y"  # type: ignore[misc]
