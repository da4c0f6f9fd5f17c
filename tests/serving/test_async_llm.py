"""AsyncLLM: many readers on one engine thread; leaving early, refusals and shutdown."""

import asyncio
from unittest.mock import patch

import pytest
from oracles.engine_rig import SETTINGS, TINY, greedy, make_llm, one_shape

from gdn_jax import AsyncLLM
from gdn_jax.serving import startup
from gdn_jax.serving.async_engine import EngineStoppedError
from gdn_jax.serving.core.errors import DuplicateRequestError, PromptTooLongError


def make() -> AsyncLLM:
    with patch.object(startup, "PoolSizes", one_shape):
        return AsyncLLM(str(TINY), **SETTINGS)


async def last(llm: AsyncLLM, prompt: str, **options) -> list[int]:
    async for output in llm.generate(prompt, greedy(8), **options):
        latest = output
    return latest.outputs[0].token_ids


async def drain(stream) -> None:
    async for _ in stream:
        pass


def test_concurrent_readers_get_what_each_would_get_alone():
    prompts = ["one", "two", "three", "four", "five", "six"]
    alone = [o.outputs[0].token_ids for o in make_llm().generate(prompts, greedy(8), use_tqdm=False)]

    async def run() -> list[list[int]]:
        async with make() as llm:
            return await asyncio.gather(*(last(llm, prompt) for prompt in prompts))

    assert asyncio.run(run()) == alone


def test_leaving_or_cancelling_frees_everything():
    async def run() -> None:
        async with make() as llm:
            stream = llm.generate("long", greedy(400))
            await anext(stream)
            await stream.aclose()
            task = asyncio.create_task(last(llm, "other"))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stats = await llm.stats()
            assert (stats.waiting, stats.running, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
            assert len(await last(llm, "still here")) == 8

    asyncio.run(run())


def test_a_refusal_reaches_its_own_reader_alone():
    async def run() -> None:
        async with make() as llm:
            other = asyncio.create_task(last(llm, "fine", request_id="taken"))
            with pytest.raises(PromptTooLongError):
                await anext(llm.generate("long", greedy(5000)))
            await asyncio.sleep(0)
            with pytest.raises(DuplicateRequestError):
                await asyncio.gather(*(last(llm, "twice", request_id="same") for _ in range(2)))
            assert len(await other) == 8

    asyncio.run(run())


def test_readers_learn_of_a_shutdown_and_later_calls_are_refused():
    async def run() -> None:
        llm = make()
        stream = llm.generate("long", greedy(400))
        await anext(stream)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineStoppedError):
            await drain(stream)
        with pytest.raises(EngineStoppedError):
            await llm.stats()
        assert not llm.is_running

    asyncio.run(run())
