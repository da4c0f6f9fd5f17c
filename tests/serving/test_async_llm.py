"""AsyncLLM: many readers on one engine thread; leaving early, refusals and shutdown."""

import asyncio
import threading
from unittest.mock import patch

import jaxtyping
import pytest
from oracles.engine_rig import SETTINGS, TINY, greedy, make_llm, one_shape
from oracles.quick_engine import answer, lasting, parts_of, quick_async_llm

from gdn_jax import AsyncLLM, RequestOutputKind
from gdn_jax.serving import startup
from gdn_jax.serving.async_engine import EngineStoppedError
from gdn_jax.serving.collector import Collector
from gdn_jax.serving.core.errors import DuplicateRequestError, InvalidParameterError, PromptTooLongError


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


def test_a_scored_prompt_is_reported_from_another_thread_with_the_first_item(monkeypatch):
    threads = []
    take = Collector.take

    def watched(collector, output):
        threads.append(
            (output.output.prompt_logprobs is not None, threading.current_thread() is threading.main_thread())
        )
        take(collector, output)

    monkeypatch.setattr(Collector, "take", watched)
    params = lasting(3, n=2, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)

    async def run():
        async with quick_async_llm() as llm:
            return [output async for output in llm.generate(list(range(40, 60)), params)]

    items = asyncio.run(run())
    assert [list(report or ()) for report in items[0].prompt_logprobs] == [[], *([token] for token in range(41, 60))]
    assert all(item.prompt_logprobs is None for item in items[1:])
    assert sorted(threads) == [(False, True)] * 5 + [(True, False)]


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [greedy(3)], "greedy"])
def test_sampling_parameters_that_are_none_are_refused_by_name_before_anything_runs(params, monkeypatch):
    async def run() -> None:
        async with quick_async_llm() as llm:
            with pytest.raises(InvalidParameterError, match="sampling_params must be SamplingParams") as caught:
                llm.generate("x", params)
            assert caught.value.parameter == "sampling_params"
            assert (await llm.stats()).waiting == 0

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for a user: the code itself answers
    asyncio.run(run())


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
            while await llm._engine.call(lambda engine: engine.has_work):  # the step in flight
                pass
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


# What needs no model runs on one that answers at once.


def test_a_name_in_flight_is_refused_and_its_first_bearer_reads_on():
    async def run() -> None:
        async with quick_async_llm() as llm:
            _, runner = parts_of(llm._engine._engine)
            go_on, first = runner.hold(2), llm.generate([1, 2, 3], lasting(40), "mine")
            await anext(first)
            for _ in range(2):
                with pytest.raises(DuplicateRequestError, match="'mine'") as caught:
                    await anext(llm.generate([4], lasting(2), "mine"))
                assert caught.value.parameter == "request_id"
            go_on.set()
            rest = [item async for item in first]
            assert rest[-1].outputs[0].token_ids == answer([1, 2, 3], 40)
            again = [item async for item in llm.generate([4], lasting(2), "mine")]  # the name is free once more
            assert again[-1].request_id == "mine"

    asyncio.run(run())


def test_a_name_is_free_again_after_its_stream_was_left_or_refused():
    async def run() -> None:
        async with quick_async_llm() as llm:
            with pytest.raises(PromptTooLongError):
                await anext(llm.generate([1], lasting(5000), "a"))
            stream = llm.generate([1], lasting(100), "a")
            await anext(stream)
            await stream.aclose()
            assert [item async for item in llm.generate([1], lasting(2), "a")][-1].finished

    asyncio.run(run())


def test_names_that_look_like_numbers_or_siblings_take_nobodys_place():
    async def run() -> None:
        async with quick_async_llm() as llm:
            names = ["0", "1", "2", "0-1", "1-1", "1.1", None, None]
            streams = [llm.generate([index], lasting(10, n=2, seed=1), name) for index, name in enumerate(names)]
            ends = await asyncio.gather(*(drain_to_end(stream) for stream in streams))
            for index, end in enumerate(ends):
                assert [done.token_ids for done in end.outputs] == [answer([index], 10)] * 2
            assert [end.request_id for end in ends][:6] == names[:6]

    asyncio.run(run())


async def drain_to_end(stream):
    return [item async for item in stream][-1]


def test_deltas_join_to_what_a_cumulative_stream_ends_with():
    async def run() -> None:
        async with quick_async_llm() as llm:
            whole = await drain_to_end(llm.generate([9, 8], lasting(30, n=2, logprobs=1)))
            params = lasting(30, n=2, logprobs=1, output_kind=RequestOutputKind.DELTA)
            parts = [item async for item in llm.generate([9, 8], params)]
            for index, done in enumerate(whole.outputs):
                mine = [one for item in parts for one in item.outputs if one.index == index]
                assert "".join(one.text for one in mine) == done.text
                assert [token for one in mine for token in one.token_ids] == done.token_ids
                assert [report for one in mine for report in one.logprobs] == done.logprobs
                assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
            assert [item.finished for item in parts] == [False] * (len(parts) - 1) + [True]
            final = lasting(30, n=2, logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY)
            (only,) = [item async for item in llm.generate([9, 8], final)]
            assert only.outputs == whole.outputs

    asyncio.run(run())
