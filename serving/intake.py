"""Intake: from what a caller asks to requests for the engine, and a Collector for what they bring back.

Shared by every way in. It draws the seeds, numbers the completions of `n`, and refuses what the model cannot take; what
the pools cannot take is the engine's to refuse.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from reprlib import repr as short_repr

from gdn_jax.serving.bad_words import bad_word_tokens
from gdn_jax.serving.collector import Collector
from gdn_jax.serving.core.errors import InvalidParameterError, PromptTooLongError
from gdn_jax.serving.engine_types import EngineRequest
from gdn_jax.serving.prompts import EncodedPrompt, PromptReader
from gdn_jax.serving.runner.sampling import derive_seed, sibling_seed
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.startup import EngineParts


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a caller may set about a request beside how it samples.

    Attributes:
        priority: lower goes first.
        cache_salt: share cached prefixes only with requests of the same salt.

    Raises:
        InvalidParameterError: a value of another type; priorities of several types could not be ordered.
    """

    priority: int = 0
    cache_salt: str = ""

    # The class checks its own values; a run-time type checker would answer first, with another error.
    __no_type_check__ = True

    def __post_init__(self) -> None:
        """Check every value."""
        if isinstance(self.priority, bool) or not isinstance(self.priority, Integral):
            raise InvalidParameterError(
                f"priority must be an int; got {short_repr(self.priority)}; leave it out for the default",
                parameter="priority",
            )
        if not isinstance(self.cache_salt, str) or not _is_unicode(self.cache_salt):
            raise InvalidParameterError(
                f"cache_salt must be a str of valid Unicode; got {short_repr(self.cache_salt)}; leave it out for none",
                parameter="cache_salt",
            )


def _is_unicode(text: str) -> bool:
    """Return whether a text has bytes: a lone surrogate has none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Intake:
    """Makes requests for one engine. Not thread-safe: one thread takes in."""

    def __init__(self, parts: EngineParts, *, seed: int) -> None:
        """Take in for a running engine.

        Args:
            parts: what was read and decided for it.
            seed: draws the seeds of requests that bring none.
        """
        self.reader = PromptReader(parts.tokenizer, parts.chat_template, parts.model_config.vocab_size)
        self._tokenizer, self._defaults = parts.tokenizer, parts.defaults
        self._vocab_size = parts.model_config.vocab_size
        self._max_model_len = parts.memory.max_model_len
        self._longer = parts.memory.how_to_take_longer(parts.model_config.context_length)
        self._seed = seed
        self._num_requests = 0
        self._num_seedless = 0

    def default_params(self) -> SamplingParams:
        """Return what `generation_config.json` recommends."""
        found = self._defaults
        return SamplingParams(
            temperature=found.temperature,
            top_p=found.top_p,
            top_k=found.top_k,
            min_p=found.min_p,
            repetition_penalty=found.repetition_penalty,
            presence_penalty=found.presence_penalty,
            frequency_penalty=found.frequency_penalty,
        )

    def take(
        self, prompt: EncodedPrompt, params: SamplingParams, options: Options, request_id: str | None = None
    ) -> tuple[Collector, list[EngineRequest]]:
        """Return a collector and one engine request per completion.

        The engine's ids are numbers drawn here, so that no name of a caller's can be that of another request.

        Args:
            prompt: checked.
            params: checked as far as can be without the model.
            options: the rest.
            request_id: what the caller calls it, in outputs and log lines; None: its number.

        Raises:
            RequestError: the prompt leaves no room, or a token id lies outside the vocabulary, or a bad word has too
                many tokens, or the name is no text, or the parameters are none.
        """
        if not isinstance(params, SamplingParams):
            raise InvalidParameterError(
                f"sampling_params must be SamplingParams or None; got {type(params).__name__}; leave it out for the "
                "model's defaults",
                parameter="sampling_params",
            )
        if request_id is not None and not isinstance(request_id, str):
            raise InvalidParameterError(
                f"request_id must be a str or None; got {type(request_id).__name__}; leave it out for a number",
                parameter="request_id",
            )
        self._check_token_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_token_ids("logit_bias", params.logit_bias or ())
        bad_words = bad_word_tokens(params.bad_words or (), self._tokenizer)
        max_tokens = self._max_tokens(params, len(prompt.token_ids))
        number, self._num_requests = str(self._num_requests), self._num_requests + 1
        name = number if request_id is None else request_id
        ids = [number if index == 0 else f"{number}.{index}" for index in range(params.n)]
        seed = self._draw_seed(params)
        # A prompt is scored once: its other completions start from the checkpoint that the first one leaves.
        unscored = replace(params, prompt_logprobs=None)
        requests = [
            EngineRequest(
                request_id=own_id,
                prompt=prompt.token_ids,
                params=unscored if index else params,
                bad_words=bad_words,
                seed=sibling_seed(seed, index),
                max_tokens=max_tokens,
                priority=options.priority,
                turn_borders=prompt.turn_borders,
                cache_salt=options.cache_salt,
                leader=number if index else None,
                name=name,
            )
            for index, own_id in enumerate(ids)
        ]
        return Collector(name, ids, prompt, params, self._tokenizer), requests

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidParameterError(
                    f"{name} must be in 0..{self._vocab_size - 1}, the model's vocabulary; got {token_id}; "
                    "leave it out",
                    parameter=name,
                )

    def _max_tokens(self, params: SamplingParams, num_prompt: int) -> int:
        room = self._max_model_len - num_prompt
        if room < 1:
            raise PromptTooLongError(
                f"a prompt must be shorter than max_model_len ({self._max_model_len}); got {num_prompt} tokens; "
                f"shorten it{self._longer}",
                parameter="prompt",
            )
        return room if params.max_tokens is None else params.max_tokens

    def _draw_seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return int(params.seed)
        self._num_seedless += 1
        return derive_seed(self._seed, self._num_seedless - 1)


def one_per_prompt[T](name: str, given: Sequence[T], num_prompts: int) -> list[T]:
    """Return a list of one value per prompt.

    Raises:
        InvalidParameterError: no sequence, or one of more or fewer values.
    """
    if not hasattr(given, "__len__") or not hasattr(given, "__iter__"):
        raise InvalidParameterError(
            f"{name} must be a list with one entry per prompt ({num_prompts}); got {type(given).__name__}",
            parameter=name,
        )
    if len(given) != num_prompts:
        raise InvalidParameterError(
            f"{name} must have one entry per prompt ({num_prompts}); got {len(given)}", parameter=name
        )
    return list(given)
