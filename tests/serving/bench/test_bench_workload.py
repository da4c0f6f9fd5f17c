"""What benchmarks ask: lengths within their ranges, tokens that follow from the seed, questions out of files."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
from oracles.engine_rig import TINY

from gdn_jax.config import ModelConfig
from gdn_jax.serving.bench.workload import Lengths, RandomWorkload, ShareGPTWorkload, check_fit
from gdn_jax.serving.config import SettingError
from gdn_jax.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY, ModelConfig.from_folder(TINY).vocab_size)


def write(folder: Path, content: object) -> str:
    file = folder / "conversations.json"
    file.write_text(json.dumps(content))
    return str(file)


def conversation(*turns: str) -> dict[str, object]:
    speakers = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": speakers[i % 2], "value": turn} for i, turn in enumerate(turns)]}


def test_equal_lengths_are_those_asked_for(tokenizer: Tokenizer) -> None:
    requests = RandomWorkload(seed=1, input_len=70, output_len=9).requests(5, tokenizer)
    assert [request.lengths for request in requests] == [Lengths(prompt=70, answer=9)] * 5
    assert all(0 <= token < tokenizer.num_tokens for request in requests for token in request.token_ids)


def test_lengths_fill_their_whole_range_and_nothing_beyond(tokenizer: Tokenizer) -> None:
    """Ten of a hundred more is 110, although 100 * (1 + 0.1) is a little above that."""
    workload = RandomWorkload(seed=3, input_len=100, output_len=10, range_ratio=0.1, prefix_len=7)
    lengths = workload.lengths(2000)
    assert {one.prompt for one in lengths} == set(range(97, 118))
    assert {one.answer for one in lengths} == {9, 10, 11}
    assert max(Counter(one.answer for one in lengths).values()) < 800
    assert [request.lengths for request in workload.requests(20, tokenizer)] == lengths[:20]


def test_an_answer_has_at_least_one_token_and_a_prompt_may_be_the_prefix_alone(tokenizer: Tokenizer) -> None:
    workload = RandomWorkload(seed=0, input_len=0, output_len=1, range_ratio=0.9, prefix_len=5)
    first, second = workload.requests(2, tokenizer)
    assert first.token_ids == second.token_ids
    assert {one.answer for one in workload.lengths(50)} == {1, 2}


def test_prompts_share_the_prefix_and_nothing_else(tokenizer: Tokenizer) -> None:
    prompts = [
        request.token_ids
        for request in RandomWorkload(seed=5, input_len=40, output_len=1, prefix_len=30).requests(6, tokenizer)
    ]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 1
    assert len({tuple(prompt[30:34]) for prompt in prompts}) == 6


def test_requests_follow_from_the_seed_however_many_are_drawn(tokenizer: Tokenizer) -> None:
    def drawn(seed: int, count: int) -> list[list[int]]:
        workload = RandomWorkload(seed=seed, input_len=20, output_len=4, range_ratio=0.5, prefix_len=3)
        return [request.token_ids for request in workload.requests(count, tokenizer)]

    assert drawn(4, 3) == drawn(4, 9)[:3]
    assert drawn(4, 3) != drawn(5, 3)
    assert drawn(4, 3) != drawn(-4, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"output_len": 0}, "output_len must be at least 1; got 0"),
        ({"input_len": -1}, "input_len must be at least 0; got -1"),
        ({"prefix_len": -1}, "random_prefix_len must be at least 0; got -1"),
        ({"range_ratio": 1.0}, r"random_range_ratio must be in \[0, 1\); got 1.0"),
        ({"range_ratio": -0.1}, r"random_range_ratio must be in \[0, 1\); got -0.1"),
        ({"input_len": 0}, "a prompt must have at least one token; got an input_len of 0"),
        ({"input_len": 1, "range_ratio": 0.5}, "a prompt must have at least one token"),
    ],
)
def test_lengths_that_cannot_be_are_refused_by_name(settings: dict[str, float], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        RandomWorkload(**{"seed": 0, "input_len": 8, "output_len": 8} | settings)  # pyright: ignore[reportArgumentType]


def test_the_longest_request_is_held_against_the_context() -> None:
    requests = [Lengths(prompt=10, answer=2), Lengths(prompt=3, answer=11), Lengths(prompt=1, answer=1)]
    check_fit(requests, 14)
    with pytest.raises(
        SettingError, match=r"at most max_model_len \(13\) together; got 3 \+ 11 = 14; ask for less, or raise"
    ):
        check_fit(requests, 13)
    with pytest.raises(SettingError, match=r"ask for less: that is the model's own limit$"):
        check_fit(requests, 13, ": that is the model's own limit")


def test_a_file_gives_first_questions_and_as_many_tokens_as_their_answers_have(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    asked = {f"What is {number} and {number}?": f"That makes {2 * number}." for number in range(100, 120)}
    entries = [conversation(question, answer, "Thanks!") for question, answer in asked.items()]
    path = write(tmp_path, [*entries, {"id": "none"}, conversation("Nobody answered this question?")])
    requests = ShareGPTWorkload(seed=2, path=path).requests(20, tokenizer)
    texts = [tokenizer.decode(request.token_ids) for request in requests]
    assert sorted(texts) == sorted(asked)
    assert texts != list(asked)
    for text, request in zip(texts, requests, strict=True):
        assert request.num_answer_tokens == len(tokenizer.encode(asked[text]))
    again = ShareGPTWorkload(seed=2, path=path).requests(7, tokenizer)
    assert again == requests[:7]
    assert {
        one.num_answer_tokens for one in ShareGPTWorkload(seed=2, path=path, output_len=3).requests(9, tokenizer)
    } == {3}


def test_conversations_that_are_too_short_or_too_long_are_passed_over(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def words(count: int) -> str:
        """Text of `count` tokens: no two bytes of it make one."""
        text = "Q;" * count
        ids = tokenizer.encode(text)[:count]
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
        return tokenizer.decode(ids)

    entries = [
        conversation(words(3), words(9)),
        conversation(words(9), words(3)),
        conversation(words(1025), words(9)),
        conversation(words(1024), words(1025)),
        conversation(words(4), words(4)),
        conversation(words(1024), words(1024)),
    ]
    path = write(tmp_path, entries)
    kept = {request.lengths for request in ShareGPTWorkload(seed=0, path=path).requests(2, tokenizer)}
    assert kept == {Lengths(prompt=4, answer=4), Lengths(prompt=1024, answer=1024)}
    kept = {request.lengths for request in ShareGPTWorkload(seed=0, path=path, output_len=2).requests(5, tokenizer)}
    assert kept == {Lengths(prompt=prompt, answer=2) for prompt in (4, 9, 1024)}


def test_a_short_file_is_asked_again_and_that_is_said(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, [conversation("What do bees make?", "They make honey.")])
    with caplog.at_level(logging.WARNING, "gdn_jax"):
        requests = ShareGPTWorkload(seed=0, path=path).requests(3, tokenizer)
    assert requests == requests[:1] * 3
    assert "2 of the 3 requests ask again" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"conversations": 1}, "holds a dict"),
        ([1], "has none with two turns"),
        ([{"conversations": [{"text": "x"}, {"text": "y"}]}], "has none with two turns"),
        ([{"conversations": 3}], "has none with two turns"),
        ([], "has none with two turns"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, tokenizer: Tokenizer, content: object, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        ShareGPTWorkload(seed=0, path=write(tmp_path, content)).requests(1, tokenizer)


def test_a_file_that_is_no_json_or_not_there_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "text").write_text("What?")
    for name in ("text", "absent"):
        with pytest.raises(SettingError, match=f"dataset_path must be a file of JSON; got .*{name}"):
            ShareGPTWorkload(seed=0, path=str(tmp_path / name)).requests(1, tokenizer)
    with pytest.raises(SettingError, match="output_len must be at least 1; got 0"):
        ShareGPTWorkload(seed=0, path="any", output_len=0)


def test_conversations_of_another_form_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    good = conversation("one two three four five", "six seven eight nine ten")
    half = conversation("half \ud83d", "of a character")
    broken = [None, {"conversations": None}, {"conversations": [{"value": ["a"]}, {"value": "b"}]}, half]
    workload = ShareGPTWorkload(seed=0, path=write(tmp_path, [*broken, good]))
    workload.check()
    (request,) = workload.requests(1, tokenizer)
    assert request.token_ids == tokenizer.encode("one two three four five")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, [conversation("one two three four five", "six seven eight nine ten")])
    Path(path).write_text("\ufeff" + Path(path).read_text())
    ShareGPTWorkload(seed=0, path=path).check()


def test_conversations_longer_than_the_engine_takes_are_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    short, long = ("a b c d e f g h " * count for count in (2, 60))
    workload = ShareGPTWorkload(seed=0, path=write(tmp_path, [conversation(short, short), conversation(long, long)]))
    requests = workload.requests(4, tokenizer, 120)
    assert all(request.token_ids == tokenizer.encode(short) for request in requests)
