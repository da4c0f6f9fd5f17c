"""Message shapes: what clients send, what templates see, and what is refused by name."""

import copy
from typing import Any

import pytest

from gdn_jax.serving.core.errors import InvalidParameterError, UnsupportedParameterError
from gdn_jax.serving.text.messages import merge_system, normalize

USER = {"role": "user", "content": "u"}


def call(arguments: object) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
@pytest.mark.parametrize(
    "parts", [[{"type": "text", "text": "A"}, {"text": "B"}], ["A", {"type": "text", "text": "B"}]]
)
def test_text_parts_are_joined_in_order_and_alike_for_every_role(role: str, parts: list[object]) -> None:
    assert normalize([{"role": role, "content": parts}])[0]["content"] == "A\nB"


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "video"}, {"type": 3}]
)
def test_parts_that_are_not_text_are_refused_by_place_and_type(part: dict[str, object]) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"messages\[1\]\.content\[1\] must be a text part") as caught:
        normalize([USER, {"role": "user", "content": ["a", part]}])
    assert repr(part["type"]) in str(caught.value)
    assert caught.value.parameter == "messages[1].content[1]"


@pytest.mark.parametrize("part", [{}, {"type": "text"}, {"type": "text", "text": None}, 3, None])
def test_a_text_part_without_text_is_refused(part: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"content\[0\]\.text must be a string"):
        normalize([{"role": "user", "content": [part]}])


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistants_missing_content_is_the_empty_string(content: dict[str, object]) -> None:
    message = normalize([{"role": "assistant", **content, "tool_calls": [call("{}")]}])[0]
    assert message["content"] == ""
    assert message["tool_calls"]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": 5}, {"content": {"text": "a"}}])
def test_other_roles_need_content(role: str, content: dict[str, object]) -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[0\]\.content must be a string") as caught:
        normalize([{"role": role, **content}])
    assert caught.value.parameter == "messages[0].content"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a":3}', {"a": 3}),
        ("{}", {}),
        ("", {}),
        (" \n", {}),
        ("null", {}),
        (None, {}),
        ({"b": [1]}, {"b": [1]}),
        ('{"z": 1, "a": {"x": "\\u00e9"}}', {"z": 1, "a": {"x": "é"}}),
    ],
)
def test_arguments_of_a_call_become_a_mapping_in_the_order_sent(arguments: object, expected: dict[str, Any]) -> None:
    message: Any = normalize([{"role": "assistant", "tool_calls": [call(arguments)]}])[0]
    assert message["tool_calls"] == [call(expected)]
    assert list(message["tool_calls"][0]["function"]["arguments"]) == list(expected)


@pytest.mark.parametrize("arguments", ["[1]", '"x"', "3", "{", "{'a': 1}", [1], 3, "[" * 100_000])
def test_arguments_that_are_no_json_object_are_refused_by_place(arguments: object) -> None:
    place = r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be (a )?JSON"
    with pytest.raises(InvalidParameterError, match=place):
        normalize([{"role": "assistant", "tool_calls": [call(arguments)]}])


@pytest.mark.parametrize(
    "calls", [3, "x", {"function": {}}, [3], [{}], [{"function": {}}], [{"function": {"name": 3}}]]
)
def test_misshapen_calls_are_refused(calls: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[0\]\.tool_calls"):
        normalize([{"role": "assistant", "tool_calls": calls}])


def test_a_call_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameterError, match="'custom'"):
        normalize([{"role": "assistant", "tool_calls": [{**call("{}"), "type": "custom"}]}])


def test_a_call_without_type_is_a_function_call() -> None:
    message: Any = normalize([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}])[0]
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("sent", [{"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": [{"text": "r"}]}])
def test_reasoning_is_known_under_both_names(sent: dict[str, object]) -> None:
    message = normalize([{"role": "assistant", "content": "a", **sent}])[0]
    assert (message["reasoning"], message["reasoning_content"]) == ("r", "r")


def test_without_reasoning_neither_name_is_there() -> None:
    message = normalize([{"role": "assistant", "content": "a", "reasoning": None, "reasoning_content": None}])[0]
    assert message == {"role": "assistant", "content": "a"}


def test_developer_is_system() -> None:
    assert normalize([{"role": "developer", "content": "d"}, USER]) == [{"role": "system", "content": "d"}, USER]


def test_null_keys_are_left_out_and_unknown_keys_kept() -> None:
    assert normalize([{**USER, "name": None, "tool_calls": None, "extra": 1}]) == [{**USER, "extra": 1}]


@pytest.mark.parametrize("role", ["function", "System", "", None, 3, ["user"]])
def test_an_unknown_role_is_refused_with_those_there_are(role: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[1\]\.role must be one of system, developer, user"):
        normalize([USER, {"role": role, "content": "a"}])


@pytest.mark.parametrize("messages", [[], (), "hello", None, {"role": "user", "content": "a"}, 3])
def test_no_messages_at_all_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidParameterError, match="at least one message"):
        normalize(messages)


@pytest.mark.parametrize("message", ["hello", None, ["user", "a"]])
def test_a_message_that_is_no_object_is_refused(message: Any) -> None:
    with pytest.raises(InvalidParameterError, match=r"messages\[0\] must be an object"):
        normalize([message])


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "assistant", "content": ["a"], "reasoning": "r", "tool_calls": [call('{"a": 1}')]}]
    before = copy.deepcopy(messages)
    normalize(messages)
    assert messages == before


def test_merging_keeps_every_system_text_in_order_in_front() -> None:
    texts = [("system", "1"), ("user", "a"), ("developer", "2"), ("assistant", "b"), ("system", "3"), ("user", "c")]
    merged = merge_system(normalize([{"role": role, "content": content} for role, content in texts]))
    assert [message["content"] for message in merged] == ["1\n\n2\n\n3", "a", "b", "c"]
    assert [message["role"] for message in merged] == ["system", "user", "assistant", "user"]
    assert merge_system([USER]) == [USER]


def test_arguments_whose_inner_json_spells_a_nul_are_refused_by_place() -> None:
    def asked(arguments: str) -> list[dict[str, object]]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return normalize([{"role": "assistant", "content": "", "tool_calls": [call]}])

    for text in (r'{"a": "x\u0000"}', r'{"a": [{"b\u0000": 1}]}', r'{"a": "\\\u0000"}'):
        with pytest.raises(InvalidParameterError, match="U\\+0000") as caught:
            asked(text)
        assert caught.value.parameter == "messages[0].tool_calls[0].function.arguments"
    (message,) = asked(r'{"a": "\\u0000"}')  # a backslash and five characters, which is no NUL
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "\\u0000"}
