"""Running a server: it answers from the first moment, loads the model on a thread, and drains when told to stop."""

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from gdn_jax.serving.core.errors import EngineError, StartupError
from gdn_jax.serving.http.app import create_app
from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.state import ServerState

_LOG = logging.getLogger(__name__)
_BACKLOG = 2048  # connections that the system holds until the server takes them
_LAST_SECONDS = 5  # for requests that were interrupted to say so
_LAST_MOMENT = 1.0  # the same after a second signal
_LOOK_EVERY = 0.5  # seconds between two looks at whether the engine still runs


def serve(make_backend: Callable[[], Backend], config: ServerConfig, *, model: str) -> None:
    """Serve until SIGINT or SIGTERM, and return when every request that was taken in is answered.

    Args:
        make_backend: loads the model; called on a thread.
        config: the settings.
        model: the model's path.

    Raises:
        StartupError: it cannot listen on the host and port.
        EngineError: the engine stopped on its own.
        Exception: whatever `make_backend` raised.
    """
    server = Server(make_backend, ServerState(config, model))
    server.run()
    if server.problem is not None:
        raise server.problem


class Server(uvicorn.Server):
    """The framework's server with a model to load before requests are taken and requests to finish before it stops."""

    def __init__(self, make_backend: Callable[[], Backend], state: ServerState) -> None:
        """Get ready to run.

        Args:
            make_backend: loads the model; called on a thread.
            state: of the server.
        """
        super().__init__(_settings(state))
        self.problem: BaseException | None = None
        self._make_backend, self._state = make_backend, state
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._signalled = False

    @property
    def port(self) -> int:
        """The port it listens on, once it has started."""
        return self.servers[0].sockets[0].getsockname()[1]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then to load.

        Raises:
            StartupError: it cannot listen there.
        """
        self._loop = asyncio.get_running_loop()
        await super().startup(await _listening(self._state.config) if sockets is None else sockets)
        if self.started:
            config = self._state.config
            scheme = "https" if config.ssl_certfile else "http"
            _LOG.info("listening on %s://%s:%d; the model is loading", scheme, config.host, self.port)
            self._life = asyncio.create_task(self._live())

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end the process at the second."""
        name = signal.Signals(sig).name
        if self._loop is None:
            self.should_exit = self.force_exit = True
        elif self._signalled or self._stop.is_set():
            _LOG.info("%s again: %d requests are interrupted", name, self._state.num_live)
            self.should_exit = self.force_exit = True
            self.stop()
            # The engine's thread may be compiling, which takes minutes and cannot be interrupted, and a process waits
            # for its threads. What is interrupted gets a moment to be told so.
            last = threading.Timer(_LAST_MOMENT, lambda: os._exit(0 if self.problem is None else 1))
            last.daemon = True
            last.start()
        else:
            self._signalled = True
            _LOG.info("%s: no new requests; %d to finish", name, self._state.num_live)
            self.stop()

    def stop(self) -> None:
        """Drain, then end; may be called from any thread. A second call interrupts what is left."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_stop)

    def _begin_to_stop(self) -> None:
        if self._stop.is_set():
            self._state.stop_all()
        self._state.close()
        self._stop.set()

    async def _live(self) -> None:
        """Load, serve, drain; then tell the framework's server to end."""
        backend: Backend | None = None
        try:
            backend = await self._loaded()
            if backend is not None:
                await self._serve_until_stopped(backend)
            if not await self._state.drained(self._state.config.drain_timeout):
                _LOG.warning("%d requests did not finish in time and are interrupted", self._state.num_live)
                self._state.stop_all()
                await self._state.drained(_LAST_SECONDS)
        except Exception as error:  # the top of the server's own task: `serve` raises it
            self.problem = error
        finally:
            self._state.close()
            self._state.stop_reading()
            if backend is not None:
                await asyncio.to_thread(backend.shutdown)
            self.should_exit = True

    async def _loaded(self) -> Backend | None:
        """Return the engine; None if the server is told to stop before it is there."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Backend] = loop.create_future()

        def load() -> None:
            """Run on a thread of its own, which does not keep the process alive: loading cannot be interrupted."""
            try:
                result: Backend | BaseException = self._make_backend()
            except BaseException as error:  # the top of the thread
                result = error
            try:
                loop.call_soon_threadsafe(_settle, done, result)
            except RuntimeError:
                _LOG.debug("the model has loaded and the server is gone")

        threading.Thread(target=load, name="gdn-jax loading", daemon=True).start()
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait([done, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if done.done():
            return done.result()
        done.cancel()
        return None

    async def _serve_until_stopped(self, backend: Backend) -> None:
        self._state.open(backend)
        _LOG.info("ready after %.1f s", self._state.seconds)
        while not self._stop.is_set():
            if not backend.is_running:
                raise EngineError("the engine stopped on its own; the log above says why; start the server again")
            try:
                async with asyncio.timeout(_LOOK_EVERY):
                    await self._stop.wait()
            except TimeoutError:
                continue


async def _listening(config: ServerConfig) -> list[socket.socket]:
    """Return a socket for each address of the host; where one cannot be had, the framework would end the process."""
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(asyncio.Protocol, config.host, config.port, start_serving=False)
        sockets = [socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets]
        server.close()
        for each in sockets:
            each.listen(_BACKLOG)
    except OSError as error:
        raise StartupError(_why_not_listening(config, error)) from error
    return sockets


def _why_not_listening(config: ServerConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port must be free on {config.host}; {config.port} is in use; choose another, or 0 for any free one"
    if error.errno == errno.EACCES:
        return f"port must be one that this user may take; {config.port} is not; choose one above 1023, or 0 for any"
    return f"host must be an address of this machine; got {config.host!r}: {error}; 0.0.0.0 is all of its addresses"


def _settle(done: "asyncio.Future[Backend]", result: Backend | BaseException) -> None:
    """Set a future's outcome, unless nobody waits for it any more."""
    if done.done():
        return
    if isinstance(result, BaseException):
        done.set_exception(result)
    else:
        done.set_result(result)


def _settings(state: ServerState) -> uvicorn.Config:
    config = state.config
    return uvicorn.Config(
        create_app(state),
        host=config.host,
        port=config.port,
        backlog=_BACKLOG,
        timeout_keep_alive=config.keep_alive,
        timeout_graceful_shutdown=_LAST_SECONDS,
        ssl_certfile=config.ssl_certfile or None,
        ssl_keyfile=config.ssl_keyfile or None,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
    )
