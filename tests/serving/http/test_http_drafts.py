"""What clients and scrapers read of drafts: usage and metrics, over an engine that drafts."""

from collections.abc import Iterator

import pytest
from http_rig import LiveServer, chat, completion, live_server, streamed
from oracles.quick_engine import quick_async_llm

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server whose engine makes three drafts a step, a third of them wrong."""
    with live_server(lambda: quick_async_llm(num_drafts=3), metrics_compat="vllm") as found:
        yield found


def test_usage_says_how_many_drafts_were_accepted_and_rejected(server: LiveServer) -> None:
    fields = {"max_tokens": 40, "ignore_eos": True, "n": 2}
    used = server.post("/v1/completions", completion("The river", **fields)).json()["usage"]
    details = used["completion_tokens_details"]
    assert used["completion_tokens"] == 80
    assert 0 < details["accepted_prediction_tokens"] < 80
    assert details["rejected_prediction_tokens"] > 0
    asked = {**completion("The river", **fields), "stream_options": {"include_usage": True}}
    assert streamed(server, "/v1/completions", asked)[-1]["usage"]["completion_tokens_details"] == details
    talked = server.post(CHAT, chat(max_tokens=40, ignore_eos=True)).json()["usage"]
    assert talked["completion_tokens_details"]["accepted_prediction_tokens"] > 0


def test_metrics_count_drafts_in_all_and_by_their_place(server: LiveServer) -> None:
    names = [f"gdn_jax_{name}_total" for name in ("verified_rows", "drafted_tokens", "accepted_tokens")]
    before = [server.metric(name) for name in names]
    used = server.post("/v1/completions", completion("The mill", max_tokens=40, ignore_eos=True)).json()["usage"]
    rows, drafted, accepted = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    details = used["completion_tokens_details"]
    assert accepted == details["accepted_prediction_tokens"]
    assert drafted == accepted + details["rejected_prediction_tokens"]
    assert 39 - (rows + accepted) in (0, 1)  # the first token comes of the prompt, the last perhaps of a row without
    text = server.get("/metrics").text
    places = [f'gdn_jax_accepted_tokens_per_position_total{{position="{place}"}}' for place in range(3)]
    assert all(place in text for place in places)
    assert server.metric("gdn_jax_accepted_tokens_per_position_total") == server.metric(names[2])
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="stub",position="0"}' in text
    assert server.metric("vllm:spec_decode_num_drafts_total") == server.metric(names[0])


def test_without_detokenizing_tokens_are_counted_and_named_and_make_no_text(server: LiveServer) -> None:
    fields = {"max_tokens": 12, "ignore_eos": True, "detokenize": False, "return_tokens_as_token_ids": True}
    asked = completion("The river", logprobs=0, **fields)
    whole = server.post("/v1/completions", asked).json()
    tokens = whole["choices"][0]["logprobs"]["tokens"]
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"], len(tokens)) == ("", 12, 12)
    assert all(token.startswith("token_id:") for token in tokens)
    pieces = streamed(server, "/v1/completions", asked)
    assert [
        token for event in pieces for token in (event["choices"][0]["logprobs"] or {"tokens": []})["tokens"]
    ] == tokens
    refused = server.post(CHAT, chat(detokenize=False, stop="."))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stop")
