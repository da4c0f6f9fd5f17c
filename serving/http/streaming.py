"""Answers on the wire: server-sent events as they come, or one body at the end. Both are made from the same deltas.

An event's bytes are joined by hand around the few parts that change; encoding a whole object for every token would cost
more than everything else the server does for it.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import msgspec
from starlette.types import Scope, Send

from gdn_jax.serving.http.deltas import Delta
from gdn_jax.serving.http.errors import Refusal
from gdn_jax.serving.http.logprobs import prompt_entries
from gdn_jax.serving.http.middleware import send_json, send_refusal
from gdn_jax.serving.http.records import Record, fresh_hex, record_of
from gdn_jax.serving.outputs import PositionLogprobs

encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_INLINE_REPORTS = 256  # some 10 ms
_LAST_WORDS = 1.0  # seconds for an error event on a connection that may be stuck


@dataclass(kw_only=True, eq=False)
class Choice:
    """One choice as far as it has come."""

    text: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[PositionLogprobs | None] = field(default_factory=list[PositionLogprobs | None])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None


@dataclass(kw_only=True, eq=False)
class Form(ABC):
    """An endpoint's way to write answers: what both have in common, and what each fills in.

    Attributes:
        answer_id: `id` of the answer.
        model: its `model`.
        num_top: alternatives listed with log probabilities; None: none are given.
    """

    answer_id: str
    model: str
    num_top: int | None

    KIND: ClassVar[str]  # `object` of an answer
    EVENT_KIND: ClassVar[str]  # `object` of an event
    NO_TEXT: ClassVar[bytes]  # `piece` of an event that only ends a choice
    SCORES_IN_CHOICES: ClassVar[bool]  # `prompt_logprobs` stands in each choice, or once beside them

    def __post_init__(self) -> None:
        """Write what every event begins with."""
        self._created = int(time.time())
        head = {"id": self.answer_id, "object": self.EVENT_KIND, "created": self._created, "model": self.model}
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['

    @abstractmethod
    def opening(self, tail: bytes) -> bytes:
        """Return the events before the first token, each with `tail` as in `event`."""

    def echo(self, choice: int) -> str | None:
        """Return the text of its prompt that stands before a choice's own; None where none does."""
        return None

    @abstractmethod
    def piece(self, text: str) -> bytes:
        """Return what carries text within the choice of an event."""

    @abstractmethod
    def one_event(self, choice: int, piece: bytes, logprobs: bytes, finish: bytes, tail: bytes) -> bytes:
        """Return one event, of parts that are written already."""

    @abstractmethod
    def logprobs(
        self, choice: int, token_ids: Sequence[int], reports: Sequence[PositionLogprobs | None]
    ) -> dict[str, object]:
        """Return the log probabilities of a choice's next tokens, those of an echoed prompt first."""

    @abstractmethod
    def content(self, index: int, text: str) -> dict[str, object]:
        """Return the fields of a whole choice that hold its text."""

    def event(self, delta: Delta, tail: bytes) -> bytes:
        """Return the events for a delta, each with `tail` between its choices and its end.

        There is none for tokens that complete no character.
        """
        events = b""
        if delta.text or (delta.logprobs and delta.token_ids):
            logprobs = b"null"
            if delta.logprobs is not None:
                logprobs = encode(self.logprobs(delta.choice, delta.token_ids, delta.logprobs))
            events = self.one_event(delta.choice, self.piece(delta.text), logprobs, b"null", tail)
        if delta.finish_reason is not None:
            finish = b'"%s","stop_reason":%s' % (delta.finish_reason.encode(), encode(delta.stop_reason))
            events += self.one_event(delta.choice, self.NO_TEXT, b"null", finish, tail)
        return events

    def last(self, tail: bytes) -> bytes:
        """Return the event after the last token, without choices and with `tail`, which is the usage."""
        return self._head + b"]" + tail + b"}\n\n"

    def whole(self, choices: Sequence[Choice], usage: dict[str, object]) -> bytes:
        """Return the body of an answer that is not streamed."""
        return encode(
            {
                "id": self.answer_id,
                "object": self.KIND,
                "created": self._created,
                "model": self.model,
                "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
                "usage": usage,
                **({} if self.SCORES_IN_CHOICES else _scores(choices[0])),
            }
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        asked = self.num_top is not None
        return {
            "index": index,
            **self.content(index, "".join(choice.text)),
            "logprobs": self.logprobs(index, choice.token_ids, choice.logprobs) if asked else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **(_scores(choice) if self.SCORES_IN_CHOICES else {}),
        }


def _scores(choice: Choice) -> dict[str, object]:
    return {} if choice.prompt_logprobs is None else {"prompt_logprobs": prompt_entries(choice.prompt_logprobs)}


def new_id(kind: str) -> str:
    """Return a name for an answer that no other one has."""
    return f"{kind}-{fresh_hex()}"


@runtime_checkable
class Sink(Protocol):
    """Where a request's deltas go."""

    async def take(self, deltas: Sequence[Delta]) -> None:
        """Take what one step gave."""
        ...

    async def finish(self) -> None:
        """End the answer."""
        ...

    async def fail(self, refusal: Refusal) -> None:
        """End it with an error."""
        ...


def usage_of(record: Record) -> dict[str, object]:
    """Return how many tokens a request took."""
    accepted, rejected = map(sum, zip((0, 0), *record.drafts.values(), strict=True))
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


async def _written(write: Callable[[], bytes], num_reports: int) -> bytes:
    """Return what is written: many log probabilities by a thread, so that streams go on meanwhile."""
    return await asyncio.to_thread(write) if num_reports > _INLINE_REPORTS else write()


class EventSink:
    """Streams events. The answer begins with the first tokens, so that what is refused before them has its status."""

    def __init__(self, form: Form, scope: Scope, send: Send, *, with_usage: bool, with_usage_always: bool) -> None:
        """Stream to a client.

        Args:
            form: writes events.
            scope: the request's.
            send: takes messages.
            with_usage: one more event at the end says how many tokens it was.
            with_usage_always: every event does.
        """
        self._form, self._scope, self._send = form, scope, send
        self._with_usage, self._with_usage_always = with_usage, with_usage_always
        self._record = record_of(scope)
        self._begun = False

    def _tail(self) -> bytes:
        if self._with_usage_always:
            return b',"usage":' + encode(usage_of(self._record))
        return b',"usage":null' if self._with_usage else b""

    async def _write(self, body: bytes, *, more: bool) -> None:
        if not self._begun:
            self._begun = True
            body = self._form.opening(self._tail()) + body
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            # a proxy that gathers the body would take the stream apart again
            headers.append((b"x-accel-buffering", b"no"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def take(self, deltas: Sequence[Delta]) -> None:
        """Send what one step gave, in one piece."""
        tail = self._tail()
        num_reports = sum(len(delta.logprobs or ()) for delta in deltas)
        body = await _written(lambda: b"".join([self._form.event(delta, tail) for delta in deltas]), num_reports)
        if body:
            await self._write(body, more=True)

    async def finish(self) -> None:
        """Send the usage if asked for, and the end of the stream."""
        last = b""
        if self._with_usage:
            last = self._form.last(b',"usage":' + encode(usage_of(self._record)))
        await self._write(last + _DONE, more=False)

    async def fail(self, refusal: Refusal) -> None:
        """Send an error: with its status, or as the last event of a stream that has begun."""
        if not self._begun:
            await send_refusal(refusal, self._scope, self._send)
            return
        try:
            async with asyncio.timeout(_LAST_WORDS):
                await self._write(b"data: " + refusal.body() + b"\n\n", more=False)
        except TimeoutError:
            return  # the client does not read; the server cuts an answer without an end


class BodySink:
    """Gathers everything and sends one body."""

    def __init__(self, form: Form, scope: Scope, send: Send, num_choices: int) -> None:
        """Answer a client with `num_choices` choices."""
        self._form, self._scope, self._send = form, scope, send
        self._record = record_of(scope)
        self._choices = [Choice() for _ in range(num_choices)]

    async def take(self, deltas: Sequence[Delta]) -> None:
        """Gather what one step gave."""
        for delta in deltas:
            choice = self._choices[delta.choice]
            choice.text.append(delta.text)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or []
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.prompt_logprobs is not None:
                choice.prompt_logprobs = delta.prompt_logprobs

    async def finish(self) -> None:
        """Send the body."""
        num_reports = sum(len(choice.logprobs) + len(choice.prompt_logprobs or ()) for choice in self._choices)
        usage = usage_of(self._record)
        await send_json(await _written(lambda: self._form.whole(self._choices, usage), num_reports), self._send)

    async def fail(self, refusal: Refusal) -> None:
        """Send the error instead."""
        await send_refusal(refusal, self._scope, self._send)
