"""The sizes a scheduler works within, and which requests could never run within them."""

from dataclasses import dataclass

from gdn_jax.serving.core.errors import InvalidParameterError, InvalidPromptError, PromptTooLongError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes the scheduler works within; `serving/config.py` checks what a user may ask for.

    Attributes:
        num_blocks: KV blocks, the null block included.
        num_slots: state slots, the null slot included.
        num_lanes: most requests that run at once.
        budget: most prefill tokens in one step; at least one block.
        max_model_len: most tokens of one sequence.
        num_drafts: most drafts per step, k.
        cache_key: opens every hash chain: whatever changes it (weights, dtypes) separates caches.
    """

    num_blocks: int
    num_slots: int
    num_lanes: int
    budget: int
    max_model_len: int
    num_drafts: int = 0
    cache_key: bytes = b""

    def check(self, block_size: int) -> None:
        """Raise ValueError unless the sizes can serve any request."""
        if self.budget < block_size:
            raise ValueError(f"max_num_batched_tokens must be at least one block ({block_size}); got {self.budget}")
        if 1 + self.num_drafts > block_size:
            raise ValueError(f"1 + num_drafts must be at most one block ({block_size}); got {1 + self.num_drafts}")
        if self.num_lanes < 1:
            raise ValueError(f"max_num_seqs must be at least 1; got {self.num_lanes}")

    def admit(self, *, num_prompt: int, max_tokens: int, block_size: int) -> None:
        """Refuse a request that could never run to its end, whatever else runs.

        Raises:
            InvalidPromptError: the prompt is empty.
            InvalidParameterError: `max_tokens` is not positive.
            PromptTooLongError: it does not fit; the message has the numbers.
        """
        if num_prompt == 0:
            raise InvalidPromptError("a prompt must hold at least one token; got none")
        if max_tokens < 1:
            raise InvalidParameterError(f"max_tokens must be at least 1; got {max_tokens}", parameter="max_tokens")
        if num_prompt + max_tokens > self.max_model_len:
            raise PromptTooLongError(
                f"prompt + max_tokens must be at most max_model_len ({self.max_model_len}); got {num_prompt} + "
                f"{max_tokens}; shorten the prompt or lower max_tokens"
            )
        needed, usable = (num_prompt + max_tokens - 1) // block_size + 1, self.num_blocks - 1
        if needed > usable:
            raise PromptTooLongError(
                f"prompt + max_tokens ({num_prompt} + {max_tokens}) must fit the KV pool: it needs {needed} blocks of "
                f"{block_size} tokens, and there are {usable}; lower max_tokens or give the pool more memory"
            )
