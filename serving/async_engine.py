"""AsyncEngine: the engine on a thread of its own, for asynchronous callers. Two queues, no locks.

Commands go down one queue and are carried out between steps; outputs come back to each request's own queue in its event
loop. The thread owns the engine: nobody else touches it after `start`. A request ends when its last output is taken,
when its reader leaves, or when the engine stops; whichever it is, nothing of it stays held.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from gdn_jax.serving.collector import Collector
from gdn_jax.serving.core.errors import EngineError
from gdn_jax.serving.engine import Engine, EngineOutput, EngineRequest
from gdn_jax.serving.outputs import RequestOutput

_LOG = logging.getLogger(__name__)
_Item = EngineOutput | BaseException


class EngineStoppedError(EngineError):
    """The engine is not running: it was shut down, or stopped on a bug of its own."""


@dataclass(eq=False)
class _Reader:
    """Where a request's outputs go."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[_Item] = field(default_factory=asyncio.Queue[_Item])

    def put(self, item: _Item) -> None:
        """Hand over from the engine's thread; a loop that is gone has nobody left to read."""
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            _LOG.debug("a reader's event loop is closed")


class AsyncEngine:
    """Runs an engine on one thread. Its methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        """Take an engine over; `start` begins.

        Args:
            engine: nobody else may use it from here on.
        """
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[str, _Reader] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, name="gdn-jax engine", daemon=True)
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the step in progress, and wait for the thread; every reader gets `EngineStoppedError`."""
        self._commands.put(None)
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Whether the thread takes commands."""
        return self._thread.is_alive() and not self._stopped.is_set()

    async def call[Result](self, function: Callable[[Engine], Result]) -> Result:
        """Run a function of the engine between two steps, on its thread, and return what it returns."""
        done: Future[Result] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(self._engine))
            except Exception as error:  # the caller's to see, not the thread's to die of
                done.set_exception(error)

        self._put(run)
        return await asyncio.wrap_future(done)

    def _put(self, command: Callable[[], None]) -> None:
        if not self.is_running:
            raise EngineStoppedError("the engine is not running; start another one")
        self._commands.put(command)

    async def stream(
        self, collector: Collector, requests: Sequence[EngineRequest]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a prompt's completions and yield what there is so far, after every step that brought something.

        Leaving the iteration, or cancelling the task that runs it, aborts what is unfinished.

        Raises:
            RequestError: the engine refuses a request; none of them runs then.
            EngineStoppedError: the engine stopped.
        """
        reader = _Reader(asyncio.get_running_loop())
        try:
            await self.call(partial(self._add, requests, reader))
            while not collector.finished:
                self._take(collector, await reader.items.get())
                while not reader.items.empty():
                    self._take(collector, reader.items.get_nowait())
                yield collector.output()
        finally:
            if self.is_running:
                self._put(partial(self._leave, [request.request_id for request in requests], reader))

    @staticmethod
    def _take(collector: Collector, item: _Item) -> None:
        if isinstance(item, BaseException):
            raise item
        collector.take(item)

    # From here on, everything runs on the engine's thread.

    def _add(self, requests: Sequence[EngineRequest], reader: _Reader, engine: Engine) -> None:
        added: list[str] = []
        try:
            for request in requests:
                engine.add(request)
                added.append(request.request_id)
        except BaseException:
            self._abort(added)
            raise
        for name in added:
            self._readers[name] = reader

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._readers.pop(name, None)
            self._engine.abort(name)

    def _leave(self, names: Sequence[str], reader: _Reader) -> None:
        """Abort what a reader left behind; a name may be another's, where the engine refused this reader's request."""
        self._abort([name for name in names if self._readers.get(name) is reader])

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_work:
                    for output in self._engine.step():
                        self._deliver(output)
        except BaseException as error:
            _LOG.exception("the engine stops on a bug of its own")
            self._tell_all(error)
            raise
        finally:
            self._stopped.set()
            self._tell_all(EngineStoppedError("the engine was shut down; start another one"))
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
            command()
            block = False

    def _deliver(self, output: EngineOutput) -> None:
        reader = self._readers.get(output.request_id)
        if reader is None:
            return
        if output.output.finish_reason is not None:
            del self._readers[output.request_id]
        reader.put(output)

    def _tell_all(self, error: BaseException) -> None:
        readers, self._readers = set(self._readers.values()), {}
        for reader in readers:
            reader.put(error)

    def _refuse_rest(self) -> None:
        """Carry out what was queued meanwhile, so that nobody waits for an answer for ever."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command()
        self._tell_all(EngineStoppedError("the engine was shut down; start another one"))
