"""The official client against a live server: whole and streamed, synchronous and not, and its own error classes."""

import asyncio

import openai
import pytest
from http_rig import MODEL, LiveServer, live_server


@pytest.fixture
def client(server: LiveServer):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


MESSAGES = [
    {"role": "developer", "content": "Answer in one word."},
    {"role": "user", "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "to?"}]},
]


def test_chat_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason


def test_completions_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": ["a", "b"], "temperature": 0, "max_tokens": 9, "logprobs": 2}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert len(whole.choices[0].logprobs.tokens) == 9


def test_a_prompt_is_scored_as_evaluation_harnesses_ask_for_it(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": [[82], [51, 71, 72]], "echo": True, "logprobs": 1, "max_tokens": 0}
    whole = client.completions.create(**asked, extra_body={"prompt_logprobs": 0})
    assert [choice.text for choice in whole.choices] == ["s", "Thi"]
    found = whole.choices[1].logprobs
    assert (found.tokens, found.text_offset) == (["T", "h", "i"], [0, 1, 2])
    assert found.token_logprobs == [None, -0.5, -0.5]
    assert [len(choice.prompt_logprobs) for choice in whole.choices] == [len(c.logprobs.tokens) for c in whole.choices]
    chunks = list(client.completions.create(**asked, stream=True))
    assert {c.choices[0].index: c.choices[0].text for c in chunks if c.choices[0].text} == {0: "s", 1: "Thi"}


def test_fields_of_others_pass_through_the_clients_own_door(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 30}
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 30, "skip_special_tokens": False}
    assert client.completions.create(**asked, extra_body=extra).usage.completion_tokens == 30


def test_the_stream_helper_of_the_client_accepts_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=1) as stream:
        for event in stream:
            if event.type == "content.delta" and len(event.snapshot) > 10:
                break
    final = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, logprobs=True)
    assert len(final.choices[0].logprobs.content) == 3


def test_many_asynchronous_streams_at_once(server: LiveServer) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def ask(index: int) -> str:
                messages = [{"role": "user", "content": f"number {index}"}]
                stream = await client.chat.completions.create(
                    model=MODEL, messages=messages, temperature=0, max_tokens=25, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(ask(index) for index in range(30)))

    assert len(set(asyncio.run(run()))) == 30
    server.idle()


def test_the_list_of_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_refusals_are_the_clients_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_keys_and_limits_are_the_clients_own_errors() -> None:
    with live_server(api_key=("right",), max_waiting=0, served_model_name=("org/name", "short")) as server:
        url = server.url + "/v1"
        with openai.OpenAI(base_url=url, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=url, api_key="right") as client:
            assert [model.id for model in client.models.list()] == ["org/name", "short"]
            assert client.models.retrieve("org/name").id == "org/name"
            assert client.completions.create(model="short", prompt="a").model == "org/name"
