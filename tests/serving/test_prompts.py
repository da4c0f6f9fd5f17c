"""Prompts: what counts as one, as a list of them, as a conversation; what is refused, and as what."""

from collections.abc import Iterator

import jaxtyping
import numpy as np
import pytest
from oracles.quick_engine import make_parts

from gdn_jax.serving.core.errors import (
    InvalidParameterError,
    InvalidPromptError,
    RequestError,
    UnsupportedParameterError,
)
from gdn_jax.serving.prompts import PromptReader, as_conversations, as_prompts

HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(autouse=True)
def _no_type_checker() -> Iterator[None]:
    """As for a user: the code itself answers a value of the wrong type."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def reader() -> PromptReader:
    parts = make_parts()
    return PromptReader(parts.tokenizer, parts.chat_template, parts.model_config.vocab_size)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ("text", 1),
        ({"prompt": "text"}, 1),
        ([1, 2, 3], 1),
        (np.array([1, 2, 3]), 1),
        ([], 0),
        (["one", "two"], 2),
        ([[1, 2], [3]], 2),
        (["one", [3], {"prompt": "two"}], 3),
        (np.array([[1, 2], [3, 4]]), 2),
        (("one", "two"), 2),
        ([np.str_("one"), np.str_("two")], 2),
        (np.array(["one", "two", "three"]), 3),
    ],
    ids=repr,
)
def test_a_str_a_dict_and_a_run_of_integers_are_one_prompt_each(given: object, count: int) -> None:
    assert len(as_prompts(given)) == count  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "given", [None, 5, 1.5, b"bytes", object, {1, 2}, frozenset([1]), {1: 2}.keys(), {1: 2}.values()], ids=repr
)
def test_what_is_no_prompt_at_all_is_refused_by_its_type(given: object) -> None:
    with pytest.raises(InvalidPromptError, match=f"got {type(given).__name__}"):
        as_prompts(given)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        [None],
        [1.0],
        ["1"],
        [[1]],
        [True],
        {},
        {"prompt": 3},
        {"prompt_token_ids": "abc"},
        {"text": "a"},
        b"a",
        {1, 2},
        {1: 2}.items(),
    ],
    ids=repr,
)
def test_a_prompt_of_the_wrong_shape_is_refused_as_a_prompt(reader: PromptReader, given: object) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        reader.read(given)  # pyright: ignore[reportArgumentType]
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize("token", [-1, 320, 10**30])
def test_an_id_outside_the_vocabulary_is_refused_by_number(reader: PromptReader, token: int) -> None:
    with pytest.raises(InvalidPromptError, match=rf"0\.\.319.*got {token}"):
        reader.read([5, token])


def test_ids_of_any_integer_type_become_plain_integers(reader: PromptReader) -> None:
    read = reader.read(np.array([5, 319], np.int16)).token_ids  # pyright: ignore[reportArgumentType]
    assert read == [5, 319]
    assert {type(token) for token in read} == {int}


def test_a_conversation_is_one_and_a_list_of_them_is_several() -> None:
    assert as_conversations([HELLO]) == [[HELLO]]
    assert as_conversations((HELLO, HELLO)) == [[HELLO, HELLO]]
    assert as_conversations([[HELLO], [HELLO, HELLO]]) == [[HELLO], [HELLO, HELLO]]


@pytest.mark.parametrize("given", [None, 5, [], (), "Hello", {}, HELLO, b"Hello"], ids=repr)
def test_what_is_no_conversation_is_refused_as_a_prompt(reader: PromptReader, given: object) -> None:
    for read in (as_conversations, reader.render):
        with pytest.raises(InvalidPromptError, match="messages must") as caught:
            read(given)
        assert caught.value.parameter == "messages"


@pytest.mark.parametrize("given", [[None], [5], ["Hello"], [[HELLO]], [{"content": "a"}], [{"role": "user"}]], ids=repr)
def test_a_message_of_the_wrong_shape_is_refused_by_place(reader: PromptReader, given: object) -> None:
    with pytest.raises(RequestError) as caught:
        reader.render(given)
    assert str(caught.value.parameter).startswith("messages[0]")


def test_options_the_template_does_not_take_are_refused_by_name(reader: PromptReader) -> None:
    with pytest.raises(UnsupportedParameterError, match="add_generation_promt"):
        reader.render([HELLO], add_generation_promt=False)
    with pytest.raises(InvalidParameterError, match="chat_template_kwargs must be a mapping; got list"):
        reader.render([HELLO], chat_template_kwargs=[1])


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
@pytest.mark.parametrize("value", ["no", 0, None])
def test_a_switch_of_the_template_that_is_no_bool_is_refused_by_name(
    reader: PromptReader, name: str, value: object
) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name} must be True or False; got {value!r}") as caught:
        reader.render([HELLO], **{name: value})
    assert caught.value.parameter == name


def test_a_numpy_text_is_text(reader: PromptReader) -> None:
    assert reader.read(np.str_("Hello")) == reader.read("Hello")


def test_a_rendered_conversation_knows_where_the_next_turn_leaves_it(reader: PromptReader) -> None:
    prompt = reader.render([HELLO])
    assert prompt.text is not None
    assert prompt.text.startswith("<|im_start|>user\nHello")
    assert prompt.turn_borders
    assert all(0 < border <= len(prompt.token_ids) for border in prompt.turn_borders)
