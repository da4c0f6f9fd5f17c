"""Incremental detokenizer: for every split of every id sequence the pieces join to the decode of the whole."""

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.byte_tokenizer import END_OF_TEXT, IM_END, IM_START, NUM_TOKENS, byte_ids, write_byte_tokenizer

from gdn_jax.serving.text.detokenizer import IncrementalDetokenizer
from gdn_jax.serving.text.tokenizer import Tokenizer

PADDED = NUM_TOKENS + 3
GOLDEN_FOLDERS = ["tiny-next-moe", "tiny-q35-dense", "tiny-q35-moe-fp8"]

# Bytes at the borders of the UTF-8 rules, tokens of every kind, and whole characters spelled in bytes.
border_bytes = st.sampled_from(
    [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC1, 0xC2, 0xE0, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
)
characters = st.text(st.sampled_from("aé你न्😀👩\u200d\u0301\ufffd\u0000"), min_size=1, max_size=3).map(byte_ids)
pieces = st.one_of(
    border_bytes.map(lambda byte: [byte]), st.integers(0, NUM_TOKENS + 5).map(lambda token: [token]), characters
)
id_sequences = st.lists(pieces, max_size=12).map(lambda runs: [token_id for run in runs for token_id in run])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("model")), 512)


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in pairwise(borders)]


@settings(deadline=None)
@given(ids=id_sequences, cuts=st.lists(st.integers(0, 50), max_size=8), skip=st.booleans())
@example(ids=byte_ids("😀😀"), cuts=[1, 2, 3, 5, 6, 7], skip=True)
@example(ids=[0xF0, 0x9F, PADDED, IM_END, 0x98, 0x80], cuts=[1, 2, 3, 4, 5], skip=True)
@example(ids=[0xF0, 0x9F, PADDED, IM_END, 0x98, 0x80], cuts=[1, 2, 3, 4, 5], skip=False)
def test_pushes_and_flush_join_to_the_decode_of_all_ids(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(part) for part in split(ids, cuts)) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(prompt=id_sequences, ids=id_sequences, skip=st.booleans())
def test_a_character_that_the_prompt_leaves_unfinished_opens_the_output(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.flush()
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    before = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip).push(prompt)
    assert whole == before + text
    if tokenizer.decode(prompt, skip_special_tokens=skip) == before:
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(ids=id_sequences)
@example(ids=[0xED, 0xA0, 0x80, 0x41])
def test_no_push_ends_in_half_a_character_and_at_most_three_bytes_are_held(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    surrogate = re.compile(rb"\xed[\xa0-\xbf]\Z")
    emitted = ""
    for end in range(1, len(ids) + 1):
        emitted += detokenizer.push(ids[end - 1 : end])
        known = tokenizer.decode(ids[:end], skip_special_tokens=False)
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        assert whole.startswith(emitted)
        # what is held shows in a decode up to here as the one U+FFFD of an unfinished character, or as the two of a
        # surrogate's first bytes
        held = 2 if surrogate.search(b"".join(map(tokenizer.token_bytes, ids[:end]))) else 1
        assert known in [emitted + "\ufffd" * count for count in range(held + 1)]


def test_a_character_appears_with_its_last_byte_and_not_before(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([byte]) for byte in byte_ids("a😀é")] == ["a", "", "", "", "😀", "", "é"]
    assert detokenizer.flush() == ""


def test_invalid_bytes_appear_as_soon_as_nothing_can_complete_them(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.push([byte]) for byte in (0xED, 0xA0, 0x80)] == ["", "", "\ufffd" * 3]
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.push(byte_ids("a")) == "\ufffda"
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_left_out_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = [IM_START, *byte_ids("a"), IM_END, END_OF_TEXT]
    assert IncrementalDetokenizer(tokenizer).push(ids) == "a"
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    assert [shown.push([token_id]) for token_id in ids] == ["<|im_start|>", "a", "<|im_end|>", "<|endoftext|>"]


def test_a_finished_prompt_adds_nothing_to_the_output(tokenizer: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, byte_ids("prompt 😀"))
    assert detokenizer.push(byte_ids("x")) + detokenizer.flush() == "x"


class CountingTokenizer(Tokenizer):
    """Counts the tokens whose bytes are asked for, and decodes nothing."""

    asked = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.asked += 1
        return super().token_bytes(token_id)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        raise AssertionError("an incremental decode must not decode again")


def test_every_token_is_looked_at_once_and_of_the_prompt_only_the_end(tmp_path: Path) -> None:
    tokenizer = CountingTokenizer(write_byte_tokenizer(tmp_path), 512)
    detokenizer = IncrementalDetokenizer(tokenizer, byte_ids("a") * 1000)
    assert tokenizer.asked == 4
    for token_id in [0xE2] * 500 + byte_ids("😀") * 50:
        detokenizer.push([token_id])
    assert tokenizer.asked == 4 + 500 + 200


@pytest.mark.parametrize("name", GOLDEN_FOLDERS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_golden_texts_stream_to_the_same_text(golden_folder: Path, name: str, size: int) -> None:
    tokenizer = Tokenizer(golden_folder / name, 512)
    for text in ("café नमस्ते 😀 한국어 각각 👩‍👩‍👧 e\u0301", "<|im_start|>user\nhi<|im_end|>\n<think>\nx"):
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(tokenizer, ids[:1], skip_special_tokens=False)
        streamed = [detokenizer.push(ids[start : start + size]) for start in range(1, len(ids), size)]
        assert tokenizer.decode(ids, skip_special_tokens=False).endswith("".join(streamed) + detokenizer.flush())
        assert "\ufffd" not in "".join(streamed)


@given(ids=id_sequences, looks=st.lists(st.integers(0, NUM_TOKENS + 5), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_a_look_at_what_may_come_changes_nothing(tokenizer: Tokenizer, ids: list[int], looks: list[int]) -> None:
    looking, plain = IncrementalDetokenizer(tokenizer), IncrementalDetokenizer(tokenizer)
    for token in ids:
        seen = [looking.peek(other) for other in looks]
        assert seen == [looking.peek(other) for other in looks]
        assert looking.push([token]) == plain.push([token])
    assert looking.flush() == plain.flush()


def test_a_look_shows_whole_characters_and_what_a_part_completes(tokenizer: Tokenizer) -> None:
    after = IncrementalDetokenizer(tokenizer)
    after.push(byte_ids("€")[:2])
    assert [after.peek(token) for token in (byte_ids("€")[2], 65, byte_ids("€")[0])] == ["€", "A", "�"]
