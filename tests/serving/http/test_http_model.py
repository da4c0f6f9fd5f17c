"""The server over a real engine with a tiny model: conversations hit the cache, streams agree, leaving frees all."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
from http_rig import LiveServer, joined, live_server, streamed, texts_of
from oracles.engine_rig import LOGPROB_ERROR, SETTINGS, TINY, make_llm, one_shape, random_ids, tiny_oracle
from oracles.numpy_adjust import Wishes, assert_chosen

from gdn_jax import AsyncLLM, SamplingParams
from gdn_jax.serving import startup
from gdn_jax.serving.bad_words import bad_word_tokens
from gdn_jax.serving.text.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"temperature": 0, "ignore_eos": True}


def make() -> AsyncLLM:
    with patch.object(startup, "PoolSizes", one_shape):
        return AsyncLLM(str(TINY), **SETTINGS)


@pytest.fixture(scope="module")
def tiny():
    with live_server(make, model="tiny") as found:
        yield found


def shared(left: list[int], right: list[int]) -> int:
    """The length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("thinking", [True, False])
def test_each_of_ten_turns_hits_up_to_the_last_shared_boundary(tiny: LiveServer, *, thinking: bool) -> None:
    messages: list[dict[str, object]] = []
    before: list[int] = []
    hits = 0
    options = {"chat_template_kwargs": {"enable_thinking": thinking}}
    for turn in range(10):
        messages.append({"role": "user", "content": f"turn {turn}: " + "the mill " * 3})
        tokens = tiny.post("/tokenize", {"messages": messages, **options}).json()["tokens"]
        answer = tiny.post(CHAT, {"messages": messages, "max_tokens": 12, **GREEDY, **options}).json()
        used = answer["usage"]
        assert used["prompt_tokens"] == len(tokens)
        known = shared(before, tokens)
        cached = used["prompt_tokens_details"]["cached_tokens"]
        assert cached >= known // 64 * 64
        assert len(tokens) - cached <= 64 + len(tokens) - known
        hits += cached > 0
        before = tokens
        messages.append(answer["choices"][0]["message"])
    assert hits >= 7


@pytest.mark.parametrize("seed", range(3))
def test_streamed_text_equals_whole_text_byte_for_byte(tiny: LiveServer, seed: int) -> None:
    body = {"prompt": f"The river {seed}", "temperature": 1.5, "seed": seed, "n": 2, "max_tokens": 40, "stop": ["e "]}
    whole = texts_of(tiny.post(COMPLETIONS, body).json())
    assert joined(streamed(tiny, COMPLETIONS, body)) == whole


def test_answers_are_those_of_the_python_api_alone_or_together(tiny: LiveServer) -> None:
    prompts = [f"prompt number {index}" for index in range(6)]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    expected = [o.outputs[0].text for o in make_llm().generate(prompts, params, use_tqdm=False)]
    answer = tiny.post(COMPLETIONS, {"prompt": prompts, "max_tokens": 10, **GREEDY}).json()
    assert list(texts_of(answer).values()) == expected

    async def together() -> list[str]:
        async with httpx.AsyncClient(timeout=240) as client:
            bodies = [{"prompt": prompt, "max_tokens": 10, **GREEDY} for prompt in prompts]
            asked = await asyncio.gather(*(client.post(tiny.url + COMPLETIONS, json=body) for body in bodies))
            return [texts_of(answer.json())[0] for answer in asked]

    assert asyncio.run(together()) == expected


def test_an_echoed_prompt_is_scored_whole_however_much_of_it_is_known(tiny: LiveServer) -> None:
    """Three blocks, asked twice: cached positions have no logits of their own (the oracle has)."""
    prompt = random_ids(5, 192)
    rows = tiny_oracle().logprobs(prompt[:1], prompt[1:])
    expected = rows[np.arange(191), np.asarray(prompt[1:])]
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 3, "n": 2, **GREEDY}
    answers = [tiny.post(COMPLETIONS, body).json() for _ in range(2)]
    answers.append(tiny.post(COMPLETIONS, {**body, "max_tokens": 0}).json())
    for answer in answers:
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in answer["choices"]:
            found = choice["logprobs"]["token_logprobs"]
            assert len(found) == 192 + answer["usage"]["completion_tokens"] // 2
            assert found[0] is None
            np.testing.assert_allclose(found[1:192], expected, atol=LOGPROB_ERROR, rtol=0)
    events = streamed(tiny, COMPLETIONS, body)
    assert joined(events) == texts_of(answers[0])
    for choice in answers[0]["choices"]:
        parts = [c["logprobs"] for e in events for c in e["choices"] if c["index"] == choice["index"] and c["logprobs"]]
        assert [value for part in parts for value in part["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    tiny.idle()


def test_a_conversations_prompt_is_scored_with_the_text_of_each_token(tiny: LiveServer) -> None:
    tokens = count(tiny, [USER])
    answer = tiny.post(CHAT, {"messages": [USER], "prompt_logprobs": 1, "max_tokens": 2, **GREEDY}).json()
    first, *reports = answer["prompt_logprobs"]
    assert first is None
    rows = tiny_oracle().logprobs(tokens[:1], tokens[1:])
    text = tiny.post("/detokenize", {"tokens": tokens[1:]}).json()["prompt"]
    for token, report, row in zip(tokens[1:], reports, rows, strict=True):
        own = report[str(token)]
        np.testing.assert_allclose(own["logprob"], row[token], atol=LOGPROB_ERROR, rtol=0)
        text = text.removeprefix(own["decoded_token"])
    assert text == ""


def test_after_disconnects_every_slot_is_back_and_a_greedy_answer_unchanged(tiny: LiveServer) -> None:
    probe = {"prompt": "a prompt to compare", "max_tokens": 16, **GREEDY}
    before = texts_of(tiny.post(COMPLETIONS, probe).json())
    tiny.idle()
    draw = random.Random(3)

    async def leave_early(client: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": f"leaving {index}", "max_tokens": 300, "n": draw.choice([1, 2]), "stream": index % 2 == 0}
        asking = asyncio.create_task(client.post(tiny.url + COMPLETIONS, json={**body, **GREEDY}))
        await asyncio.wait([asking], timeout=draw.random())
        asking.cancel()

    async def crowd() -> None:
        async with httpx.AsyncClient(timeout=240) as client:
            await asyncio.gather(*(leave_early(client, index) for index in range(30)))

    aborted = tiny.metric("gdn_jax_completions_total")
    asyncio.run(crowd())
    tiny.idle(10)
    assert tiny.metric("gdn_jax_completions_total") >= aborted + 20
    assert texts_of(tiny.post(COMPLETIONS, probe).json()) == before


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"prompt": "a", "stop_token_ids": [999_999], "min_tokens": 5}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": [320]}, "stop_token_ids"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": "a", "logit_bias": {"999999": 5}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 5}}, "logit_bias"),
        ({"prompt": "a", "bad_words": ["?" * 40]}, "bad_words"),
        ({"prompt": [5] * 512}, None),
        ({"prompt": "a", "max_tokens": 10**9}, None),
    ],
)
def test_what_the_engine_refuses_is_a_400_beside_a_request_that_goes_on(
    tiny: LiveServer, body: dict[str, object], parameter: str | None
) -> None:
    neighbour = {"prompt": "a neighbour", "max_tokens": 30, **GREEDY}
    alone = texts_of(tiny.post(COMPLETIONS, neighbour).json())

    async def both() -> tuple[httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(timeout=240) as client:
            beside = asyncio.create_task(client.post(tiny.url + COMPLETIONS, json=neighbour))
            await asyncio.sleep(0.02)
            return await client.post(tiny.url + COMPLETIONS, json=body), await beside

    refused, other = asyncio.run(both())
    assert refused.status_code == 400
    assert parameter is None or refused.json()["error"]["param"] == parameter
    assert texts_of(other.json()) == alone


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2),
        ("frequency_penalty", 1.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", {"5": 9, "70": 8.5, "319": 100}),
        ("bad_words", ["P", ";"]),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_parameter_that_adjusts_logits_gives_the_tokens_of_the_adjusted_logits(
    tiny: LiveServer, path: str, field: str, value: Any
) -> None:
    messages = [USER]
    prompt = count(tiny, messages)
    body: dict[str, Any] = {"max_tokens": 20, "return_tokens_as_token_ids": True, **GREEDY}
    body |= {"prompt": prompt, "logprobs": 0} if path == COMPLETIONS else {"messages": messages, "logprobs": True}

    def answer(**fields: Any) -> list[int]:
        (choice,) = tiny.post(path, body | fields).json()["choices"]
        reported = choice["logprobs"]
        names = reported["tokens"] if path == COMPLETIONS else [each["token"] for each in reported["content"]]
        return [int(name.removeprefix("token_id:")) for name in names]

    asked = {int(token): bias for token, bias in value.items()} if field == "logit_bias" else value
    if field == "bad_words":
        asked = bad_word_tokens(value, Tokenizer(TINY, 320))
    tokens, oracle = answer(**{field: value}), tiny_oracle()
    assert len(tokens) == 20
    assert tokens != answer()
    raw = oracle.model.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert_chosen(raw, Wishes(**{field: asked}), prompt, tokens, num_tokens=318, error=LOGPROB_ERROR)


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
RESULT = {"role": "tool", "content": "7"}


def count(server: LiveServer, messages: list[dict[str, object]], **fields: object) -> list[int]:
    answer = server.post("/tokenize", {"messages": messages, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_a_system_message_that_is_not_first_is_merged_in_order(tiny: LiveServer) -> None:
    late = [USER, SYSTEM, USER]
    assert count(tiny, late) == count(tiny, [SYSTEM, USER, USER])
    developer = {"role": "developer", "content": "Be kind."}
    both = {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert count(tiny, [developer, SYSTEM, USER]) == count(tiny, [both, USER])
    assert count(tiny, [SYSTEM])


def test_a_tool_call_without_content_reads_the_same_in_all_its_forms(tiny: LiveServer) -> None:
    forms = [{"content": None}, {}, {"content": ""}]
    seen = [count(tiny, [USER, {"role": "assistant", "tool_calls": [CALL], **form}, RESULT]) for form in forms]
    assert seen[0] == seen[1] == seen[2]
    function = {"name": "f", "arguments": {"a": 3}}
    as_object = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    assert count(tiny, [USER, as_object, RESULT]) == seen[0]


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_every_part_of_a_content_list_is_read_in_order(tiny: LiveServer, role: str) -> None:
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    as_parts, as_text = ([USER, {"role": role, "content": content}, USER] for content in (parts, "A\nB"))
    assert count(tiny, as_parts) == count(tiny, as_text)


def test_tools_are_rendered_and_change_the_prompt(tiny: LiveServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    with_tools = count(tiny, [USER], tools=tools)
    assert len(with_tools) > len(count(tiny, [USER])) + 10
    for choice in ("auto", "none", None):
        body = {"messages": [USER], "tools": tools, "tool_choice": choice, "max_tokens": 1}
        assert tiny.post(CHAT, body).json()["usage"]["prompt_tokens"] == len(with_tools)


def test_a_last_message_can_be_continued(tiny: LiveServer) -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    tokens = count(tiny, [USER, begun], continue_final_message=True)
    text = tiny.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text.endswith("The answer is")
    closed = count(tiny, [USER, begun], add_generation_prompt=False)
    assert closed[: len(tokens)] == tokens


def test_a_switch_of_the_template_can_be_set_for_the_whole_server() -> None:
    with live_server(make, model="tiny", chat_template_kwargs='{"enable_thinking": false}') as server:
        off = count(server, [USER])
        assert off == count(server, [USER], chat_template_kwargs={"enable_thinking": False})
        assert off != count(server, [USER], chat_template_kwargs={"enable_thinking": True})


def test_the_command_line_serves_and_stops_on_a_signal() -> None:
    command = [sys.executable, "-m", "gdn_jax.serving", "serve", "--model", str(TINY), "--port", "0", "--log-json"]
    command += ["--max-model-len", "512", "--dtype", "float32", "--served-model-name", "a", "b"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    ) as run:
        assert run.stderr is not None
        address = ""
        for line in run.stderr:
            if "listening on" in line:
                address = line.partition("listening on ")[2].partition(";")[0]
            if '"ready after' in line:
                break
        answer = httpx.get(f"{address}/v1/models", timeout=30).json()
        assert [card["id"] for card in answer["data"]] == ["a", "b"]
        run.send_signal(signal.SIGTERM)
        assert run.wait(30) == 0


def test_a_mistake_on_the_command_line_is_one_line() -> None:
    for flags, words in (["--port", "99999"], "0..65535"), (["--ssl-keyfile", "/nowhere"], "together"):
        command = [sys.executable, "-m", "gdn_jax.serving", "serve", "--model", str(TINY), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert words in done.stderr
        assert "Traceback" not in done.stderr
