"""What generation endpoints answer: shapes, streams, choices, usage, stop strings, log probabilities."""

from itertools import pairwise

import pytest
from http_rig import LiveServer, chat, completion, joined, live_server, spelling, streamed, texts_of

from benchmarks.stub_engine import StubEngine
from gdn_jax.serving.http.logprobs import CompletionLogprobs, Echo, TokenNames, chat_entries
from gdn_jax.serving.outputs import Logprob

IM_END = 306
PATHS = {"/v1/completions": completion, "/v1/chat/completions": chat}
both = pytest.mark.parametrize("path", PATHS)


@both
def test_streamed_text_equals_whole_text(server: LiveServer, path: str) -> None:
    body = PATHS[path](n=3, temperature=1, seed=5, max_tokens=40, stop=["a", "zz"])
    whole = server.post(path, body).json()
    assert joined(streamed(server, path, body)) == texts_of(whole)
    assert len(set(texts_of(whole).values())) == 3


@both
def test_every_choice_of_a_stream_gets_exactly_one_finish_chunk_after_its_text(server: LiveServer, path: str) -> None:
    found = streamed(server, path, PATHS[path](n=3, temperature=1, seed=1, stop=["e"], max_tokens=30))
    for index in range(3):
        reasons = [c["finish_reason"] for e in found for c in e["choices"] if c["index"] == index]
        assert reasons[-1] in ("stop", "length")
        assert set(reasons[:-1]) == {None}


def test_a_chat_stream_names_the_speaker_first(server: LiveServer) -> None:
    first, *rest = streamed(server, "/v1/chat/completions", chat())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in event["choices"][0]["delta"] for event in rest)
    assert len({event["id"] for event in [first, *rest]}) == 1


@both
def test_usage_counts_prompt_once_and_every_choice(server: LiveServer, path: str) -> None:
    whole = server.post(path, PATHS[path](n=2, max_tokens=5, ignore_eos=True)).json()["usage"]
    assert whole["completion_tokens"] == 10
    assert whole["total_tokens"] == whole["prompt_tokens"] + 10
    assert whole["prompt_tokens_details"] == {"cached_tokens": 0}
    options = {"stream_options": {"include_usage": True}}
    found = streamed(server, path, PATHS[path](n=2, max_tokens=5, ignore_eos=True, **options))
    assert found[-1]["usage"] == whole
    assert found[-1]["choices"] == []
    assert all(event["usage"] is None for event in found[:-1])
    assert all("usage" not in event for event in streamed(server, path, PATHS[path]()))


def test_continuous_usage_grows_with_the_stream(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = streamed(server, "/v1/completions", completion(max_tokens=4, ignore_eos=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert all(before <= after for before, after in pairwise(counts))
    assert counts[-1] == 4


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(server: LiveServer) -> None:
    prompts = ["one ", "two ", "three "]
    body = completion(prompts, n=2, echo=True, max_tokens=3, temperature=1, seed=2, ignore_eos=True)
    whole = server.post("/v1/completions", body).json()
    texts = texts_of(whole)
    assert list(texts) == list(range(6))
    assert [texts[i].startswith(prompts[i // 2]) for i in range(6)] == [True] * 6
    assert whole["usage"]["completion_tokens"] == 18
    assert joined(streamed(server, "/v1/completions", body)) == texts


@pytest.mark.parametrize("prompt", ["The river", [84, 72], ["The", "river"], [[84, 72], [82]]])
def test_each_form_of_prompt_is_taken(server: LiveServer, prompt: object) -> None:
    assert server.post("/v1/completions", completion(prompt)).status_code == 200


def test_equal_seeds_give_equal_choices_and_others_differ(server: LiveServer) -> None:
    def ask(seed: int) -> dict[int, str]:
        return texts_of(server.post("/v1/completions", completion(n=4, temperature=1, seed=seed)).json())

    assert ask(1) == ask(1)
    assert len({text for seed in range(1, 9) for text in ask(10 * seed).values()}) == 32


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_over_several_tokens_never_leaks(*, stream: bool) -> None:
    script = spelling("near EN, but not. here END and more", then=IM_END)
    with live_server(lambda: StubEngine(script=script)) as server:
        for keep in (False, True):
            body = completion(stop=["END"], max_tokens=60, include_stop_str_in_output=keep)
            if stream:
                found = streamed(server, "/v1/completions", body)
                text, last = joined(found)[0], found[-1]["choices"][0]
            else:
                (last,) = server.post("/v1/completions", body).json()["choices"]
                text = last["text"]
            assert text == "near EN, but not. here " + "END" * keep
            assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
        whole = "near EN, but not. here END and more"
        body = completion(stop=["END of it"], max_tokens=60)
        found = streamed(server, "/v1/completions", body)
        assert joined(found) == {0: whole}


TEXT = "naïve 한국어 👩‍👩‍👧 e\u0301 中文\u2028x"


@both
def test_characters_of_several_tokens_arrive_whole(path: str) -> None:
    with live_server(lambda: StubEngine(script=spelling(TEXT, then=IM_END))) as server:
        body = PATHS[path](max_tokens=200)
        assert texts_of(server.post(path, body).json()) == {0: TEXT}
        assert joined(streamed(server, path, body)) == {0: TEXT}


def test_bytes_that_are_no_text_show_as_replacement_signs_in_both_forms() -> None:
    with live_server(lambda: StubEngine(script=spelling(b"a\xffb\xe4\xb8", then=IM_END))) as server:
        assert texts_of(server.post("/v1/completions", completion()).json()) == {0: "a\ufffdb\ufffd"}
        assert joined(streamed(server, "/v1/completions", completion())) == {0: "a\ufffdb\ufffd"}


@pytest.mark.parametrize("length", range(1, 31))
def test_a_short_answer_is_streamed_to_its_last_character(length: int, short_answers: LiveServer) -> None:
    body = completion(max_tokens=length, stop=["never in this text"])
    assert len(joined(streamed(short_answers, "/v1/completions", body))[0]) == length


@pytest.fixture(scope="module")
def short_answers():
    with live_server(lambda: StubEngine(script=spelling("never in this tex" * 9))) as found:
        yield found


def test_logprobs_of_chat_give_exact_bytes_and_alternatives() -> None:
    with live_server(lambda: StubEngine(script=spelling("aé", then=IM_END))) as server:
        body = chat(logprobs=True, top_logprobs=2)
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        content = choice["logprobs"]["content"]
        assert [entry["bytes"] for entry in content][:3] == [[0x61], [0xC3], [0xA9]]
        assert [entry["token"] for entry in content][:3] == ["a", r"bytes:\xc3", r"bytes:\xa9"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        found = streamed(server, "/v1/chat/completions", body)
        parts = [c["logprobs"]["content"] for e in found for c in e["choices"] if c["logprobs"]]
        assert [entry for part in parts for entry in part] == content


def test_logprobs_of_completions_have_one_entry_per_token_and_true_offsets() -> None:
    with live_server(lambda: StubEngine(script=spelling("éab"))) as server:
        body = completion(logprobs=1, max_tokens=4)
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        found = choice["logprobs"]
        assert found["text_offset"] == [0, 0, 1, 2]
        assert {len(values) for values in found.values()} == {4}
        body["return_tokens_as_token_ids"] = True
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        assert choice["logprobs"]["tokens"][2] == "token_id:64"


@pytest.mark.parametrize(("num_top", "expected"), [(0, {"c": -7.0}), (2, {"a": -0.5, "b": -1.0, "c": -7.0})])
def test_completions_give_the_sampled_token_besides_the_likeliest(num_top: int, expected: dict[str, float]) -> None:
    tokens = StubEngine().get_tokenizer()
    likeliest, second, sampled = tokens.encode("abc")
    report = {
        sampled: Logprob(logprob=-7.0, rank=40),
        likeliest: Logprob(logprob=-0.5, rank=1),
        second: Logprob(logprob=-1.0, rank=2),
    }
    writer = CompletionLogprobs(TokenNames(tokens, as_ids=False), tokens, num_top, Echo("", 0))
    assert writer.write([sampled], [report])["top_logprobs"] == [expected]
    (entry,) = chat_entries([sampled], [report], num_top, TokenNames(tokens, as_ids=False))
    assert len(entry["top_logprobs"]) == num_top


def test_continuous_usage_alone_adds_no_chunk_without_choices(server: LiveServer) -> None:
    body = completion(max_tokens=4, ignore_eos=True, stream_options={"continuous_usage_stats": True})
    found = streamed(server, "/v1/completions", body)
    assert all(event["choices"] for event in found)
    assert found[-1]["usage"]["completion_tokens"] == 4


def test_echo_alone_returns_the_prompt_and_generates_nothing(server: LiveServer) -> None:
    body = completion("The river", echo=True, max_tokens=0)
    answer = server.post("/v1/completions", body).json()
    assert texts_of(answer) == {0: "The river"}
    assert answer["usage"]["completion_tokens"] == 0
    assert joined(streamed(server, "/v1/completions", body)) == {0: "The river"}
    assert texts_of(server.post("/v1/completions", completion([51, 71], echo=True, max_tokens=0)).json()) == {0: "Th"}


@both
def test_many_streams_all_end_with_done(server: LiveServer, path: str) -> None:
    for seed in range(30):
        streamed(server, path, PATHS[path](temperature=1, seed=seed, stop=["e", "q"], max_tokens=seed % 7 + 1))


def test_tokenize_counts_what_generation_reads_and_detokenize_inverts_it(server: LiveServer) -> None:
    conversation = {"messages": chat("What is <|im_end|> here?")["messages"]}
    counted = server.post("/tokenize", conversation).json()
    used = server.post("/v1/chat/completions", {**conversation, "max_tokens": 1}).json()["usage"]
    assert counted["count"] == len(counted["tokens"]) == used["prompt_tokens"]
    assert counted["max_model_len"] == 4096
    text = server.post("/detokenize", {"tokens": counted["tokens"]}).json()["prompt"]
    assert text.startswith("<|im_start|>user\nWhat is <|im_end|> here?<|im_end|>")
    plain = server.post("/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    assert "".join(plain["token_strs"]) == "hello"


def test_a_failed_step_is_an_error_event_in_a_stream_and_a_500_otherwise() -> None:
    class Failing(StubEngine):
        async def generate(self, prompt, sampling_params, request_id, *, priority=0, cache_salt=""):
            stream = super().generate(prompt, sampling_params, request_id)
            for count in range(3):
                output = await anext(stream)
                if count == 2:
                    object.__setattr__(output.outputs[0], "finish_reason", "error")
                yield output
            await stream.aclose()

    with live_server(Failing) as server:
        assert server.post("/v1/completions", completion()).status_code == 500
        text = server.post("/v1/completions", completion(stream=True)).text
        assert '"type":"server_error"' in text.strip().split("\n\n")[-1]
        assert "[DONE]" not in text
        assert server.metric("gdn_jax_completions_total") == 2
        server.idle()
