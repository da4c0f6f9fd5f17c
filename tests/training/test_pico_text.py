"""The text side of the pico model that the package ships: chat template, tokenizer, and what ends its texts."""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from gdn_jax.serving.core.errors import RequestError
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer
from gdn_jax.serving.text.turn_borders import turn_borders
from gdn_jax.training.dialogues import DOMAINS, generate

PICO = Path(__file__).resolve().parents[2] / "gdn_jax" / "models" / "pico"
VOCABULARY = 4096
USER = {"role": "user", "content": " Hi \n"}
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "clock", "arguments": '{"city": "Rome", "digits": 2, "on": true}'}}
RESULT = {"role": "tool", "content": '{"time": "10:15"}'}
EMPTY_THINK = "<think>\n\n</think>\n\n"
ODD_TEXTS = [
    "", " ", "\n\n\n", "  indented\n\tand\ttabs\r\n", "naïve café", "Ελληνικά 中文 العربية हिन्दी", "👩‍👩‍👧‍👦 and 🇫🇷",
    "1234567890.0e-5",
    "a\u0301 is composed", "don't DON'T they'll", "\x00\x07\x7f", "<|not_a_token|> <think", "x" * 500, "!!!???...---",
    "\ufeffbom", "\u2028line\u2029paragraph", "\U0001d518\U0001d52b", "def f(x):\n    return {**x}\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_folder(PICO)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(PICO, VOCABULARY)


def said(content: str, **keys: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **keys}


def test_a_question_opens_an_answer_without_thoughts_unless_asked(template: ChatTemplate) -> None:
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([USER]) == asked + EMPTY_THINK
    assert template.render([USER], variables={"enable_thinking": False}) == asked + EMPTY_THINK
    assert template.render([USER], variables={"enable_thinking": True}) == asked + "<think>\n"
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_system_message_and_tools_share_the_first_turn(template: ChatTemplate) -> None:
    system = {"role": "system", "content": "Be kind. "}
    tools = '# Tools\n<tools>\n{"name": "clock", "parameters": {"type": "object"}}\n</tools>'
    rest = "<|im_start|>user\nHi<|im_end|>\n"

    def rendered(*messages: dict[str, object], tools: list[dict[str, object]] | None = None) -> str:
        return template.render(list(messages), tools, add_generation_prompt=False)

    assert rendered(system, USER) == f"<|im_start|>system\nBe kind.<|im_end|>\n{rest}"
    assert rendered(USER, tools=[TOOL]) == f"<|im_start|>system\n{tools}<|im_end|>\n{rest}"
    assert rendered(system, USER, tools=[TOOL]) == f"<|im_start|>system\n{tools}\n\nBe kind.<|im_end|>\n{rest}"


def test_a_second_system_message_is_merged_into_the_first(template: ChatTemplate) -> None:
    system = {"role": "system", "content": "a"}
    prompt = template.render([system, USER, {"role": "system", "content": "b"}], add_generation_prompt=False)
    assert prompt == "<|im_start|>system\na\n\nb<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_a_conversation_of_no_messages_is_refused(template: ChatTemplate) -> None:
    with pytest.raises(RequestError, match="messages"):
        template.render([])


def test_an_answer_after_the_last_question_is_what_was_generated(template: ChatTemplate) -> None:
    whole = template.render([USER, said("Hello.")], add_generation_prompt=False)
    assert whole == template.render([USER]) + "Hello.<|im_end|>\n"
    thought = said("Hello.", reasoning_content="greet\nback")
    whole = template.render([USER, thought], add_generation_prompt=False)
    generated = "greet\nback\n</think>\n\nHello.<|im_end|>\n"
    assert whole == template.render([USER], variables={"enable_thinking": True}) + generated
    assert whole == template.render([USER, said(f"<think>\n{generated[:-11]}")], add_generation_prompt=False)


def test_earlier_answers_lose_their_thoughts_and_tools_do_not_count_as_questions(template: ChatTemplate) -> None:
    called = said("", tool_calls=[CALL], reasoning_content="y")
    messages = [USER, said("one", reasoning_content="x"), USER, called, RESULT]
    prompt = template.render(messages, [TOOL])
    assert "<|im_start|>assistant\none<|im_end|>" in prompt
    assert "<|im_start|>assistant\n<think>\ny\n</think>\n\n<tool_call>" in prompt


def test_calls_and_results_are_rendered_in_the_familys_form(template: ChatTemplate) -> None:
    one = (
        "<tool_call>\n<function=clock>\n<parameter=city>\nRome\n</parameter>\n<parameter=digits>\n2\n</parameter>\n"
        "<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>"
    )
    response = '<tool_response>\n{"time": "10:15"}\n</tool_response>'
    messages = [USER, said("", tool_calls=[CALL]), RESULT]
    opened = template.render([USER], [TOOL])
    end = "<|im_end|>\n"
    assert template.render(messages, [TOOL], add_generation_prompt=False) == (
        f"{opened}{one}{end}<|im_start|>user\n{response}{end}"
    )
    messages = [USER, said("Wait.", tool_calls=[CALL, CALL]), RESULT, RESULT]
    assert template.render(messages, [TOOL]) == (
        f"{opened}Wait.\n\n{one}\n{one}{end}<|im_start|>user\n{response}\n{response}{end}"
        f"<|im_start|>assistant\n{EMPTY_THINK}"
    )


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_next_turn_shares_the_prompt_up_to_the_turn_border(
    template: ChatTemplate, tokenizer: Tokenizer, domain: str
) -> None:
    for dialogue in generate(domain, 20, 3):
        asked = list(dialogue.asked())
        prompt = template.render(asked, dialogue.tools)
        ids = tokenizer.encode(prompt)
        # The first one: a later one holds only while the functions' results are awaited.
        border, *_ = turn_borders(tokenizer, prompt, ids, template.next_turns(asked, dialogue.tools))
        later = template.render([*dialogue.messages, USER], dialogue.tools)
        assert tokenizer.encode(later)[:border] == ids[:border]
        assert tokenizer.decode(ids[border:], skip_special_tokens=False) == EMPTY_THINK
        answered = template.render(dialogue.messages, dialogue.tools, add_generation_prompt=False)
        assert answered.startswith(prompt.removesuffix(EMPTY_THINK) + "<think>\n")


def test_ids_are_dense_and_the_tags_are_the_last(tokenizer: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_file(str(PICO / "tokenizer.json"))
    vocabulary = library.get_vocab(with_added_tokens=True)
    assert sorted(vocabulary.values()) == list(range(VOCABULARY))
    assert tokenizer.num_tokens == VOCABULARY
    tags = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    tags += ["<tool_response>", "</tool_response>"]
    assert [tokenizer.encode(f"a{tag}b")[1:-1] for tag in tags] == [[VOCABULARY - 9 + place] for place in range(9)]
    assert tokenizer.special_tokens == ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
    assert tokenizer.decode(tokenizer.encode("".join(tags))) == "".join(tags[3:])


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == unicodedata.normalize("NFC", text)


def test_every_byte_is_a_token_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(token_id) for token_id in range(VOCABULARY)}
    assert {bytes([value]) for value in range(256)} <= single
    assert [tokenizer.token_bytes(token_id) for token_id in tokenizer.encode("2047")] == [b"2", b"0", b"4", b"7"]
    assert not any(sum(byte in b"0123456789" for byte in run) > 1 for run in single)


def test_a_text_ends_with_the_turn_or_the_document(tokenizer: Tokenizer) -> None:
    assert tokenizer.end_token_ids == (VOCABULARY - 7, VOCABULARY - 9)
    defaults = tokenizer.generation_defaults
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.7, 0.9, 20)
    assert defaults.not_applied == ()


@pytest.mark.parametrize("domain", DOMAINS)
def test_answers_are_mostly_below_sixty_tokens(tokenizer: Tokenizer, domain: str) -> None:
    lengths = [len(tokenizer.encode(str(dialogue.messages[-1]["content"]))) for dialogue in generate(domain, 300, 4)]
    assert sum(length < 60 for length in lengths) > 0.95 * len(lengths)


def test_the_tokenizer_says_how_long_a_text_the_model_reads() -> None:
    most = json.loads((PICO / "config.json").read_text())["max_position_embeddings"]
    assert json.loads((PICO / "tokenizer_config.json").read_text())["model_max_length"] == most
