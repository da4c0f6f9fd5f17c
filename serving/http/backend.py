"""What the server needs of an engine. `AsyncLLM` has it; so has the stub of tests and benchmarks, without a model."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol, runtime_checkable

from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.sampling_params import SamplingParams


@runtime_checkable
class Tokens(Protocol):
    """A tokenizer. Any thread may call it."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Say whether `skip_special_tokens` drops an id."""
        ...


@runtime_checkable
class Backend(Protocol):
    """An engine that runs. `encode` and `render` may be called from any thread, the rest from one event loop."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Most completions that run at once."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        ...

    def get_tokenizer(self) -> Tokens:
        """Return the model's tokenizer."""
        ...

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model recommends."""
        ...

    def encode(self, prompt: str | list[int]) -> EncodedPrompt:
        """Encode text, or check token ids.

        Raises:
            RequestError: the prompt is empty, not Unicode, or has ids outside the vocabulary.
        """
        ...

    def render(self, messages: object, **options: object) -> EncodedPrompt:
        """Render a conversation.

        Args:
            messages: as the client sent them.
            options: `tools`, `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`.

        Raises:
            RequestError: the template cannot take it.
        """
        ...

    def generate(
        self,
        prompt: EncodedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; an item of the kind asked for after every step that brought something. Closing it aborts.

        Raises:
            RequestError: at the call or at the first item.
        """
        ...

    async def stats(self) -> object:
        """Return counts and gauges, as attributes (`serving/metrics.py` lists those that are read)."""
        ...

    def shutdown(self) -> None:
        """Stop; may block for a step. Does nothing the second time."""
        ...
