"""Two hundred clients, half of whom leave at a random moment; then everything is as before."""

import asyncio
import random

import httpx
from http_rig import LiveServer, chat, completion, events, joined, live_server, texts_of

from benchmarks.stub_engine import StubEngine

CLIENTS = 200


async def crowd(server: LiveServer, draw: random.Random) -> list[bool]:
    """Ask from everywhere; returns for each client that stayed whether its answer was whole."""
    limits = httpx.Limits(max_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

        async def ask(index: int) -> bool | None:
            path, make = draw.choice([("/v1/completions", completion), ("/v1/chat/completions", chat)])
            body = make(f"client {index}", stream=draw.random() < 0.7, n=draw.choice([1, 1, 3]), seed=index,
                        temperature=1, max_tokens=draw.randrange(1, 60), ignore_eos=True)  # fmt: skip
            await asyncio.sleep(draw.random() / 5)
            asking = asyncio.create_task(client.post(path, json=body))
            if draw.random() < 0.5:
                await asyncio.wait([asking], timeout=draw.random() / 2)
                asking.cancel()
                return None
            answer = await asking
            assert answer.status_code == 200, answer.text
            if not body["stream"]:
                return answer.json()["usage"]["completion_tokens"] == body["n"] * body["max_tokens"]
            texts = joined(events(answer.text))
            return {len(text) for text in texts.values()} == {body["max_tokens"]} and len(texts) == body["n"]

        found = await asyncio.gather(*(ask(index) for index in range(CLIENTS)))
    return [one for one in found if one is not None]


def test_after_a_crowd_with_random_disconnects_nothing_is_held_and_answers_are_unchanged() -> None:
    with live_server(lambda: StubEngine(delay=0.002, max_num_seqs=32)) as server:
        probe = completion("a prompt to compare", max_tokens=64, ignore_eos=True)
        before = texts_of(server.post("/v1/completions", probe).json())
        assert all(asyncio.run(crowd(server, random.Random(7))))
        server.idle(10)
        assert texts_of(server.post("/v1/completions", probe).json()) == before
        text = server.get("/metrics").text
        assert 'finished_reason="error"} 0.0' in text
        assert 'status="5' not in text
