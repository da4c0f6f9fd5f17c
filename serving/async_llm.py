"""AsyncLLM: the Python API for asynchronous callers, and what a server stands on."""

from collections.abc import AsyncIterator, Mapping, Sequence

from gdn_jax.serving.async_engine import AsyncEngine
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.engine import EngineStats
from gdn_jax.serving.intake import Intake, Options
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt, Prompt
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.startup import build_engine


class AsyncLLM:
    """A model with its engine on a thread of its own.

    All methods belong to one event loop. Use it as an asynchronous context manager, or call `shutdown`.
    """

    def __init__(self, model: str, **settings: object) -> None:
        """Load a model and start the engine; arguments and errors as for `LLM`."""
        show = bool(settings.pop("use_tqdm", True))
        self.config = EngineConfig.from_arguments(model, settings)
        parts = build_engine(self.config, show_progress=show)
        self.model_config, self.memory = parts.model_config, parts.memory
        self._intake = Intake(parts, seed=self.config.seed)
        self._engine = AsyncEngine(parts.engine)
        self._engine.start()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding after every step that brought something; each output holds all there is so far.

        Closing the iterator, or cancelling the task that reads it, aborts the request within one step.

        Args:
            prompt: text, token ids, or a dict of either, as for `LLM.generate`.
            sampling_params: None: what the model recommends.
            request_id: a name not in use; None: the engine chooses one.
            priority: lower goes first.
            cache_salt: share cached prefixes only with requests of the same salt.

        Raises:
            RequestError: the prompt or a parameter cannot be served.
        """
        options = Options(priority=priority, cache_salt=cache_salt)
        return self._stream(self._intake.reader.read(prompt), sampling_params, request_id, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **template: object,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation as `generate` completes a prompt; `template` as for `LLM.chat`."""
        options = Options(priority=priority, cache_salt=cache_salt)
        prompt = self._intake.reader.render(list(messages), **template)
        return self._stream(prompt, sampling_params, request_id, options)

    def _stream(
        self, prompt: EncodedPrompt, params: SamplingParams | None, request_id: str | None, options: Options
    ) -> AsyncIterator[RequestOutput]:
        chosen = self._intake.default_params() if params is None else params
        collector, requests = self._intake.take(prompt, chosen, options, request_id)
        return self._engine.stream(collector, requests)

    async def stats(self) -> EngineStats:
        """Return counts since start and gauges now."""
        return await self._engine.call(lambda engine: engine.stats())

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        await self._engine.call(lambda engine: engine.reset_prefix_cache())

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return self._engine.is_running

    def shutdown(self) -> None:
        """Stop the engine; readers get `EngineStoppedError`. Does nothing the second time."""
        if self._engine.is_running:
            self._engine.stop()

    async def __aenter__(self) -> "AsyncLLM":
        """Return itself."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Stop the engine."""
        self.shutdown()
