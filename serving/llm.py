"""LLM: the Python API, shaped so that a vLLM script ports by changing its import."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

from tqdm import tqdm

from gdn_jax.serving.collector import Collector
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import InvalidParameterError, InvalidPromptError, PromptTooLongError
from gdn_jax.serving.engine import EngineStats
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.runner.sampling import derive_seed, sibling_seed
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.startup import build_engine

_LOG = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, object]
Message = Mapping[str, object]


class LLM:
    """A model with its engine in this process.

    Not safe for use by several threads at once; `AsyncLLM` is.
    """

    def __init__(self, model: str, **settings: object) -> None:
        """Load a model and get ready to run; every choice made is logged.

        Args:
            model: a folder with config.json, weights and tokenizer.
            settings: fields of `EngineConfig`, or vLLM's names where they mean the same; and `use_tqdm`
                (default True) to show progress while loading.

        Raises:
            TypeError: an unknown setting.
            ValueError: a setting out of range, or a model that cannot be loaded; subclasses say which.
        """
        show = settings.pop("use_tqdm", True)
        self.config = EngineConfig.from_arguments(model, settings)
        parts = build_engine(self.config, show_progress=bool(show))
        self._engine = parts.engine
        self._tokenizer, self._template = parts.tokenizer, parts.chat_template
        self._defaults = parts.defaults
        self.model_config = parts.model_config
        self.max_model_len = parts.memory.max_model_len
        self._num_requests = 0
        self._num_seedless = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generation_config.json` recommends; `generate` uses it when given no parameters."""
        return SamplingParams(**self._defaults.sampling())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in order.

        Args:
            prompts: one prompt or a list: text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}.
            sampling_params: one for all, or one per prompt; None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar.
            priority: one per prompt; lower goes first.
            cache_salt: share cached prefixes only with requests of the same salt.

        Raises:
            RequestError: a prompt or parameter cannot be served; nothing of the call is run then.
        """
        listed = _as_list(prompts)
        params = self._params_for(listed, sampling_params)
        if priority is not None and len(priority) != len(listed):
            raise InvalidParameterError(
                f"priority must have one entry per prompt ({len(listed)}); got {len(priority)}", parameter="priority"
            )
        encoded = [self._encode(prompt) for prompt in listed]
        collectors = self._submit(encoded, params, priority or [0] * len(listed), cache_salt)
        return self._finish(collectors, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's own chat template.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: as for `generate`.
            use_tqdm: show a progress bar.
            tools: function schemas that the template lists.
            add_generation_prompt: open an assistant turn at the end.
            continue_final_message: leave the last message open instead, for the model to go on.
            chat_template_kwargs: extra names for the template, such as enable_thinking.

        Raises:
            RequestError: as for `generate`; also messages or tools the template cannot take.
        """
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        prompts = [
            self._template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding after every step that brought something; each output holds all there is so far.

        Leaving the iteration early aborts the request.
        """
        params = self._params_for([prompt], sampling_params)
        (collector,) = self._submit([self._encode(prompt)], params, [0], cache_salt)
        yield from self._stream(collector)

    def stats(self) -> EngineStats:
        """Return counts since start and gauges now."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._engine.reset_prefix_cache()

    def get_tokenizer(self) -> object:
        """Return the tokenizer: `encode(text)`, `decode(ids)`."""
        return self._tokenizer

    def _params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise InvalidParameterError(
                f"sampling_params must be SamplingParams, a list of them, or None; got {type(params).__name__}",
                parameter="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidParameterError(
                f"sampling_params must have one entry per prompt ({len(prompts)}); got {len(params)}",
                parameter="sampling_params",
            )
        return list(params)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids, checked."""
        if isinstance(prompt, Mapping):
            known = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
            if len(known) != 1 or set(prompt) - {"prompt", "prompt_token_ids"}:
                raise InvalidPromptError(
                    f"a prompt dict must have exactly one of 'prompt' and 'prompt_token_ids'; got {sorted(prompt)}",
                    parameter="prompt",
                )
            prompt = prompt[known[0]]  # pyright: ignore[reportAssignmentType] - checked below
        if isinstance(prompt, str):
            ids, text = self._tokenizer.encode(prompt), prompt
        else:
            ids, text = _check_ids(prompt, self.model_config.vocab_size), None
        if not ids:
            raise InvalidPromptError("a prompt must have at least one token; got an empty one", parameter="prompt")
        return text, ids

    def _max_tokens(self, params: SamplingParams, num_prompt: int) -> int:
        room = self.max_model_len - num_prompt
        if room < 1:
            raise PromptTooLongError(
                f"a prompt must leave room for at least one token of max_model_len ({self.max_model_len}); got "
                f"{num_prompt} tokens; shorten it or raise max_model_len",
                parameter="prompt",
            )
        return room if params.max_tokens is None else params.max_tokens

    def _submit(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
        cache_salt: str,
    ) -> list[Collector]:
        """Queue all prompts, or none of them."""
        collectors: list[Collector] = []
        added: list[str] = []
        try:
            for (text, ids), one, priority in zip(prompts, params, priorities, strict=True):
                name = str(self._num_requests)
                self._num_requests += 1
                seed = self._seed(one)
                max_tokens = self._max_tokens(one, len(ids))
                names = [name if index == 0 else f"{name}-{index}" for index in range(one.n)]
                for index, completion in enumerate(names):
                    self._engine.add(
                        completion,
                        ids,
                        one,
                        seed=sibling_seed(seed, index),
                        max_tokens=max_tokens,
                        priority=priority,
                        cache_salt=cache_salt,
                        leader=names[0] if index else None,
                    )
                    added.append(completion)
                collectors.append(Collector(name, names, text, ids, one, self._tokenizer))
        except BaseException:
            for name in added:
                self._engine.abort(name)
            raise
        return collectors

    def _seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed % 2**64
        self._num_seedless += 1
        return derive_seed(self.config.seed, self._num_seedless - 1)

    def _finish(self, collectors: Sequence[Collector], *, use_tqdm: bool) -> list[RequestOutput]:
        by_name = {name: collector for collector in collectors for name in collector.names}
        with tqdm(total=len(collectors), desc="prompts", disable=not use_tqdm, leave=False) as bar:
            try:
                while self._engine.has_work:
                    for output in self._engine.step():
                        collector = by_name[output.request_id]
                        collector.take(output)
                        bar.update(collector.just_finished())
            except BaseException:
                for name in by_name:
                    self._engine.abort(name)
                raise
        return [collector.output() for collector in collectors]

    def _stream(self, collector: Collector) -> Iterator[RequestOutput]:
        try:
            while not collector.finished:
                outputs = self._engine.step()
                for output in outputs:
                    collector.take(output)
                if outputs:
                    yield collector.output()
            while self._engine.has_work:  # a closing row, whose checkpoint the next turn will want
                self._engine.step()
        finally:
            for name in collector.names:
                self._engine.abort(name)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from a list of prompts: a sequence of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = list(prompts)
    if listed and not isinstance(listed[0], str | Mapping | Sequence) and not hasattr(listed[0], "__len__"):
        return [listed]
    return listed


def _check_ids(ids: object, vocab_size: int) -> list[int]:
    """Return token ids as a list of int."""
    if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
        raise InvalidPromptError(
            f"a prompt must be text or a sequence of token ids; got {type(ids).__name__}", parameter="prompt"
        )
    checked: list[int] = []
    for value in itertools.chain(ids):  # pyright: ignore[reportArgumentType]
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InvalidPromptError(
                f"token ids must be integers; got {value!r} of type {type(value).__name__}", parameter="prompt"
            )
        number = value.__index__()
        if not 0 <= number < vocab_size:
            raise InvalidPromptError(
                f"token ids must be in 0..{vocab_size - 1}, the model's vocabulary; got {number}; encode the text with "
                "the model's own tokenizer",
                parameter="prompt",
            )
        checked.append(number)
    return checked
