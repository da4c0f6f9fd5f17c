"""What the server as a whole is doing: starting, serving, draining; which requests are live; who may come in."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from gdn_jax.serving.http.backend import Backend
from gdn_jax.serving.http.config import ServerConfig
from gdn_jax.serving.http.errors import HTTPError, invalid, too_many, unavailable
from gdn_jax.serving.http.metrics import Metrics
from gdn_jax.serving.sampling_params import SamplingParams

Phase = Literal["starting", "ready", "draining", "stopped"]


class Live:
    """One generation request at work: the task that answers it, and why it was told to stop, if it was."""

    def __init__(self, task: asyncio.Task[object]) -> None:
        self._task = task
        self._done = False
        self.stopped = False
        self.reason: HTTPError | None = None

    def stop(self, reason: HTTPError | None) -> None:
        """Interrupt it; `reason` is what its client is told, None if the client is gone. The first call counts."""
        if not self._done and not self.stopped:
            self.stopped, self.reason = True, reason
            self._task.cancel()

    def end(self) -> None:
        """Note that it is over, so that nothing interrupts what its task does next."""
        self._done = True


class ServerState:
    """The state of one server. Belongs to its event loop.

    Attributes:
        config: its settings.
        names: what requests may call the model, the first for answers.
        metrics: its counters.
        created: seconds since 1970 when it started.
        template_variables: names for the chat template that requests may override.
        defaults: how the model is sampled where a request does not say; the engine's own once it is there.
    """

    def __init__(self, config: ServerConfig, model: str) -> None:
        """Start without an engine.

        Args:
            config: the settings.
            model: the model's path, which is its name unless the settings have another.
        """
        self.config = config
        self.names = config.served_model_name or (model,)
        self.metrics = Metrics(self.names[0], with_vllm_names=config.metrics_compat == "vllm")
        self.created = int(time.time())
        self.template_variables = config.template_variables()
        self._began = time.monotonic()
        self._backend: Backend | None = None
        self.defaults = SamplingParams()
        self._phase: Phase = "starting"
        self._live: set[Live] = set()
        self._readers: set[Live] = set()  # requests whose body is still to come
        self._num_completions = 0  # asked for by live requests
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def phase(self) -> Phase:
        """What the server is doing; "stopped" too when the engine died under it."""
        if self._phase in ("ready", "draining") and (self._backend is None or not self._backend.is_running):
            return "stopped"
        return self._phase

    @property
    def backend(self) -> Backend | None:
        """The engine, also while requests are refused; None before it is there."""
        return self._backend

    @property
    def num_live(self) -> int:
        """How many generation requests are at work."""
        return len(self._live)

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._began

    def open(self, backend: Backend) -> None:
        """Begin to serve, unless the server is stopping already."""
        self._backend, self.defaults = backend, backend.get_default_sampling_params()
        if self._phase == "starting":
            self._phase = "ready"

    def close(self) -> None:
        """Refuse new requests from here on."""
        self._phase = "draining"

    def serving(self) -> Backend:
        """Return the engine.

        Raises:
            HTTPError: 503, while the server starts or stops.
        """
        phase = self.phase
        if phase == "ready" and self._backend is not None:
            return self._backend
        if phase == "starting":
            raise unavailable(f"the model is loading, for {self.seconds:.0f} s now; ask GET /ready", "starting")
        if phase == "draining":
            raise unavailable("the server is stopping; ask another one", "draining")
        raise unavailable("the engine is not running; the server has to be started again", "engine_stopped")

    @contextmanager
    def admit(self, num_completions: int) -> Generator[Live]:
        """Take a request in for as long as the block runs, which is its task's.

        Raises:
            HTTPError: 429, as many completions wait as may wait.
        """
        backend = self.serving()
        limit = backend.max_num_seqs + self.config.max_waiting
        if self._num_completions >= limit:
            waiting = self._num_completions - backend.max_num_seqs
            raise too_many(f"at most {self.config.max_waiting} completions may wait; {waiting} do; try again later")
        live = Live(_this_task())
        self._live.add(live)
        self._num_completions += num_completions
        self._idle.clear()
        self.metrics.live.inc()
        try:
            yield live
        finally:
            live.end()
            self._live.discard(live)
            self._num_completions -= num_completions
            self.metrics.live.dec()
            if not self._live:
                self._idle.set()

    async def drained(self, seconds: float) -> bool:
        """Wait until no request is live; returns whether that came in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def reading(self) -> Generator[None]:
        """Read a body for as long as the block runs, which `stop_reading` may end.

        Raises:
            HTTPError: 503, it was ended.
        """
        task = _this_task()
        reader = Live(task)
        self._readers.add(reader)
        try:
            yield
        except asyncio.CancelledError:
            if reader.reason is None:
                raise  # not by us
            task.uncancel()
            raise reader.reason from None
        finally:
            reader.end()
            self._readers.discard(reader)

    def stop_reading(self) -> None:
        """Interrupt every request whose body has not arrived: none of them would be taken in any more."""
        for reader in list(self._readers):
            reader.stop(unavailable("the server stopped before the body was whole; ask another one", "draining"))

    def stop_all(self) -> None:
        """Interrupt every live request, and every one whose body has not arrived."""
        self.stop_reading()
        for live in list(self._live):
            live.stop(unavailable("the server stopped before this request was done; ask another one", "draining"))

    def check_model(self, name: str | None) -> None:
        """Check the name by which a request calls the model; one without a name means this one.

        Raises:
            HTTPError: 404, there is no such model.
        """
        if name is not None and name not in self.names:
            known = ", ".join(map(repr, self.names))
            raise invalid(
                f"model must be {known}; got {name!r:.80}; GET /v1/models lists what is served",
                "model",
                status=404,
                code="model_not_found",
            )


def _this_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a request is answered outside of a task")
    return task
