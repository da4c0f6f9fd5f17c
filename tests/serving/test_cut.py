"""Cut: each row ends at its first end, and text, tokens and reasons agree."""

from pathlib import Path

import pytest
from oracles.byte_tokenizer import IM_END, byte_ids, write_byte_tokenizer

from gdn_jax import SamplingParams
from gdn_jax.serving.core.request import FinishReason
from gdn_jax.serving.cut import Cutter, TokenOutput
from gdn_jax.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenizer(write_byte_tokenizer(folder), 512)


def cutter(tokenizer: Tokenizer | None, max_tokens: int = 50, **params: object) -> Cutter:
    asked = SamplingParams(max_tokens=max_tokens, **params)  # pyright: ignore[reportArgumentType]
    return Cutter(asked, byte_ids("prompt"), max_tokens, tokenizer=tokenizer, end_token_ids=[IM_END])


def feed(one: Cutter, *steps: list[int]) -> tuple[list[int], str, TokenOutput]:
    """Cut steps until the end; return all tokens and text, and the last output."""
    tokens: list[int] = []
    text, output = "", TokenOutput()
    for step in steps:
        kept, output = one.cut(step)
        assert kept.num_kept == len(output.token_ids)
        assert kept.finish is output.finish_reason
        tokens += output.token_ids
        text += output.text
        if output.finish_reason is not None:
            break
    return tokens, text, output


@pytest.mark.parametrize("together", [True, False])
def test_an_end_token_ends_with_its_id_counted_and_no_text(tokenizer: Tokenizer, *, together: bool) -> None:
    ids = [*byte_ids("ab"), IM_END, *byte_ids("cd")]
    tokens, text, last = feed(cutter(tokenizer), *([ids] if together else [[token] for token in ids]))
    assert (tokens, text) == (ids[:3], "ab")
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)


def test_ignoring_end_tokens_covers_the_models_but_not_those_of_the_request(tokenizer: Tokenizer) -> None:
    ids = [IM_END, *byte_ids("ab")]
    tokens, _, last = feed(cutter(tokenizer, ignore_eos=True, stop_token_ids=[98]), ids)
    assert (tokens, last.finish_reason, last.stop_reason) == (ids, FinishReason.STOP, 98)


@pytest.mark.parametrize("together", [True, False])
def test_a_stop_string_over_several_tokens_never_shows(tokenizer: Tokenizer, *, together: bool) -> None:
    ids = byte_ids("say END more")
    tokens, text, last = feed(cutter(tokenizer, stop="END"), *([ids] if together else [[token] for token in ids]))
    assert (tokens, text) == (byte_ids("say END"), "say ")
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "END")


def test_a_possible_stop_string_is_held_back_and_given_out_at_the_end(tokenizer: Tokenizer) -> None:
    one = cutter(tokenizer, max_tokens=3, stop="ENDE")
    assert one.cut(byte_ids("E"))[1].text == ""
    assert one.cut(byte_ids("N"))[1].text == ""
    last = one.cut(byte_ids("D"))[1]
    assert (last.text, last.finish_reason) == ("END", FinishReason.LENGTH)


def test_a_stop_at_the_last_token_wins_over_the_length(tokenizer: Tokenizer) -> None:
    assert feed(cutter(tokenizer, max_tokens=2, stop="b"), byte_ids("abc"))[2].finish_reason is FinishReason.STOP
    assert feed(cutter(tokenizer, max_tokens=2), [97, IM_END])[2].finish_reason is FinishReason.STOP


def test_a_window_that_crosses_the_length_is_cut_there(tokenizer: Tokenizer) -> None:
    tokens, text, last = feed(cutter(tokenizer, max_tokens=5), byte_ids("abc"), byte_ids("defg"))
    assert (tokens, text, last.finish_reason) == (byte_ids("abcde"), "abcde", FinishReason.LENGTH)


@pytest.mark.parametrize("together", [True, False])
def test_the_least_length_counts_tokens_not_steps(tokenizer: Tokenizer, *, together: bool) -> None:
    ids = byte_ids("xbxbxb")
    steps = [ids] if together else [[token] for token in ids]
    tokens, text, last = feed(cutter(tokenizer, stop="b", min_tokens=4), *steps)
    assert (tokens, text, last.finish_reason) == (ids[:4], "xbx", FinishReason.STOP)


def test_a_character_cut_off_by_the_length_shows_as_one_mark(tokenizer: Tokenizer) -> None:
    tokens, text, _ = feed(cutter(tokenizer, max_tokens=2), byte_ids("€"))
    assert len(tokens) == 2
    assert text == "�"


def test_a_failure_gives_out_the_certain_text_and_no_token(tokenizer: Tokenizer) -> None:
    one = cutter(tokenizer, stop="END")
    one.cut(byte_ids("so EN"))
    output = one.fail()
    assert (output.token_ids, output.text, output.finish_reason) == ([], "EN", FinishReason.ERROR)


def test_without_text_tokens_end_as_before(tokenizer: Tokenizer) -> None:
    for silent in (cutter(None), cutter(tokenizer, detokenize=False)):
        tokens, text, last = feed(silent, byte_ids("ab"), [IM_END])
        assert (tokens, text, last.finish_reason) == ([*byte_ids("ab"), IM_END], "", FinishReason.STOP)


def test_a_stop_token_shows_only_where_stops_are_to_be_kept(tokenizer: Tokenizer) -> None:
    kept = cutter(tokenizer, stop_token_ids=[98], include_stop_str_in_output=True)
    assert feed(kept, byte_ids("ab"))[1] == "ab"
    assert feed(cutter(tokenizer, stop_token_ids=[98]), byte_ids("ab"))[1] == "a"
