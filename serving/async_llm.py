"""AsyncLLM: the Python API for asynchronous callers, and what a server stands on."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from os import PathLike

from gdn_jax.serving.async_engine import AsyncEngine
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import DuplicateRequestError
from gdn_jax.serving.engine_types import EngineStats
from gdn_jax.serving.intake import Intake, Options
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt, Message, Prompt
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.startup import build_engine
from gdn_jax.serving.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model with its engine on a thread of its own.

    All methods belong to one event loop. Use it as an asynchronous context manager, or call `shutdown`.
    """

    def __init__(self, model: str | PathLike[str], **settings: object) -> None:
        """Load a model and start the engine; arguments and errors as for `LLM`."""
        show = bool(settings.pop("use_tqdm", True))
        self.config = EngineConfig.from_arguments(model, settings)
        parts = build_engine(self.config, show_progress=show)
        self.model_config, self.memory = parts.model_config, parts.memory
        self._intake = Intake(parts, seed=self.config.seed)
        self._tokenizer = parts.tokenizer
        self.max_model_len = parts.memory.max_model_len
        self._names: set[str] = set()  # that callers chose, of streams being read
        self._engine = AsyncEngine(parts.engine)
        self._engine.start()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generation_config.json` recommends; used where a call brings no parameters."""
        return self._intake.default_params()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer: `encode(text)`, `decode(ids)`."""
        return self._tokenizer

    def generate(
        self,
        prompt: Prompt | EncodedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput]:
        """Complete one prompt, yielding after every step that brought something.

        An item holds all there is so far, or what `SamplingParams.output_kind` says. The request starts when its first
        item is asked for. Closing the iterator, or cancelling the task that reads it, aborts it within one step.

        Args:
            prompt: text, token ids, or a dict of either, as for `LLM.generate`; or what `encode` or `render` returned.
            sampling_params: None: what the model recommends.
            request_id: a name for outputs and log lines, not that of another stream being read; None: a number.
            priority: lower goes first.
            cache_salt: share cached prefixes only with requests of the same salt.

        Raises:
            RequestError: the prompt or a parameter cannot be served; also from the first item on.
        """
        options = Options(priority=priority, cache_salt=cache_salt)
        encoded = prompt if isinstance(prompt, EncodedPrompt) else self._intake.reader.read(prompt)
        return self._stream(encoded, sampling_params, request_id, options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        **template: object,
    ) -> AsyncGenerator[RequestOutput]:
        """Answer one conversation as `generate` completes a prompt; `template` as for `LLM.chat`."""
        options = Options(priority=priority, cache_salt=cache_salt)
        prompt = self._intake.reader.render(messages, **template)
        return self._stream(prompt, sampling_params, request_id, options)

    def _stream(
        self, prompt: EncodedPrompt, params: SamplingParams | None, request_id: str | None, options: Options
    ) -> AsyncGenerator[RequestOutput]:
        chosen = self.get_default_sampling_params() if params is None else params
        collector, requests = self._intake.take(prompt, chosen, options, request_id)
        stream = self._engine.stream(collector, requests)
        return stream if request_id is None else self._named(request_id, stream)

    async def _named(self, name: str, stream: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        """Read a stream under a name that no other has meanwhile."""
        if name in self._names:
            raise DuplicateRequestError(
                f"request_id must not be that of a request in flight; got {name!r}; choose another, or leave it out",
                parameter="request_id",
            )
        self._names.add(name)
        try:
            async with aclosing(stream):
                async for output in stream:
                    yield output
        finally:
            self._names.discard(name)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Return a prompt ready for `generate`; may be called from any thread.

        Raises:
            InvalidPromptError: as for `generate`.
        """
        return self._intake.reader.read(prompt)

    def render(self, messages: object, **template: object) -> EncodedPrompt:
        """Return a conversation ready for `generate`; may be called from any thread.

        Raises:
            RequestError: the template cannot take it.
        """
        return self._intake.reader.render(messages, **template)

    @property
    def max_num_seqs(self) -> int:
        """Most completions that run at once."""
        return self.memory.max_num_seqs

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
