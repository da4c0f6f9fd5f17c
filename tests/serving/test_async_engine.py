"""AsyncEngine: nobody waits for ever, whoever stops it and however; a bug stops it and is told."""

import asyncio
import threading
from collections.abc import Callable

import pytest
from oracles.quick_engine import answer, audit, lasting, make_parts, parts_of

from gdn_jax.serving.async_engine import AsyncEngine, EngineStoppedError
from gdn_jax.serving.core.errors import InvariantError, PromptTooLongError, RequestError
from gdn_jax.serving.core.plan import StepPlan
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.intake import Intake, Options
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.sampling_params import RequestOutputKind

PROMPT = [1, 2, 3, 4, 5]


class Rig:
    """An engine on its thread, and requests for it."""

    def __init__(self) -> None:
        parts = make_parts()
        self.inner = parts.engine
        self.scheduler, self.runner = parts_of(self.inner)
        self.intake = Intake(parts, seed=0)
        self.engine = AsyncEngine(self.inner)
        self.engine.start()

    def stream(self, max_tokens: int = 8, prompt: list[int] = PROMPT, **params: object):
        asked = EncodedPrompt(text=None, token_ids=prompt)
        return self.engine.stream(*self.intake.take(asked, lasting(max_tokens, **params), Options()))

    async def settle(self) -> None:
        """Wait until the thread, which goes on by itself, has nothing left to do."""
        while await self.engine.call(lambda engine: engine.has_work):
            pass

    async def last(self, *args: object, **params: object) -> RequestOutput:
        return [item async for item in self.stream(*args, **params)][-1]  # pyright: ignore[reportArgumentType]


def run(scenario: Callable[[Rig], object]) -> None:
    """Run a scenario; whatever hangs fails within seconds."""

    async def limited() -> None:
        rig = Rig()
        try:
            await asyncio.wait_for(scenario(rig), 20)  # pyright: ignore[reportArgumentType]
        finally:
            rig.engine.stop()

    asyncio.run(limited())


def raise_bug(*anything: object) -> None:
    raise InvariantError("the books contradict themselves")


def test_a_step_wakes_its_readers_event_loop_once_however_many_rows_it_had() -> None:
    async def scenario(rig: Rig) -> None:
        loop, wakes = asyncio.get_running_loop(), list[object]()
        wake = loop.call_soon_threadsafe

        def count(function: Callable[..., object], *args: object, **options: object) -> object:
            wakes.append(function)
            return wake(function, *args, **options)  # pyright: ignore[reportArgumentType]

        steps = rig.inner.stats().steps
        loop.call_soon_threadsafe = count  # pyright: ignore[reportAttributeAccessIssue]
        await asyncio.gather(*(rig.last(40, [index, 2, 3]) for index in range(4)))
        handed_over = [function for function in wakes if getattr(function, "__name__", "") == "put"]
        assert 40 <= len(handed_over) <= rig.inner.stats().steps - steps

    run(scenario)


def test_readers_get_their_own_answers() -> None:
    async def scenario(rig: Rig) -> None:
        prompts = [[index, 2, 3] for index in range(20)]
        outputs = await asyncio.gather(*(rig.last(6, prompt) for prompt in prompts))
        assert [output.outputs[0].token_ids for output in outputs] == [answer(prompt, 6) for prompt in prompts]

    run(scenario)


def test_every_completion_streams_to_its_end() -> None:
    async def scenario(rig: Rig) -> None:
        output = await rig.last(8, n=3, seed=1)
        assert [done.finish_reason for done in output.outputs] == ["length"] * 3
        assert [len(done.token_ids) for done in output.outputs] == [8] * 3

    run(scenario)


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_slow_reader_holds_nobody_up_and_finds_the_rest_in_one_item(kind: RequestOutputKind) -> None:
    """The engine does not wait for readers: what one has not taken yet is no more than its own tokens."""

    async def scenario(rig: Rig) -> None:
        go_on, slow = rig.runner.hold(2), rig.stream(60, output_kind=kind)
        first = await anext(slow) if kind is not RequestOutputKind.FINAL_ONLY else None
        pending = asyncio.ensure_future(anext(slow)) if first is None else None
        go_on.set()
        await rig.last(100, [7, 8, 9])
        await rig.settle()
        items = [await pending] if pending is not None else [item async for item in slow]
        assert len(items) == 1
        assert items[0].finished
        tokens = items[0].outputs[0].token_ids
        if kind is RequestOutputKind.DELTA and first is not None:
            tokens = first.outputs[0].token_ids + tokens
        assert tokens == answer(PROMPT, 60)

    run(scenario)


def test_leaving_frees_everything() -> None:
    async def scenario(rig: Rig) -> None:
        go_on, stream = rig.runner.hold(2), rig.stream(200, n=2)
        await anext(stream)
        await stream.aclose()
        go_on.set()
        await rig.settle()
        stats = await rig.engine.call(lambda engine: engine.stats())
        assert (stats.running, stats.waiting, stats.blocks_used, stats.aborted_requests) == (0, 0, 0, 2)
        await rig.engine.call(audit)

    run(scenario)


def test_a_reader_who_stops_at_the_last_item_leaves_nothing_held_and_the_next_turn_a_checkpoint() -> None:
    async def scenario(rig: Rig) -> None:
        prompt = list(range(1, 23))
        async for item in rig.stream(3, prompt):  # 24 tokens have run when it ends: a closing row folds the last
            if item.finished:
                break
        await rig.settle()
        stats = await rig.engine.call(lambda engine: engine.stats())
        assert (stats.running, stats.waiting, stats.blocks_used, stats.slots_used) == (0, 0, 0, 0)
        assert (await rig.last(2, [*prompt, *answer(prompt, 3), 5])).num_cached_tokens == 24

    run(scenario)


def test_what_was_commanded_before_a_stop_is_answered_and_what_comes_later_is_refused() -> None:
    """Callers on other threads hammer the engine while it stops: each of them gets an answer or a refusal."""

    async def scenario(rig: Rig) -> None:
        started, answers = threading.Barrier(9), []

        def hammer() -> None:
            async def calls() -> None:
                while True:
                    await rig.engine.call(lambda engine: engine.has_work)

            started.wait()
            try:
                asyncio.run(asyncio.wait_for(calls(), 15))
            except EngineStoppedError:
                answers.append("refused")
            except TimeoutError:
                answers.append("waited for ever")

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(started.wait)
        await asyncio.to_thread(rig.engine.stop)
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert answers == ["refused"] * 8

    run(scenario)


def test_a_command_that_slips_in_while_the_engine_drains_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap, held open: the engine drains its queue between a caller's check and its put."""

    async def scenario(rig: Rig) -> None:
        commands = rig.engine._commands
        gate, entered = threading.Event(), threading.Event()

        class Slow:
            """The same queue, whose put waits at the gate."""

            def put(self, item: object) -> None:
                if item is not None:
                    entered.set()
                    gate.wait(0.5)
                commands.put(item)  # pyright: ignore[reportArgumentType]

            def __getattr__(self, name: str) -> object:
                return getattr(commands, name)

        monkeypatch.setattr(rig.engine, "_commands", Slow())
        outcomes: list[object] = []

        def call() -> None:
            try:
                outcomes.append(asyncio.run(asyncio.wait_for(rig.engine.call(lambda engine: 5), 3)))
            except (EngineStoppedError, TimeoutError) as error:
                outcomes.append(type(error))

        caller = threading.Thread(target=call)
        caller.start()
        await asyncio.to_thread(entered.wait)
        await asyncio.to_thread(rig.engine.stop)
        gate.set()
        await asyncio.to_thread(caller.join)
        assert outcomes in ([5], [EngineStoppedError])  # either is an answer

    run(scenario)


def test_a_bug_found_in_a_call_reaches_its_caller_and_stops_the_engine() -> None:
    async def scenario(rig: Rig) -> None:
        go_on, stream = rig.runner.hold(2), rig.stream(200)
        await anext(stream)
        call = asyncio.create_task(rig.engine.call(raise_bug))
        await asyncio.sleep(0)  # it is queued
        go_on.set()
        with pytest.raises(InvariantError, match="contradict"):
            await call
        with pytest.raises(EngineStoppedError, match="contradict"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStoppedError, match="contradict") as caught:
            await rig.engine.call(lambda engine: engine.stats())
        assert isinstance(caught.value.__cause__, InvariantError)
        assert not rig.engine.is_running

    run(scenario)


def test_a_bug_found_in_a_step_reaches_every_reader() -> None:
    async def scenario(rig: Rig) -> None:
        go_on = rig.runner.hold(0)
        readers = [asyncio.create_task(rig.last(200)) for _ in range(3)]
        while not rig.inner.has_work:
            await asyncio.sleep(0)  # all are queued, and one of them runs
        rig.runner.before_step = raise_bug
        go_on.set()
        outcomes = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineStoppedError] * 3
        assert len({id(outcome) for outcome in outcomes}) == 3

    run(scenario)


@pytest.mark.parametrize("error", [RequestError("refused"), KeyError("no bug of the engine's")])
def test_what_a_call_raises_otherwise_is_its_callers_alone(error: Exception) -> None:
    def refuse(engine: Engine) -> None:
        raise error

    async def scenario(rig: Rig) -> None:
        other = asyncio.create_task(rig.last(20))
        with pytest.raises(type(error)):
            await rig.engine.call(refuse)
        assert (await other).outputs[0].token_ids == answer(PROMPT, 20)

    run(scenario)


def test_a_refused_completion_takes_its_siblings_with_it() -> None:
    async def scenario(rig: Rig) -> None:
        taken: list[str] = []
        add = rig.inner.add

        def add_two(request) -> None:
            if len(taken) == 2:
                raise PromptTooLongError("no more")
            taken.append(request.request_id)
            add(request)

        rig.inner.add = add_two  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(PromptTooLongError):
            await rig.last(8, n=3)
        stats = await rig.engine.call(lambda engine: engine.stats())
        assert len(taken) == 2
        assert (stats.waiting, stats.running, stats.aborted_requests) == (0, 0, 0)
        assert not rig.runner.known

    run(scenario)


def test_a_device_that_cannot_start_afresh_stops_the_engine_and_tells_its_readers() -> None:
    async def scenario(rig: Rig) -> None:
        def break_down(plan: StepPlan) -> None:
            rig.runner.reset_error = MemoryError("no room")
            raise RuntimeError("the step failed")

        rig.runner.before_step = break_down
        with pytest.raises(EngineStoppedError, match="no room"):
            await rig.last(20)

    run(scenario)


def test_an_engine_that_never_started_refuses_and_stops_at_once() -> None:
    engine = AsyncEngine(make_parts().engine)
    with pytest.raises(EngineStoppedError):
        asyncio.run(engine.call(lambda inner: inner.stats()))
    engine.stop()
