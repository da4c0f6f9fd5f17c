"""Bad words as tokens: both forms of a word, and what has none."""

from pathlib import Path

import pytest
from oracles.byte_tokenizer import IM_END, byte_ids, write_byte_tokenizer

from gdn_jax.serving.bad_words import bad_word_tokens
from gdn_jax.serving.core.errors import InvalidParameterError
from gdn_jax.serving.runner.adjust import MAX_WORD_TOKENS
from gdn_jax.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return Tokenizer(folder, 512)


def test_a_word_is_banned_with_and_without_a_blank_before_it(tokenizer: Tokenizer) -> None:
    spaced = tuple(tokenizer.encode(" world"))
    assert len(spaced) < 6  # the blank is part of its first token
    assert bad_word_tokens(["world"], tokenizer) == (tuple(tokenizer.encode("world")), spaced)
    assert bad_word_tokens(["hello"], tokenizer)[0] == tuple(tokenizer.encode("hello"))
    assert len(bad_word_tokens(["hello"], tokenizer)[0]) == 1


def test_blanks_before_a_word_do_not_count_and_a_form_is_listed_once(tokenizer: Tokenizer) -> None:
    assert bad_word_tokens([" ab", "ab", "\n ab"], tokenizer) == (tuple(byte_ids("ab")), tuple(byte_ids(" ab")))
    assert bad_word_tokens([], tokenizer) == ()


def test_a_special_token_is_a_word_of_one_token(tokenizer: Tokenizer) -> None:
    assert bad_word_tokens(["<|im_end|>"], tokenizer) == ((IM_END,), (32, IM_END))


def test_a_word_of_too_many_tokens_is_refused_with_the_number(tokenizer: Tokenizer) -> None:
    longest = "?" * (MAX_WORD_TOKENS - 1)
    assert [len(word) for word in bad_word_tokens([longest], tokenizer)] == [MAX_WORD_TOKENS - 1, MAX_WORD_TOKENS]
    with pytest.raises(InvalidParameterError, match=f"at most {MAX_WORD_TOKENS} tokens each; got one of 33;") as caught:
        bad_word_tokens(["ab", longest + "?"], tokenizer)
    assert caught.value.parameter == "bad_words"


def test_a_word_that_is_no_unicode_is_refused_by_the_parameters_name(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="bad_words: text must be valid Unicode") as caught:
        bad_word_tokens(["\ud800"], tokenizer)
    assert caught.value.parameter == "bad_words"
