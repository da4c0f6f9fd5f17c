"""One generation request from admission to its last byte: encode, run, write, and end, whichever way it ends.

It ends when the engine is done, when the client leaves, when its time is up, or when the server stops. Whichever it is,
closing the engine's streams aborts what is left within one step, streamed or not.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Send

from gdn_jax.serving.core.errors import RequestError
from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.bodies import ClientLeftError
from gdn_jax.serving.http.deltas import Delta, deltas_of, wanted
from gdn_jax.serving.http.errors import HTTPError, Refusal, failed, invalid, refusal_of, timed_out
from gdn_jax.serving.http.middleware import send_refusal
from gdn_jax.serving.http.records import Record, record_of
from gdn_jax.serving.http.schemas import SamplingFields
from gdn_jax.serving.http.state import Live, ServerState
from gdn_jax.serving.http.streaming import BodySink, EventSink, Form, Sink
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
INLINE_CHARACTERS = 4096  # a shorter text is encoded at once; a longer one on a thread, so that streams go on meanwhile


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a request asks for.

    Attributes:
        answer_id: `id` of the answer, and the engine's name for the request.
        num_prompts: how many prompts it has.
        encode: makes them ready to run; may be called on a thread.
        size: characters that `encode` has to read, about.
        params: how tokens are chosen.
        fields: the request itself.
        form: makes the writer of answers from the prompts.
        hides_tokens: leave out what is generated: the prompts alone are wanted.
    """

    answer_id: str
    num_prompts: int
    encode: Callable[[], list[EncodedPrompt]]
    size: int
    params: SamplingParams
    fields: SamplingFields
    form: Callable[[Sequence[EncodedPrompt]], Form]
    hides_tokens: bool = False


async def run(job: Job, state: ServerState, request: Request, send: Send) -> None:
    """Answer one request.

    Raises:
        HTTPError: it cannot be taken in now.
        ClientLeftError: nobody is left to answer.
    """
    loop, record = asyncio.get_running_loop(), record_of(request.scope)
    record.stream = bool(job.fields.stream)
    backend, seconds = state.serving(), state.config.request_timeout
    sink: Sink | None = None
    with state.admit(job.num_prompts * job.params.n) as live:
        watch = loop.create_task(_watch(request.receive, live))
        timer: asyncio.TimerHandle | None = None
        if seconds:
            timer = loop.call_later(seconds, live.stop, timed_out(f"a request may take {seconds:g} s; ask for less"))
        try:
            prompts = await asyncio.to_thread(job.encode) if job.size > INLINE_CHARACTERS else job.encode()
            record.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
            form = job.form(prompts)
            sink = _sink(job, form, request, send)
            await _generate(_deltas(job, form, backend, prompts, record), job.num_prompts * job.params.n, sink, record)
            return
        except asyncio.CancelledError:
            refusal = _why(live, record)
        except Exception as error:  # the top of a request: whatever it is ends this one, in the answer's own form
            refusal = _explain(error, record)
        finally:
            live.end()
            watch.cancel()
            if timer is not None:
                timer.cancel()
    await (send_refusal(refusal, request.scope, send) if sink is None else sink.fail(refusal))


async def _watch(receive: Receive, live: Live) -> None:
    """Stop a request when its client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    live.stop(None)


def _why(live: Live, record: Record) -> Refusal:
    """Return why a request was interrupted, which ends the interruption."""
    task = asyncio.current_task()
    if not live.stopped or task is None:
        raise asyncio.CancelledError  # not by us
    task.uncancel()
    if live.reason is None:
        raise ClientLeftError
    record.outcome = live.reason.refusal.code or "abort"
    return live.reason.refusal


def _explain(error: Exception, record: Record) -> Refusal:
    """Return how an error is answered; a bug of ours gets its trace into the log."""
    if isinstance(error, RecursionError):
        return invalid("the request must not be nested so deeply; flatten it").refusal
    refusal = refusal_of(error)
    if refusal.status == 500 and not isinstance(error, HTTPError):
        _LOG.error("request %s failed", record.request_id, exc_info=error)
    return refusal


def _sink(job: Job, form: Form, request: Request, send: Send) -> Sink:
    if not job.fields.stream:
        return BodySink(form, request.scope, send, job.num_prompts * job.params.n)
    options = job.fields.stream_options
    return EventSink(
        form,
        request.scope,
        send,
        with_usage=bool(options and options.include_usage),
        with_usage_always=bool(options and options.continuous_usage_stats),
    )


async def _generate(given: AsyncGenerator[list[Delta], None], num_choices: int, sink: Sink, record: Record) -> None:
    """Run the engine and write what it gives."""
    unfinished = set(range(num_choices))
    reasons: set[str] = set()
    left_as = "abort"
    try:
        async with aclosing(given) as steps:
            async for deltas in steps:
                for delta in deltas:
                    if delta.finish_reason is not None:
                        unfinished.discard(delta.choice)
                        reasons.add(delta.finish_reason)
                        record.metrics.count_completion(delta.finish_reason)
                if "error" in reasons:
                    raise HTTPError(failed())
                await sink.take(deltas)
        await sink.finish()
        record.outcome = ",".join(sorted(reasons))
    except RequestError:
        unfinished.clear()  # none of them ran
        raise
    except Exception:
        left_as = "error"
        raise
    finally:
        for _ in unfinished:
            record.metrics.count_completion(left_as)
        record.generated()


async def _deltas(
    job: Job, form: Form, backend: Backend, prompts: Sequence[EncodedPrompt], record: Record
) -> AsyncGenerator[list[Delta], None]:
    """Yield what each step gave, over all prompts: choice i of prompt p is choice p * n + i of the answer.

    Before the first of a prompt's choices comes what stands before all of them.
    """
    fields, num_choices = job.fields, job.params.n
    params = wanted(job.params)
    streams = [
        backend.generate(
            prompt,
            params,
            job.answer_id if index == 0 else f"{job.answer_id}.{index}",
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
        )
        for index, prompt in enumerate(prompts)
    ]
    cached: dict[int, int] = {}  # by prompt, of those whose answers have begun
    async with aclosing(_together(streams)) as outputs:
        async for batch in outputs:
            openings: list[Delta] = []
            deltas: list[Delta] = []
            for index, output in batch:
                if index not in cached:
                    openings += _openings(job, form, output, index * num_choices)
                deltas += deltas_of(output, index * num_choices)
                cached[index] = output.num_cached_tokens or 0
            record.cached_tokens = sum(cached.values())
            for delta in deltas:
                if job.hides_tokens:
                    _hide(delta)
                record.took(delta.choice, len(delta.token_ids))
                record.drafts[delta.choice] = delta.num_accepted, delta.num_rejected
            if deltas:
                yield [*openings, *deltas]


def _openings(job: Job, form: Form, output: RequestOutput, first_choice: int) -> list[Delta]:
    """Return what stands before a prompt's choices: its text where it is echoed, and its reports where it is scored.

    The engine gives the reports with the first token of any of the choices.
    """
    openings: list[Delta] = []
    for choice in range(first_choice, first_choice + job.params.n):
        text = form.echo(choice)
        opening = Delta(choice, text or "", [], None)
        if text is not None and job.params.logprobs is not None:
            opening.token_ids, opening.logprobs = output.prompt_token_ids, output.prompt_logprobs
        if job.fields.prompt_logprobs is not None:
            opening.prompt_logprobs = output.prompt_logprobs
        if text is not None or opening.prompt_logprobs is not None:
            openings.append(opening)
    return openings


def _hide(delta: Delta) -> None:
    """Take out of a delta the token that nobody asked for, and that it may have ended an answer."""
    delta.text, delta.token_ids, delta.stop_reason = "", [], None
    delta.logprobs = None if delta.logprobs is None else []
    if delta.finish_reason == "stop":
        delta.finish_reason = "length"


async def _together(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[list[tuple[int, RequestOutput]], None]:
    """Yield the outputs of all streams as they come, those at hand together; closing it closes all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield [(0, output)]
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def read(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        """Put one stream's outputs into the queue."""
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    arrived.put_nowait((index, output))
            arrived.put_nowait(None)
        except Exception as error:  # the reader of the queue raises it
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            items = [await arrived.get()]
            while not arrived.empty():
                items.append(arrived.get_nowait())
            for item in items:
                if isinstance(item, BaseException):
                    raise item
            num_open -= items.count(None)
            if batch := [item for item in items if isinstance(item, tuple)]:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
