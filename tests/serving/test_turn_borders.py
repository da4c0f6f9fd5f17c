"""Turn borders: how much of a prompt the next turn's prompt shares, against encoding both whole."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.byte_tokenizer import SPECIAL, write_byte_tokenizer
from oracles.chat_templates import PLAIN, THINKING

from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer
from gdn_jax.serving.text.turn_borders import turn_borders

TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("model")), 512)


def common_length(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def borders(tokenizer: Tokenizer, chat: ChatTemplate, messages: list[dict[str, Any]], **arguments: Any) -> list[str]:
    """Return the prompt's text up to each border."""
    prompt = chat.render(messages, arguments.get("tools"), variables=arguments.get("variables"))
    ids = tokenizer.encode(prompt)
    found = turn_borders(tokenizer, prompt, ids, chat.next_turns(messages, **arguments))
    assert list(found) == sorted(set(found))
    return [tokenizer.decode(ids[:border], skip_special_tokens=False) for border in found]


def test_a_prompt_that_the_next_turn_keeps_whole_ends_at_its_border(tokenizer: Tokenizer) -> None:
    chat = ChatTemplate({"default": PLAIN})
    assert borders(tokenizer, chat, [user("hello")]) == [chat.render([user("hello")])]


@pytest.mark.parametrize("variables", [None, {"enable_thinking": False}])
def test_a_generation_prompt_that_the_next_turn_drops_lies_behind_the_border(
    tokenizer: Tokenizer, variables: dict[str, object] | None
) -> None:
    chat = ChatTemplate({"default": THINKING})
    assert borders(tokenizer, chat, [user("hello")], variables=variables) == [
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_reasoning_before_a_tool_result_lies_behind_one_border_and_before_the_other(tokenizer: Tokenizer) -> None:
    chat = ChatTemplate({"default": THINKING})
    called = {"role": "assistant", "content": "", "reasoning": "need f", "tool_calls": [CALL]}
    messages = [user("hello"), called, {"role": "tool", "content": "12"}]
    prompt = chat.render(messages, TOOLS)
    next_question, next_result = borders(tokenizer, chat, messages, tools=TOOLS)[::2]
    assert next_question == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert next_result == prompt


def test_a_message_being_continued_is_shared(tokenizer: Tokenizer) -> None:
    chat = ChatTemplate({"default": PLAIN})
    messages = [user("hello"), {"role": "assistant", "content": "well"}]
    prompt = chat.render(messages, continue_final_message=True)
    ids = tokenizer.encode(prompt)
    assert turn_borders(tokenizer, prompt, ids, chat.next_turns(messages)) == (len(ids),)


def test_without_samples_there_is_no_border(tokenizer: Tokenizer) -> None:
    assert turn_borders(tokenizer, "hello", tokenizer.encode("hello"), []) == ()


# Pieces that merge with their neighbours, special tokens and halves of them make the edges of the cut text interesting.
merging = st.sampled_from(["hello", "he", "ll", "o w", " ", "\n", "\n\n", "1", "2", "é", "e\u0301", "\u0301", "😀"])
pieces = merging | st.sampled_from([*SPECIAL, "<think>", "<|im_", "end|>"])
texts = st.lists(pieces, max_size=6).map("".join)


@settings(deadline=None)
@given(head=texts, prompt_tail=texts, samples=st.lists(texts, max_size=3))
def test_a_border_is_the_common_prefix_of_the_tokens_whatever_the_texts(
    tokenizer: Tokenizer, head: str, prompt_tail: str, samples: list[str]
) -> None:
    prompt = head + prompt_tail
    ids = tokenizer.encode(prompt)
    turns = [head + sample for sample in samples]
    expected = {common_length(ids, tokenizer.encode(turn)) for turn in turns}
    assert turn_borders(tokenizer, prompt, ids, turns) == tuple(sorted(expected))


def test_other_text_of_the_same_tokens_is_shared(tokenizer: Tokenizer) -> None:
    prompt, sample = (f"{letter}<|im_start|>hello<|im_end|>" for letter in ("\u00e9", "e\u0301"))
    ids = tokenizer.encode(prompt)
    assert ids == tokenizer.encode(sample)
    assert turn_borders(tokenizer, prompt, ids, [sample, sample + "hello"]) == (len(ids),)


class CountingTokenizer(Tokenizer):
    """Counts the characters it encodes."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return super().encode(text)


def test_only_text_around_the_border_is_encoded(tmp_path: Path) -> None:
    tokenizer = CountingTokenizer(write_byte_tokenizer(tmp_path), 512)
    chat = ChatTemplate({"default": THINKING})
    called = {"role": "assistant", "content": "short", "tool_calls": [CALL]}
    messages = [user("long " * 500), called, {"role": "tool", "content": "long " * 500}]
    prompt = chat.render(messages, TOOLS)
    ids = tokenizer.encode(prompt)
    tokenizer.encoded = 0
    turn_borders(tokenizer, prompt, ids, chat.next_turns(messages, TOOLS))
    assert 0 < tokenizer.encoded < 400  # four samples, of which the whole text has over 5000 characters each


@pytest.mark.parametrize("name", ["tiny-next-moe", "tiny-q35-dense"])
def test_golden_conversations_share_what_encoding_both_whole_shares(golden_folder: Path, name: str) -> None:
    chat = ChatTemplate.from_folder(golden_folder / name)
    tokenizer = Tokenizer(golden_folder / name, 512)
    for case in json.loads((golden_folder / name / "tokenizer_golden.json").read_text())["chat"]:
        arguments = {"tools": case.get("tools"), "variables": case.get("kwargs")}
        turns = chat.next_turns(case["messages"], **arguments)
        expected = {common_length(case["ids"], tokenizer.encode(turn)) for turn in turns}
        found = turn_borders(tokenizer, case["text"], case["ids"], turns)
        assert found == tuple(sorted(expected)), case["name"]
        assert found, case["name"]


def test_golden_templates_differ_in_whether_the_generation_prompt_survives(golden_folder: Path) -> None:
    for name, survives in (("tiny-next-moe", True), ("tiny-q35-dense", False)):
        tokenizer = Tokenizer(golden_folder / name, 512)
        chat = ChatTemplate.from_folder(golden_folder / name)
        prompt = chat.render([user("hello world")])
        last = borders(tokenizer, chat, [user("hello world")])[-1]
        assert (last == prompt) is survives
        assert last.endswith("<|im_start|>assistant\n")
