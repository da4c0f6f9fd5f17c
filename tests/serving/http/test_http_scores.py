"""Log probabilities of prompts over HTTP: echoed with them, alone, streamed, as a field of their own."""

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from http_rig import LiveServer, chat, completion, joined, live_server, spelling, streamed, texts_of

from benchmarks.stub_engine import StubEngine
from gdn_jax.serving.http.logprobs import CompletionLogprobs, Echo, TokenNames, prompt_entries
from gdn_jax.serving.outputs import Logprob

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IM_END = 306
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def whole(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.post(COMPLETIONS, completion(**fields))
    assert answer.status_code == 200, answer.text
    return answer.json()


def lists(events: list[Any]) -> dict[int, dict[str, list[Any]]]:
    """The log probabilities of each choice of a streamed answer, joined."""
    found: dict[int, dict[str, list[Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["logprobs"] is not None:
                into = found.setdefault(choice["index"], {name: [] for name in LISTS})
                for name in LISTS:
                    into[name] += choice["logprobs"][name]
    return found


def pieces(choice: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each token beside the text at its offset, up to the next one's."""
    found, text = choice["logprobs"], choice["text"]
    ends = [*found["text_offset"], len(text)]
    assert ends == sorted(ends)
    for token, (start, end) in zip(found["tokens"], pairwise(ends), strict=True):
        yield token, text[start:end]


@pytest.mark.parametrize("num_top", [0, 2])
def test_an_echoed_prompt_has_its_entries_before_the_answers(server: LiveServer, num_top: int) -> None:
    (choice,) = whole(server, echo=True, logprobs=num_top, max_tokens=5, ignore_eos=True)["choices"]
    found = choice["logprobs"]
    assert choice["text"].startswith("The river")
    assert {len(found[name]) for name in LISTS} == {len(tokens_of(server, "The river", 0)) + 5}
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    assert set(found["token_logprobs"][1:]) == {-0.5}
    assert {len(listed) for listed in found["top_logprobs"][1:]} == {max(num_top, 1)}
    assert all(token == piece for token, piece in pieces(choice))


@pytest.mark.parametrize("prompt", ["The river", [84, 72], ["The", "river sees"], [[51, 71], [82]]])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_stream_brings_the_prompt_first_and_the_same_lists(
    server: LiveServer, prompt: object, max_tokens: int
) -> None:
    body = completion(prompt, echo=True, logprobs=1, max_tokens=max_tokens, n=2, temperature=1, seed=3, ignore_eos=True)
    answer = server.post(COMPLETIONS, body).json()
    events = streamed(server, COMPLETIONS, body)
    assert joined(events) == texts_of(answer)
    assert lists(events) == {choice["index"]: choice["logprobs"] for choice in answer["choices"]}
    for index in range(len(answer["choices"])):
        first = next(c for event in events for c in event["choices"] if c["index"] == index)
        assert first["logprobs"]["token_logprobs"][0] is None
        assert (
            first["text"]
            == server.post("/detokenize", {"tokens": tokens_of(server, prompt, index // 2)}).json()["prompt"]
        )


def tokens_of(server: LiveServer, prompt: Any, index: int) -> list[int]:
    """The ids of one of the prompts that a field holds."""
    if isinstance(prompt, str):
        prompt = [prompt]
    one = prompt if isinstance(prompt[0], int) else prompt[index]
    return server.post("/tokenize", {"prompt": one}).json()["tokens"] if isinstance(one, str) else one


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_generating_whatever_would_have_come(*, stream: bool) -> None:
    """The token that the engine made shows nowhere, nor that it would have ended the answer."""
    with live_server(lambda: StubEngine(script=spelling("", then=IM_END))) as server:
        body = completion(echo=True, logprobs=1, max_tokens=0)
        if stream:
            options = {"stream_options": {"include_usage": True}}
            *events, usage = streamed(server, COMPLETIONS, {**body, **options})
            assert usage["usage"]["completion_tokens"] == 0
            assert joined(events) == {0: "The river"}
            found, last = lists(events)[0], events[-1]["choices"][0]
        else:
            answer = server.post(COMPLETIONS, body).json()
            assert answer["usage"]["completion_tokens"] == 0
            (last,) = answer["choices"]
            assert last["text"] == "The river"
            found = last["logprobs"]
        assert (last["finish_reason"], last["stop_reason"]) == ("length", None)
        assert "".join(found["tokens"]) == "The river"
        server.idle()


def test_max_tokens_of_zero_without_echo_is_refused_and_the_server_lives(server: LiveServer) -> None:
    for path, body in ((COMPLETIONS, completion()), (CHAT, chat())):
        for value in (0, -1):
            answer = server.post(path, body | {"max_tokens": value, "logprobs": None})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens")
    assert server.post(COMPLETIONS, completion(echo=True, max_tokens=-1)).status_code == 400
    assert whole(server)["choices"]


def test_offsets_count_characters_also_where_tokens_are_bytes_or_special(server: LiveServer) -> None:
    prompt = "<|im_start|>né 한<|im_end|>"
    with live_server(lambda: StubEngine(script=spelling("é.", then=IM_END))) as other:
        (choice,) = whole(other, prompt=prompt, echo=True, logprobs=0)["choices"]
    assert choice["text"] == prompt + "é."
    shown = list(pieces(choice))
    assert shown[0] == ("<|im_start|>", "<|im_start|>")
    assert shown[1] == ("n", "n")
    assert [piece for _, piece in shown[2:4]] == ["", "é"]  # the offset of a part is where its character begins
    assert shown[-5] == ("<|im_end|>", "<|im_end|>")
    assert [piece for _, piece in shown[-4:]] == ["", "é", ".", ""]


def test_a_prompt_that_ends_inside_a_character_does_not_shift_the_answers_offsets() -> None:
    tokens = StubEngine().get_tokenizer()
    first, second = tokens.encode("é")
    writer = CompletionLogprobs(TokenNames(tokens, as_ids=True), tokens, 0, Echo("\ufffd", 1))
    report = {second: Logprob(logprob=-1.0, rank=1)}
    assert writer.write([first], [None])["text_offset"] == [0]
    (after,) = tokens.encode("a")
    found = writer.write([after, after], [{after: report[second]}] * 2)
    assert found["text_offset"] == [1, 2]
    assert found["tokens"] == [f"token_id:{after}"] * 2


@pytest.mark.parametrize("asked", [0, 3])
def test_the_field_of_its_own_stands_in_every_choice_of_completions_and_once_in_chat(
    server: LiveServer, asked: int
) -> None:
    answer = whole(server, n=2, prompt_logprobs=asked)
    chatted = server.post(CHAT, chat(n=2, prompt_logprobs=asked)).json()
    assert "prompt_logprobs" not in answer
    assert all("prompt_logprobs" not in choice for choice in chatted["choices"])
    for reports in (chatted["prompt_logprobs"], *(choice["prompt_logprobs"] for choice in answer["choices"])):
        assert reports[0] is None
        assert {len(report) for report in reports[1:]} == {max(asked, 1)}
        assert all(set(entry) == {"logprob", "rank", "decoded_token"} for r in reports[1:] for entry in r.values())
    tokens = tokens_of(server, "The river", 0)
    assert [next(iter(report)) for report in answer["choices"][0]["prompt_logprobs"][1:]] == list(map(str, tokens[1:]))
    assert len(chatted["prompt_logprobs"]) == chatted["usage"]["prompt_tokens"]
    assert answer["choices"][0]["logprobs"] is None


def test_nothing_of_it_stands_where_it_is_not_asked_for(server: LiveServer) -> None:
    for path, body in ((COMPLETIONS, completion(logprobs=1)), (CHAT, chat()), (COMPLETIONS, completion(echo=True))):
        assert "prompt_logprobs" not in server.post(path, body).text
    assert "prompt_logprobs" not in server.post(COMPLETIONS, completion(echo=True, logprobs=1)).text


def test_echo_and_the_field_may_ask_for_different_numbers_of_alternatives(server: LiveServer) -> None:
    (choice,) = whole(server, echo=True, logprobs=1, prompt_logprobs=4, max_tokens=1)["choices"]
    assert {len(report) for report in choice["prompt_logprobs"][1:]} == {4}
    assert {len(listed) for listed in choice["logprobs"]["top_logprobs"][1:]} == {1}
    (choice,) = whole(server, echo=True, prompt_logprobs=4, max_tokens=1)["choices"]
    assert choice["logprobs"] is None
    assert choice["text"].startswith("The river")


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, completion()), (CHAT, chat())])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_logprobs": -1}, "from 0 to 20"),
        ({"prompt_logprobs": 21}, "from 0 to 20"),
        ({"prompt_logprobs": True}, "int"),
        ({"prompt_logprobs": 1, "stream": True}, "without stream"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    server: LiveServer, path: str, body: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    answer = server.post(path, body | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt_logprobs")
    assert words in error["message"]


@pytest.mark.parametrize(("length", "elsewhere"), [(100, False), (1000, True)])
def test_many_scores_are_written_off_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, length: int, *, elsewhere: bool
) -> None:
    writers: set[object] = set()
    real = TokenNames.name
    monkeypatch.setattr(TokenNames, "name", lambda *given: writers.add(threading.current_thread()) or real(*given))
    body = completion([51] * length, echo=True, logprobs=0, max_tokens=0)
    answer = server.post(COMPLETIONS, body).json()
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == length
    assert (server._thread in writers) != elsewhere
    writers.clear()
    assert lists(streamed(server, COMPLETIONS, body))[0] == answer["choices"][0]["logprobs"]
    assert (server._thread in writers) != elsewhere


def test_numbers_that_json_lacks_are_the_least(server: LiveServer) -> None:
    odd = {1: Logprob(logprob=float("-inf"), rank=7), 2: Logprob(logprob=float("nan"), rank=1, decoded_token="é")}
    assert json.loads(json.dumps(prompt_entries([None, odd]))) == [
        None,
        {
            "1": {"logprob": -9999.0, "rank": 7, "decoded_token": None},
            "2": {"logprob": -9999.0, "rank": 1, "decoded_token": "é"},
        },
    ]


def test_a_prompt_of_one_token_has_one_entry_and_nothing_in_it(server: LiveServer) -> None:
    (choice,) = whole(server, prompt="T", echo=True, logprobs=2, max_tokens=0, prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [None]
    assert choice["logprobs"] == {
        "tokens": ["T"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]
    }  # fmt: skip
