"""AsyncEngine: the engine on a thread of its own, for asynchronous callers. Two queues, and one lock at the end.

Commands go down one queue and are carried out between steps; outputs come back to each request's own queue in its event
loop. The thread owns the engine: nobody else touches it after `start`. A request ends when its last output is taken,
when its reader leaves, or when the engine stops; whichever it is, nothing of it stays held. The lock decides whether a
command came before the stop, and is then carried out or refused, or after it, and is refused at once.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from gdn_jax.serving.collector import Collector
from gdn_jax.serving.core.errors import EngineError, InvariantError
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.engine_types import EngineOutput, EngineRequest
from gdn_jax.serving.outputs import RequestOutput

_LOG = logging.getLogger(__name__)
_Item = EngineOutput | BaseException


class EngineStoppedError(EngineError):
    """The engine is not running: it was shut down, or it stopped on a failure of its own, which is then the cause."""


@dataclass(eq=False)
class _Reader:
    """Where a request's outputs go."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue[_Item])


def _hand_over(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Reader, _Item]]) -> None:
    """Give items to their readers from the engine's thread, waking their loop once; one that is gone reads nothing."""

    def put() -> None:
        for reader, item in items:
            reader.items.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        _LOG.debug("the event loop of %d readers is closed", len(items))


@dataclass(frozen=True, eq=False)
class _Command:
    """What the thread does between two steps, and how whoever wants it learns that it never will."""

    run: Callable[[], None]
    refuse: Callable[[BaseException], None]


class AsyncEngine:
    """Runs an engine on one thread. Its methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        """Take an engine over; `start` begins.

        Args:
            engine: nobody else may use it from here on.
        """
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._readers: dict[str, _Reader] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, name="gdn-jax engine", daemon=True)
        self._lock = threading.Lock()  # of the two below: nothing enters the queue once it is drained for good
        self._takes_commands = False
        self._failure: BaseException | None = None

    def start(self) -> None:
        """Start the thread."""
        with self._lock:
            self._takes_commands = True
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in progress, and wait for the thread; every reader gets `EngineStoppedError`."""
        self._commands.put(None)
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the thread takes commands."""
        return self._takes_commands

    async def call[Result](self, function: Callable[[Engine], Result]) -> Result:
        """Run a function of the engine between two steps, on its thread, and return what it returns.

        Raises:
            EngineStoppedError: the engine stopped before it came to this.
            InvariantError: the engine found a bug of ours, and stops.
        """
        done: Future[Result] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(self._engine))
            except InvariantError as error:
                done.set_exception(error)
                raise
            except Exception as error:  # the caller's to see, not the thread's to die of
                done.set_exception(error)

        def refuse(error: BaseException) -> None:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)

        self._put(_Command(run, refuse))
        return await asyncio.wrap_future(done)

    def _put(self, command: _Command) -> None:
        with self._lock:
            if not self._takes_commands:
                raise self._stopped()
            self._commands.put(command)

    def _stopped(self) -> EngineStoppedError:
        """Return a new error for each who needs to know: a shared one would gather their tracebacks."""
        if self._failure is None:
            return EngineStoppedError("the engine is not running; start another one")
        error = EngineStoppedError(f"the engine stopped on a failure of its own ({self._failure}); start another one")
        error.__cause__ = self._failure
        return error

    async def stream(self, collector: Collector, requests: Sequence[EngineRequest]) -> AsyncGenerator[RequestOutput]:
        """Queue a prompt's completions and yield an item of the kind asked for after every step that brought something.

        Leaving the iteration, or cancelling the task that runs it, aborts what is unfinished. The engine waits for no
        reader: one that is slow finds all that came meanwhile in its next item.

        Raises:
            RequestError: the engine refuses a request; none of them runs then.
            EngineStoppedError: the engine stopped.
        """
        reader = _Reader(asyncio.get_running_loop())
        try:
            await self.call(partial(self._add, requests, reader))
            while not collector.finished:
                await self._take(collector, await reader.items.get())
                while not reader.items.empty():
                    await self._take(collector, reader.items.get_nowait())
                if (output := collector.news()) is not None:
                    yield output
        finally:
            if not collector.finished:
                leave = partial(self._abort, [request.request_id for request in requests])
                with suppress(EngineStoppedError):  # then nothing of it is left
                    self._put(_Command(leave, lambda error: None))

    @staticmethod
    async def _take(collector: Collector, item: _Item) -> None:
        if isinstance(item, BaseException):
            raise item
        if item.output.prompt_logprobs is None:
            collector.take(item)
        else:  # the reports of a long prompt take a second to make, in which other readers of the loop go on
            await asyncio.to_thread(collector.take, item)

    # From here on, everything runs on the engine's thread.

    def _add(self, requests: Sequence[EngineRequest], reader: _Reader, engine: Engine) -> None:
        try:
            for request in requests:
                engine.add(request)
                self._readers[request.request_id] = reader
        except BaseException:
            for request in requests:  # those before the refused one
                if self._readers.pop(request.request_id, None) is not None:
                    engine.withdraw(request.request_id)
            raise

    def _abort(self, request_ids: Sequence[str]) -> None:
        """Abort those that are this reader's and not finished; ids are never used twice, so others are not there."""
        for request_id in request_ids:
            if self._readers.pop(request_id, None) is not None:
                self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    self._deliver(self._engine.step())
        except BaseException as error:  # the thread's top: a bug, or a device that is lost
            _LOG.exception("the engine stops on a failure of its own")
            self._failure = error
        finally:
            with self._lock:
                self._takes_commands = False
            self._refuse_rest()

    def _obey(self) -> bool:
        """Carry out the commands at hand, waiting for one if there is no work; returns False when told to stop."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=block)
            except queue.Empty:
                return True
            if command is None:
                return False
            command.run()
            block = False

    def _deliver(self, outputs: Sequence[EngineOutput]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, _Item]]] = {}
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue
            if output.output.finish_reason is not None:
                del self._readers[output.request_id]
            by_loop.setdefault(reader.loop, []).append((reader, output))
        for loop, items in by_loop.items():
            _hand_over(loop, items)

    def _refuse_rest(self) -> None:
        """Tell all who wait, for outputs or for their turn, that nothing will come."""
        readers, self._readers = set(self._readers.values()), {}
        for reader in readers:
            _hand_over(reader.loop, [(reader, self._stopped())])
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command.refuse(self._stopped())
