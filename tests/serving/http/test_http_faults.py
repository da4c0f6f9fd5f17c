"""What goes wrong inside: an engine that stops or fails under requests, a client that takes nothing, a slow engine."""

import asyncio
import json
import logging
import time

import pytest
from http_rig import completion, live_server

from benchmarks.stub_engine import StubEngine
from gdn_jax.serving.core.errors import DuplicateRequestError, EngineError, InvariantError
from gdn_jax.serving.http.bodies import decode
from gdn_jax.serving.http.chat import ChatForm
from gdn_jax.serving.http.completions import _decoder
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.errors import HTTPError, failed, refusal_of, timed_out
from gdn_jax.serving.http.logprobs import TokenNames
from gdn_jax.serving.http.metrics import Metrics
from gdn_jax.serving.http.middleware import Answering, Recording
from gdn_jax.serving.http.records import JsonFormatter, Record
from gdn_jax.serving.http.serve import serve
from gdn_jax.serving.http.state import ServerState
from gdn_jax.serving.http.streaming import EventSink


class Failing(StubEngine):
    """Raises after some tokens of every prompt that begins with "x"."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__()
        self._error, self._after = error, after

    async def generate(self, prompt, sampling_params, request_id, *, priority=0, cache_salt=""):
        stream = super().generate(prompt, sampling_params, request_id)
        count = 0
        async for output in stream:
            if prompt.text.startswith("x") and count == self._after:
                await stream.aclose()
                raise self._error
            count += 1
            yield output


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineError("stopped"), 503), (InvariantError("the books disagree"), 500), (DuplicateRequestError("twice"), 409)],
)
@pytest.mark.parametrize("prompt", ["x", ["a", "x", "b"]])
def test_an_engine_that_raises_is_answered_whatever_has_been_sent(
    prompt: object, error: Exception, status: int
) -> None:
    with live_server(lambda: Failing(error, 0)) as server:
        for stream in (False, True):
            answer = server.post("/v1/completions", completion(prompt, stream=stream, max_tokens=1))
            assert answer.status_code == status or (stream and isinstance(prompt, list))
            assert answer.text.count('"error":') == 1
        server.idle()
    with live_server(lambda: Failing(error, 3)) as server:
        answer = server.post("/v1/completions", completion(prompt, stream=True, max_tokens=9))
        last = answer.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"]
        assert "[DONE]" not in answer.text
        server.idle()


def test_metrics_answer_also_while_the_engine_does_not() -> None:
    class Busy(StubEngine):
        slow = False

        async def stats(self):
            await asyncio.sleep(30 * self.slow)
            return await super().stats()

    engine = Busy()
    with live_server(lambda: engine) as server:
        assert server.metric("gdn_jax_kv_blocks") == 100
        engine.slow = True
        began = time.monotonic()
        assert server.metric("gdn_jax_kv_blocks") == 100
        assert time.monotonic() - began < 10
        engine.slow = False


def test_an_interruption_by_others_is_passed_on() -> None:
    async def run() -> None:
        state = ServerState(ServerConfig(), "m")
        state.open(StubEngine())
        with state.admit(1) as live:
            live.end()
            live.stop(None)
            assert not live.stopped
        assert state.num_live == 0
        assert await state.drained(0.1)

    asyncio.run(run())


def test_last_words_to_a_client_that_reads_nothing_are_given_up() -> None:
    record = Record(request_id="1", method="POST", metrics=Metrics("m", with_vllm_names=False))
    scope: dict[str, object] = {}
    record.enter(scope)
    blocked = False

    async def send(message) -> None:
        if blocked:
            await asyncio.sleep(60)

    async def run() -> None:
        nonlocal blocked
        names = TokenNames(StubEngine().get_tokenizer(), as_ids=False)
        form = ChatForm(answer_id="1", model="m", num_top=None, num_choices=1, names=names)
        sink = EventSink(form, scope, send, with_usage=False, with_usage_always=False)
        await sink._write(b"first", more=True)
        blocked = True
        await asyncio.wait_for(sink.fail(failed()), 5)

    asyncio.run(run())


def test_a_fault_after_an_answer_has_begun_cuts_the_connection(caplog) -> None:
    async def broken(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("private")

    async def run() -> list[dict]:
        sent: list[dict] = []
        app = Recording(Answering(broken), Metrics("m", with_vllm_names=False))

        async def send(message) -> None:
            sent.append(message)

        async def receive() -> dict:
            return {"type": "http.disconnect"}

        with pytest.raises(KeyError):
            await app({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send)
        await app({"type": "lifespan"}, receive, send)
        return sent

    assert len(asyncio.run(run())) == 1
    assert "private" in caplog.text
    record = next(record for record in caplog.records if record.exc_info)
    line = json.loads(JsonFormatter().format(record))
    assert "KeyError" in line["exception"]
    assert line["level"] == "ERROR"


def test_every_error_has_a_status_and_only_ours_are_shown() -> None:
    assert refusal_of(KeyError("private")).status == 500
    assert "private" not in refusal_of(KeyError("private")).message
    assert refusal_of(timed_out("late")).status == 504
    assert json.loads(refusal_of(DuplicateRequestError("a \ud800")).body())["error"]["message"] == "a ?"


@pytest.mark.parametrize(
    ("body", "place"),
    [(rb'{"prompt": "a\u0000"}', "prompt"), (rb'{"prompt": ["a", "\u0000"]}', "prompt[1]"),
     (rb'{"prompt": "a", "metadata": {"b": ["\u0000"]}}', "metadata.b[0]"),
     (rb'{"prompt": "a", "metadata": {"\u0000": 1}}', "metadata")],
)  # fmt: skip
def test_a_nul_is_found_wherever_it_is(body: bytes, place: str) -> None:
    with pytest.raises(HTTPError) as refused:
        decode(body, _decoder)
    assert refused.value.refusal.parameter == place
    assert decode(rb'{"prompt": "\\u0000"}', _decoder).prompt == r"\u0000"


def test_nesting_beyond_the_decoders_reach_is_refused() -> None:
    with pytest.raises(HTTPError) as refused:
        decode(b'{"prompt": "a", "metadata": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", _decoder)
    assert "nested" in str(refused.value)


def test_what_loading_raises_is_raised_to_whoever_serves(caplog) -> None:
    def make() -> StubEngine:
        raise MemoryError("no room")

    with caplog.at_level(logging.INFO), pytest.raises(MemoryError, match="no room"):
        serve(make, ServerConfig(port=0), model="m")
    assert "listening" in caplog.text


def test_an_answer_that_the_end_of_the_server_cancels_leaves_no_trace() -> None:
    sent: list[dict] = []

    async def waits(scope, receive, send) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        async def send(message) -> None:
            sent.append(message)

        app = Recording(Answering(waits), Metrics("m", with_vllm_names=False))
        task = asyncio.create_task(app({"type": "http", "method": "GET", "path": "/", "headers": []}, None, send))
        await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(run())
    assert sent[0]["status"] == 503
    assert b"draining" in sent[1]["body"]
