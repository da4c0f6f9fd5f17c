"""Whatever is sent, the answer is a 4xx that names the field, and the next request is served."""

import json
import socket

import httpx
import pytest
from http_rig import LiveServer, chat, completion

from gdn_jax.serving.http.schemas import NEUTRAL, NO_OPS, ChatCompletionRequest, CompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def refused(server: LiveServer, path: str, body: object, parameter: str | None = None, status: int = 400) -> str:
    """Send a body that must be refused; returns the message."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if parameter is not None:
        assert error["param"] == parameter
    return error["message"]


OUT_OF_RANGE = [
    ("temperature", -3),
    ("temperature", -0.1),
    ("top_p", 7),
    ("top_p", 0),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 10**30),
    ("n", "2"),
    ("n", True),
    ("max_tokens", -1),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", [1]),
    ("stop", ["a"] * 257),
    ("stop", "a" * 5000),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [1] * 257),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"1_0": 1}),
    ("logit_bias", {"9" * 40: 1}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("seed", 1.5),
    ("seed", "1"),
    ("stream", "yes"),
    ("stream_options", 1),
    ("stream_options", {"include_usage": True}),
    ("priority", "high"),
    ("cache_salt", 5),
    ("ignore_eos", 1),
    ("temperature", "hot"),
    ("bad_words", [""]),
    ("bad_words", [" "]),
    ("bad_words", ["a"] * 129),
    ("model", 1),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_value_out_of_range_or_of_another_type_is_named(
    server: LiveServer, path: str, name: str, value: object
) -> None:
    body = completion() if path == COMPLETIONS else chat()
    message = refused(server, path, body | {name: value})
    assert name.partition(".")[0] in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0), ("temperature", 1e9), ("top_p", 1), ("top_p", 1e-9), ("top_k", 0), ("top_k", -1),
        ("min_p", 0), ("min_p", 1), ("n", 1), ("max_tokens", 1), ("min_tokens", 16), ("seed", -1), ("seed", 2**70),
        ("presence_penalty", -2), ("frequency_penalty", 2), ("repetition_penalty", 1.05), ("logit_bias", {}),
        ("logit_bias", {"5": -100}), ("bad_words", []), ("bad_words", ["a"] * 128), ("stop", []),
        ("stop", ["a"] * 256), ("stop_token_ids", []), ("priority", -5), ("cache_salt", "é"), ("logprobs", 20),
    ],
)  # fmt: skip
def test_a_value_on_the_border_is_served(server: LiveServer, name: str, value: object) -> None:
    answer = server.post(COMPLETIONS, completion() | {name: value})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_null_is_the_same_as_leaving_a_field_out(server: LiveServer, path: str) -> None:
    kind, body = (CompletionRequest, completion()) if path == COMPLETIONS else (ChatCompletionRequest, chat())
    fields = {name: None for name in kind.__struct_fields__ if name not in body}
    assert server.post(path, body | fields).status_code == 200


UNSUPPORTED = {
    "use_beam_search": True,
    "length_penalty": 2,
    "truncate_prompt_tokens": 5,
    "allowed_token_ids": [1],
    "structured_outputs": {"json": {}},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "response_format": {"type": "json_object"},
    "logits_processors": ["a"],
    "kv_transfer_params": {},
    "vllm_xargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "request_id": "mine",
    "return_token_ids": True,
    "suffix": "end",
    "best_of": 2,
    "prompt_embeds": "AAAA",
    "tool_choice": "required",
    "functions": [{}],
    "function_call": {"name": "f"},
    "reasoning_effort": "high",
    "include_reasoning": False,
    "verbosity": "low",
    "modalities": ["audio"],
    "audio": {},
    "web_search_options": {},
    "echo": True,
    "documents": [{}],
    "chat_template": "{{ messages }}",
}


def test_the_list_of_refusals_is_complete() -> None:
    assert set(UNSUPPORTED) == set(NEUTRAL)


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_is_not_offered_is_refused_by_name_and_taken_where_it_asks_for_nothing(
    server: LiveServer, name: str
) -> None:
    for path, kind, body in ((COMPLETIONS, CompletionRequest, completion()), (CHAT, ChatCompletionRequest, chat())):
        if name not in kind.__struct_fields__ or (name == "echo" and path == COMPLETIONS):
            continue
        assert name in refused(server, path, body | {name: UNSUPPORTED[name]}, name)
        for value in (None, *NEUTRAL[name]):
            assert server.post(path, body | {name: value}).status_code == 200, value


@pytest.mark.parametrize("name", NO_OPS)
def test_fields_that_mean_nothing_here_change_nothing(server: LiveServer, name: str) -> None:
    path, body = (CHAT, chat()) if name in ("parallel_tool_calls", "prediction") else (COMPLETIONS, completion())
    plain, other = (server.post(path, sent).json()["choices"] for sent in (body, body | {name: "something"}))
    assert plain == other


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_an_unknown_field_is_refused_by_name(server: LiveServer, path: str) -> None:
    body = {COMPLETIONS: completion(), CHAT: chat(), "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]}}[path]
    assert "temprature" in refused(server, path, body | {"temprature": 1}, "temprature")
    if path in (COMPLETIONS, CHAT):
        refused(server, path, body | {"stream_options": {"usage": True}}, "stream_options.usage")


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["a", ""], None, 5, {"a": 1}, [-1], [320], [2**63 - 1], [2**64], [1.5], [True], [[1], ["a"]],
     ["a", [1]], [[1], 2], [None], [[[1]]], "\ud800", "a\udc00b", "a\0b", ["a", "b\0"], "a" * 60_000, [1] * 5000],
)  # fmt: skip
def test_a_bad_prompt_is_refused(server: LiveServer, prompt: object) -> None:
    refused(server, COMPLETIONS, completion(prompt))


def test_a_prompt_of_almost_the_whole_context_is_served_and_one_token_more_is_not(server: LiveServer) -> None:
    def ask(length: int, max_tokens: int) -> httpx.Response:
        return server.post(COMPLETIONS, completion([70] * length, max_tokens=max_tokens, ignore_eos=True))

    assert ask(4095, 1).json()["usage"]["completion_tokens"] == 1
    for length, max_tokens in ((4095, 2), (4096, 1), (4097, 1), (10, 10**9)):
        answer = ask(length, max_tokens)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert "raise max_model_len" not in answer.json()["error"]["message"]  # it is the model's own limit
    answer = server.post(CHAT, chat(max_tokens=None, ignore_eos=True)).json()
    assert answer["usage"]["total_tokens"] == 4096
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "messages",
    [
        [], None, "hello", {}, [1], [{}], [{"role": "user"}], [{"role": "robot", "content": "a"}],
        [{"role": 5, "content": "a"}], [{"content": "a"}], [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [5]}],
        [{"role": "user", "content": "a\0"}], [{"role": "user", "content": "\ud83d"}],
        [{"role": "assistant", "tool_calls": 5}], [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"type": "x", "function": {"name": "f"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)  # fmt: skip
def test_bad_messages_are_refused_and_named(server: LiveServer, messages: object) -> None:
    message = refused(server, CHAT, {"messages": messages})
    assert "messages" in message or "JSON" in message


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0]"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_bad_chat_options_are_refused_and_named(server: LiveServer, fields: dict[str, object], parameter: str) -> None:
    refused(server, CHAT, chat() | fields, parameter)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"text"', b"{}", b"{'prompt': 'a'}", b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "\xff"}',
        b'{"prompt": "a\x00b"}', b"\x00", b"\xef\xbb\xbf{}", b'{"prompt": "a"} trailing', b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000, b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"tokens": ["a"]}', b'{"tokens": [-1]}',
        b'{"tokens": [99999999999999999999]}', b'{"prompt": "a", "messages": []}',
        b'{"prompt": "\\ud800"}', b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 800 + b"1" + b"}" * 801
        + b"]}",
    ],
)  # fmt: skip
def test_a_malformed_body_is_refused(server: LiveServer, path: str, body: bytes) -> None:
    refused(server, path, body)


def test_deep_nesting_in_what_templates_render_is_refused_or_served(server: LiveServer) -> None:
    deep: object = 1
    for _ in range(300):
        deep = {"a": deep}
    function = {"name": "f", "parameters": deep}
    for fields in ({"tools": [{"type": "function", "function": function}]}, {"chat_template_kwargs": {"x": deep}}):
        assert server.post(CHAT, chat() | fields).status_code in (200, 400)


def test_wrong_methods_types_and_places_are_named(server: LiveServer) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        answer = server.get(path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["code"] == "method_not_allowed"
        answer = server.post(path, content=b"prompt=a", headers={"content-type": "application/x-www-form-urlencoded"})
        assert answer.status_code == 415
        assert "application/json" in answer.json()["error"]["message"]
    for method, path, status in (("DELETE", "/health", 405), ("GET", "/v1/nothing", 404), ("POST", "/", 404)):
        answer = httpx.request(method, server.url + path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    utf8 = {"content-type": "application/json; charset=utf-8"}
    assert server.post("/tokenize", content=b'{"prompt": "a"}', headers=utf8).status_code == 200


def test_an_unknown_model_is_a_404_and_none_means_this_one(server: LiveServer) -> None:
    for path, body in ((COMPLETIONS, completion()), (CHAT, chat()), ("/tokenize", {"prompt": "a"})):
        refused(server, path, body | {"model": "gpt-4"}, "model", 404)
        answer = server.post(path, {name: value for name, value in body.items() if name != "model"})
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"GARBAGE\r\n\r\n", b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n", b"\x16\x03\x01",
     b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", b"GET /%00 HTTP/1.1\r\nhost: a\r\n\r\n",
     b"GET /health HTTP/1.1\r\nhost: a\r\nx-request-id: \xff\xfe\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_http_does_not_harm(server: LiveServer, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=5) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert not connection.recv(4096).startswith(b"HTTP/1.1 5")
    assert server.get("/health").status_code == 200


def test_too_many_choices_in_one_request_are_refused(server: LiveServer) -> None:
    refused(server, COMPLETIONS, completion(["a"] * 100, n=20), "n")
