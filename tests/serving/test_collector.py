"""Collector: items of each kind, for several completions, and what alternatives read like."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from oracles.byte_tokenizer import write_byte_tokenizer

from gdn_jax import RequestOutputKind, SamplingParams
from gdn_jax.serving.collector import Collector
from gdn_jax.serving.core.plan import TokenLogprobs
from gdn_jax.serving.core.request import FinishReason, RequestId
from gdn_jax.serving.cut import TokenOutput
from gdn_jax.serving.engine_types import EngineOutput
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.text.tokenizer import Tokenizer

PROMPT = EncodedPrompt(text="hi", token_ids=[104, 105])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenizer(write_byte_tokenizer(folder), 512)


def collect(tokenizer: Tokenizer, **params: object) -> Collector:
    asked = SamplingParams(**params)  # pyright: ignore[reportArgumentType]
    return Collector("mine", ["7", "7.1"][: asked.n], PROMPT, asked, tokenizer)


def described(tops: Sequence[Sequence[int]]) -> list[TokenLogprobs]:
    return [TokenLogprobs(chosen=-1.0, rank=1, top_ids=tuple(top), top=(-1.0,) * len(top)) for top in tops]


def step(
    request_id: str,
    tokens: Sequence[int],
    text: str = "",
    finish: FinishReason | None = None,
    cached: int | None = 0,
    tops: Sequence[Sequence[int]] | None = None,
    prompt_tops: Sequence[Sequence[int]] | None = None,
) -> EngineOutput:
    scored = None if prompt_tops is None else described(prompt_tops)
    output = TokenOutput(
        token_ids=list(tokens),
        text=text,
        logprobs=described(tops or ()),
        prompt_logprobs=scored,
        finish_reason=finish,
    )
    return EngineOutput(request_id=RequestId(request_id), output=output, num_cached_tokens=cached)


def test_cumulative_items_hold_all_so_far_and_do_not_change_later(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer)
    assert collector.news() is None
    collector.take(step("7", [1, 2], "ab", cached=64))
    first = collector.news()
    assert collector.news() is None
    collector.take(step("7", [3], "c", FinishReason.LENGTH, cached=64))
    last = collector.news()
    assert first is not None
    assert last is not None
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.finished) == ("ab", [1, 2], False)
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.finished) == ("abc", [1, 2, 3], True)
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("mine", "hi", [104, 105])
    assert (last.outputs[0].finish_reason, last.num_cached_tokens) == ("length", 64)


def test_delta_items_join_to_the_whole_and_name_only_completions_that_something_came_to(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer, n=2, output_kind=RequestOutputKind.DELTA, logprobs=0)
    steps = [
        step("7", [1], "a", tops=[[]]),
        step("7.1", [9], "x", tops=[[]]),
        step("7", [2, 3], "bc", FinishReason.STOP, tops=[[], []]),
        step("7.1", [8], "", FinishReason.LENGTH, tops=[[]]),
    ]
    items = []
    for one in steps:
        collector.take(one)
        items.append(collector.news())
    assert [[(c.index, c.text, c.token_ids) for c in item.outputs] for item in items] == [
        [(0, "a", [1])],
        [(1, "x", [9])],
        [(0, "bc", [2, 3])],
        [(1, "", [8])],
    ]
    assert [len(item.outputs[0].logprobs) for item in items] == [1, 1, 2, 1]
    assert [item.outputs[0].cumulative_logprob for item in items] == [-1, -1, -3, -2]
    assert [item.outputs[0].finish_reason for item in items] == [None, None, "stop", "length"]
    assert [item.finished for item in items] == [False, False, False, True]


def test_two_steps_taken_between_two_items_come_in_one_delta(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer, n=2, output_kind=RequestOutputKind.DELTA)
    for one in (step("7", [1], "a"), step("7.1", [9], "x"), step("7", [2], "b")):
        collector.take(one)
    item = collector.news()
    assert item is not None
    assert [(c.index, c.text, c.token_ids) for c in item.outputs] == [(0, "ab", [1, 2]), (1, "x", [9])]
    assert collector.news() is None


def test_a_final_item_comes_once_and_holds_everything(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    collector.take(step("7", [1], "a"))
    collector.take(step("7", [2], "b", FinishReason.LENGTH))
    assert collector.news() is None
    assert not collector.finished
    collector.take(step("7.1", [9], "x", FinishReason.STOP))
    item = collector.news()
    assert item is not None
    assert [(c.text, c.finish_reason) for c in item.outputs] == [("ab", "length"), ("x", "stop")]
    assert item.finished
    assert collector.news() is None


def test_items_share_the_prompt(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer)
    collector.take(step("7", [1]))
    assert collector.output().prompt_token_ids is PROMPT.token_ids


def test_the_cached_tokens_are_the_first_completions(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer, n=2)
    collector.take(step("7", [1], cached=0))
    collector.take(step("7.1", [1], cached=64))
    assert collector.output().num_cached_tokens == 0


def test_an_alternative_reads_as_after_the_true_tokens_before_it(tokenizer: Tokenizer) -> None:
    euro = list("€".encode())  # three bytes, one token each
    collector = collect(tokenizer, logprobs=2, max_tokens=9)
    tops = [[euro[0], 65], [euro[1], 0x83], [euro[2], 65]]
    collector.take(step("7", euro[:2], tops=tops[:2]))
    collector.take(step("7", euro[2:], "€", FinishReason.LENGTH, tops=tops[2:]))
    reports = collector.output().outputs[0].logprobs
    assert reports is not None
    shown = [{token: entry.decoded_token for token, entry in report.items()} for report in reports]
    assert shown == [{euro[0]: "", 65: "A"}, {euro[1]: "", 0x83: ""}, {euro[2]: "€", 65: "A"}]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_prompts_report_comes_with_the_first_item_and_in_deltas_only_there(
    tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    collector = collect(tokenizer, n=2, prompt_logprobs=1, output_kind=kind)
    assert collector.output().prompt_logprobs is None
    items = []
    for one in (
        step("7", [1], prompt_tops=[[66]]),
        step("7.1", [2], finish=FinishReason.LENGTH),
        step("7", [3], finish=FinishReason.LENGTH),
    ):
        collector.take(one)
        items += [item] if (item := collector.news()) is not None else []
    reports = [item.prompt_logprobs for item in items]
    later = None if kind is RequestOutputKind.DELTA else reports[0]
    assert reports == [reports[0], later, later][: len(items)]
    first, second = reports[0] or ()
    assert first is None
    assert [(token, entry.rank, entry.decoded_token) for token, entry in (second or {}).items()] == [
        (105, 1, "i"),
        (66, 1, "B"),
    ]


def test_a_prompts_tokens_and_alternatives_read_as_after_those_before_them(tokenizer: Tokenizer) -> None:
    euro = list("€".encode())  # three bytes, one token each
    asked = SamplingParams(prompt_logprobs=2)
    collector = Collector("mine", ["7"], EncodedPrompt(text="€!", token_ids=[*euro, 33]), asked, tokenizer)
    collector.take(step("7", [65], prompt_tops=[[euro[1], 0x83], [65, euro[2]], [0xE2, 66]]))
    shown = [
        {token: entry.decoded_token for token, entry in report.items()}
        for report in collector.output().prompt_logprobs or ()
        if report is not None
    ]
    assert shown == [{euro[1]: "", 0x83: ""}, {euro[2]: "€", 65: "A"}, {33: "!", 0xE2: "", 66: "B"}]


def test_a_prompt_of_one_token_has_nothing_but_the_entry_without_a_report(tokenizer: Tokenizer) -> None:
    asked = SamplingParams(prompt_logprobs=2, detokenize=False)
    collector = Collector("mine", ["7"], EncodedPrompt(text=None, token_ids=[5]), asked, tokenizer)
    collector.take(step("7", [65], prompt_tops=[]))
    assert collector.output().prompt_logprobs == [None]


def test_no_text_of_alternatives_where_none_is_asked_for(tokenizer: Tokenizer) -> None:
    collector = collect(tokenizer, logprobs=1, detokenize=False)
    collector.take(step("7", [65], tops=[[66]]))
    reports = collector.output().outputs[0].logprobs
    assert reports is not None
    assert [entry.decoded_token for entry in reports[0].values()] == [None, None]
