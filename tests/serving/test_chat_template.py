"""Chat templates: where they are found, what they see, what they cannot do, and the golden prompts."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from oracles.chat_templates import PLAIN, THINKING

from gdn_jax.serving.core.errors import InvalidParameterError, RequestError, StartupError
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer

GOLDEN_FOLDERS = ["tiny-next-moe", "tiny-next-dense", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8"]
USER = {"role": "user", "content": "u"}
SYSTEM = {"role": "system", "content": "s"}
ASSISTANT = {"role": "assistant", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, variables=variables)


def render(source: str, **arguments: Any) -> str:
    return template(source).render([USER], **arguments)


def write_config(folder: Path, chat_template: object, **values: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template, **values}))


def test_the_file_is_preferred_to_the_key_of_tokenizer_config(tmp_path: Path) -> None:
    write_config(tmp_path, "from key")
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "from key"
    (tmp_path / "chat_template.jinja").write_text("from file ü", encoding="utf-8")
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "from file ü"


def test_requests_with_tools_use_the_template_named_for_them(tmp_path: Path) -> None:
    write_config(tmp_path, [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    chat = ChatTemplate.from_folder(tmp_path)
    assert [chat.render([USER], tools) for tools in (None, [], TOOLS)] == ["d", "d", "t"]


@pytest.mark.parametrize("named", [None, [], [{"name": "other", "template": "x"}]])
def test_without_a_template_chat_is_refused_with_the_remedy(tmp_path: Path, named: object) -> None:
    write_config(tmp_path, named)
    with pytest.raises(RequestError, match=r"put its chat_template\.jinja there"):
        ChatTemplate.from_folder(tmp_path).render([USER])


def test_a_folder_without_any_file_has_no_template(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="needs a chat template"):
        ChatTemplate.from_folder(tmp_path).render([USER])


@pytest.mark.parametrize("value", [3, {"default": "x"}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_a_misshapen_key_is_refused_at_start(tmp_path: Path, value: object) -> None:
    write_config(tmp_path, value)
    with pytest.raises(StartupError, match=r"chat_template in tokenizer_config\.json"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize("source", ["a\n{% if %}", "a\n{{ x | no_such_filter }}", "a\n{% generation %}"])
def test_a_template_that_does_not_compile_is_refused_at_start_with_its_line(source: str) -> None:
    with pytest.raises(StartupError, match="must be valid Jinja; line 2"):
        template(source)


def test_a_template_file_that_is_no_text_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(StartupError, match=r"chat_template\.jinja must be UTF-8"):
        ChatTemplate.from_folder(tmp_path)


def test_named_tokens_of_tokenizer_config_are_variables(tmp_path: Path) -> None:
    write_config(
        tmp_path, "{{ eos_token }}{{ bos_token is defined }}", eos_token={"content": "<|im_end|>"}, bos_token=None
    )
    assert ChatTemplate.from_folder(tmp_path).render([USER]) == "<|im_end|>False"


def test_blocks_are_trimmed_as_published_templates_expect() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny\n") == "x\ny"


def test_loops_can_break_and_continue() -> None:
    source = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
    assert render(source + "{{ i }}{% endfor %}") == "023"


def test_json_keeps_characters_and_order_and_escapes_no_html() -> None:
    tools = [{"z": "<é> & '你'", "a": None, "f": 1.5, "t": True}]
    assert render("{{ tools[0] | tojson }}", tools=tools) == '{"z": "<é> & \'你\'", "a": null, "f": 1.5, "t": true}'
    assert render("{{ tools[0] | tojson(indent=1) }}", tools=[{"a": 1}]) == '{\n "a": 1\n}'
    assert render("{{ tools[0] | tojson(ensure_ascii=true) }}", tools=[{"a": "é"}]) == '{"a": "\\u00e9"}'
    assert render("{{ tools[0] | tojson(sort_keys=true, separators=(',', ':')) }}", tools=[{"b": 1, "a": 2}]) == (
        '{"a":2,"b":1}'
    )


def test_generation_blocks_render_as_their_content() -> None:
    source = "{% for m in messages %}{% generation %}\n{{ m.content }}!{% endgeneration %}{% endfor %}"
    assert render(source) == "u!"


def test_the_date_can_be_asked_for() -> None:
    before = datetime.now().year
    assert int(render("{{ strftime_now('%Y') }}")) in (before, before + 1)


def test_variables_reach_the_template_and_may_replace_named_tokens() -> None:
    chat = template("{{ eos_token }}{{ enable_thinking }}", eos_token="</s>")
    assert chat.render([USER], variables={"enable_thinking": False}) == "</s>False"
    assert chat.render([USER], variables={"enable_thinking": 1, "eos_token": "E"}) == "E1"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_variables_cannot_replace_the_fields_of_the_request(name: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"must not be named .*; got {name}"):
        template(PLAIN).render([USER], variables={name: []})


def test_a_template_that_raises_refuses_the_request_with_its_own_message() -> None:
    with pytest.raises(RequestError, match=r"refused these messages: No user query found\.") as caught:
        render("{{ raise_exception('No user query found.') }}")
    assert not isinstance(caught.value, StartupError)
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize(
    "expression",
    [
        "messages[7].content.x",
        "messages[0].missing.x",
        "'a' + 3",
        "1 / 0",
        "messages | tojson(indent=messages)",
        "missing | tojson",
        "[1][5].x",
        "'%d' | format('x')",
        "strftime_now(3)",
        "messages()",
        "'a' * 2**60",
    ],
)
def test_whatever_goes_wrong_in_a_template_refuses_the_request(expression: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused these messages"):
        render("{{ " + expression + " }}")


def test_endless_recursion_in_a_template_refuses_the_request() -> None:
    with pytest.raises(RequestError, match="recursion"):
        render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}")


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "''.__class__.x",
        "('' | attr('__class__')).x",
        "messages.__class__.x",
        "raise_exception.__globals__.x",
        "self.__init__.__globals__",
        "cycler.__init__.__globals__.os",
        "messages.append(1)",
        "messages[0].update({'role': 'x'})",
        "messages[0].clear()",
    ],
)
def test_a_template_can_neither_reach_out_of_the_sandbox_nor_change_the_messages(expression: str) -> None:
    with pytest.raises(RequestError, match="refused these messages"):
        render("{{ " + expression + " }}")


@pytest.mark.parametrize("expression", ["''['__class__']", "messages.__class__", "'{0.__class__}'.format(messages)"])
def test_a_private_attribute_is_undefined(expression: str) -> None:
    assert render("{{ " + expression + " }}") == ""


@pytest.mark.parametrize("source", ["{% for i in range(10**9) %}{% endfor %}", "{{ range(10**12) | list }}"])
def test_a_huge_range_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="Range too big"):
        render(source)


@pytest.mark.parametrize("messages", [[], "hello", [{"role": "bot", "content": "a"}]])
def test_misshapen_messages_are_refused_before_the_template_runs(messages: Any) -> None:
    with pytest.raises(InvalidParameterError):
        template("{{ raise_exception('ran') }}").render(messages)


@pytest.mark.parametrize("tools", ["x", {"a": 1}, [3], [None], 5])
def test_misshapen_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InvalidParameterError, match="tools must be a list of objects") as caught:
        template(PLAIN).render([USER], tools)
    assert caught.value.parameter == "tools"


def test_the_generation_prompt_is_there_unless_switched_off() -> None:
    chat = template(PLAIN)
    closed = chat.render([USER], add_generation_prompt=False)
    assert closed == "<|im_start|>user\nu<|im_end|>\n"
    assert chat.render([USER]) == closed + "<|im_start|>assistant\n"


@pytest.mark.parametrize("content", ["a", "Once upon ", "", "x</think>y", "ends\n\n", "\ue000\ue001 \ue000"])
def test_a_continued_message_ends_the_prompt_exactly(content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    assert template(PLAIN).render(messages, continue_final_message=True) == (
        f"<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n{content}"
    )
    assert (
        template(THINKING)
        .render(messages, continue_final_message=True)
        .endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{content}")
    )


@pytest.mark.parametrize("last", [USER, SYSTEM, {**ASSISTANT, "tool_calls": [{"function": {"name": "f"}}]}])
def test_only_an_assistants_words_can_be_continued(last: dict[str, object]) -> None:
    with pytest.raises(InvalidParameterError, match="can be continued") as caught:
        template(PLAIN).render([USER, last], continue_final_message=True)
    assert caught.value.parameter == "continue_final_message"


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="leaves out the last message"):
        template("fixed").render([USER, ASSISTANT], continue_final_message=True)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_a_call_without_content_gives_one_prompt_however_it_is_sent(content: dict[str, object]) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u00e9"}'}}]
    messages = [USER, {"role": "assistant", **content, "tool_calls": calls}, {"role": "tool", "content": "r"}]
    assert '<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>f|a="é"</tool_call><|im_end|>' in (
        template(THINKING).render(messages, TOOLS)
    )
    assert '<|im_start|>assistant\n<tool_call>f{"a": "é"}<|im_end|>' in template(PLAIN).render(messages, TOOLS)


def test_a_later_system_message_stays_in_place_where_the_template_takes_it() -> None:
    text = template(PLAIN).render([SYSTEM, USER, {"role": "developer", "content": "d"}, USER])
    assert re.findall(r"<\|im_start\|>(\w+)\n(\w*)", text) == [
        ("system", "s"), ("user", "u"), ("system", "d"), ("user", "u"), ("assistant", ""),
    ]  # fmt: skip


DROPS_LATER_SYSTEM = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in messages if m.role != 'system' %}({{ m.content }}){% endfor %}"
)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER, SYSTEM, USER], "[s](u)(u)"),
        ([SYSTEM, {"role": "developer", "content": "d"}, USER], "[s\n\nd](u)"),
        ([{"role": "developer", "content": "d"}, USER, SYSTEM], "[d\n\ns](u)"),
        ([SYSTEM, USER], "[s](u)"),
        ([SYSTEM], "[s]"),
        ([USER], "(u)"),
    ],
)
def test_system_messages_are_merged_in_front_where_the_template_would_drop_or_refuse_them(
    messages: list[dict[str, object]], expected: str
) -> None:
    assert template(DROPS_LATER_SYSTEM).render(messages) == expected
    roles = re.findall(r"<\|im_start\|>(\w+)", template(THINKING).render(messages, add_generation_prompt=False))
    assert "system" not in roles[1:]


def test_rendering_changes_no_argument_and_threads_may_share_a_template() -> None:
    chat = template(THINKING)
    conversations = [[{"role": "user", "content": f"question {index}"}] for index in range(50)]
    expected = [chat.render(conversation) for conversation in conversations]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(chat.render, conversations)) == expected
    assert conversations[3] == [{"role": "user", "content": "question 3"}]


def test_the_next_turns_are_an_answer_and_a_question_and_with_tools_a_call_and_its_result() -> None:
    chat = template(THINKING)
    assert len(chat.next_turns([USER])) == 2
    with_tools = chat.next_turns([USER], TOOLS)
    assert len(with_tools) == 4
    assert sum("<tool_call>f</tool_call>" in text for text in with_tools) == 2
    assert sum("<think>\nb\n</think>" in text for text in with_tools) == 1  # dropped once a user message follows


def test_next_turns_that_the_template_refuses_are_left_out() -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}x"
    assert template(source).next_turns([USER], TOOLS) == []


@pytest.mark.parametrize("name", GOLDEN_FOLDERS)
def test_golden_conversations_render_and_encode_exactly(golden_folder: Path, name: str) -> None:
    chat = ChatTemplate.from_folder(golden_folder / name)
    tokenizer = Tokenizer(golden_folder / name, 512)
    cases = json.loads((golden_folder / name / "tokenizer_golden.json").read_text())["chat"]
    assert cases
    for case in cases:
        text = chat.render(
            case["messages"],
            case.get("tools"),
            add_generation_prompt=case["add_generation_prompt"],
            variables=case.get("kwargs"),
        )
        assert text == case["text"], case["name"]
        assert tokenizer.encode(text) == case["ids"], case["name"]
