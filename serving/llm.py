"""LLM: the Python API, shaped so that a vLLM script ports by changing its import."""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from tqdm import tqdm

from gdn_jax.serving.collector import Collector
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import InvalidParameterError, InvariantError
from gdn_jax.serving.engine import EngineStats
from gdn_jax.serving.intake import Intake, Options, one_per_prompt
from gdn_jax.serving.interrupts import held_interrupts
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt, Prompt, as_prompts
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.startup import build_engine
from gdn_jax.serving.text.tokenizer import Tokenizer

Message = Mapping[str, object]


class LLM:
    """A model with its engine in this process.

    Not safe for use by several threads at once.
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
        show = bool(settings.pop("use_tqdm", True))
        self.config = EngineConfig.from_arguments(model, settings)
        parts = build_engine(self.config, show_progress=show)
        self._engine, self._tokenizer = parts.engine, parts.tokenizer
        self._intake = Intake(parts, seed=self.config.seed)
        self.model_config, self.memory = parts.model_config, parts.memory
        self.max_model_len = parts.memory.max_model_len
        self._live: dict[str, Collector] = {}  # by the id of each completion that is not finished
        self._stepping = False

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generation_config.json` recommends; used where a call brings no parameters."""
        return self._intake.default_params()

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer: `encode(text)`, `decode(ids)`."""
        return self._tokenizer

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
        encoded = [self._intake.reader.read(prompt) for prompt in as_prompts(prompts)]
        return self._run(encoded, sampling_params, priority, cache_salt, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        cache_salt: str = "",
        **template: object,
    ) -> list[RequestOutput]:
        """Answer conversations, rendered with the model's own chat template.

        Args:
            messages: one conversation, or a list of them.
            sampling_params: as for `generate`.
            use_tqdm: show a progress bar.
            cache_salt: as for `generate`.
            template: `tools` (function schemas), `add_generation_prompt` (default True), `continue_final_message`
                (default False), `chat_template_kwargs` (extra names for the template, such as enable_thinking).

        Raises:
            RequestError: as for `generate`; also messages, tools or options that the template cannot take.
        """
        listed = list(messages)
        several = bool(listed) and not isinstance(listed[0], Mapping)
        conversations = cast("list[object]", listed if several else [listed])
        encoded = [self._intake.reader.render(conversation, **template) for conversation in conversations]
        return self._run(encoded, sampling_params, None, cache_salt, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding after every step that brought something; each output holds all there is so far.

        The request starts with the call, not with the first item. Leaving the iteration early aborts it.
        """
        return self._start(self._intake.reader.read(prompt), sampling_params, cache_salt)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        **template: object,
    ) -> Iterator[RequestOutput]:
        """Answer one conversation as `stream` completes a prompt; `template` as for `chat`."""
        return self._start(self._intake.reader.render(list(messages), **template), sampling_params, cache_salt)

    def stats(self) -> EngineStats:
        """Return counts since start and gauges now."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._engine.reset_prefix_cache()

    def _run(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        cache_salt: str,
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        listed = self._params_for(len(prompts), sampling_params)
        priorities = [0] * len(prompts) if priority is None else one_per_prompt("priority", priority, len(prompts))
        options = [Options(priority=one, cache_salt=cache_salt) for one in priorities]
        collectors = self._submit(prompts, listed, options)
        with tqdm(total=len(collectors), desc="prompts", disable=not use_tqdm, leave=False) as bar:
            try:
                while (num_finished := sum(collector.finished for collector in collectors)) < len(collectors):
                    bar.update(num_finished - bar.n)
                    self._step()
                self._close()
            finally:
                self._abort(collectors)
        return [collector.output() for collector in collectors]

    def _step(self) -> None:
        """Run one step and hand out what it brought, also to streams that are not being read just now."""
        if not self._engine.has_work:  # whoever waits here would wait for ever
            raise InvariantError(f"the engine has lost the requests {sorted(self._live)}")
        self._stepping = True
        try:
            with held_interrupts():
                outputs = self._engine.step()
                for output in outputs:
                    self._live[output.request_id].take(output)
                    if output.output.finish_reason is not None:
                        del self._live[output.request_id]
        finally:
            self._stepping = False

    def _close(self) -> None:
        """Run the closing rows of requests that ended, whose checkpoints the next turn will want."""
        while self._engine.has_closing_rows and not self._stepping:  # a dropped stream may be collected inside a step
            self._step()

    def _params_for(
        self, num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * num_prompts
        if not isinstance(params, list | tuple) or not all(
            isinstance(one, SamplingParams) for one in cast("list[object]", params)
        ):
            raise InvalidParameterError(
                f"sampling_params must be SamplingParams, a list of them, or None; got {type(params).__name__}",
                parameter="sampling_params",
            )
        return one_per_prompt("sampling_params", params, num_prompts)

    def _submit(
        self, prompts: Sequence[EncodedPrompt], params: Sequence[SamplingParams], options: Sequence[Options]
    ) -> list[Collector]:
        """Queue all prompts, or none of them."""
        taken = [self._intake.take(*asked) for asked in zip(prompts, params, options, strict=True)]
        collectors = [collector for collector, _ in taken]
        try:
            with held_interrupts():
                for collector, requests in taken:
                    for request in requests:
                        self._engine.add(request)
                        self._live[request.request_id] = collector
        except BaseException:
            self._abort(collectors)
            raise
        return collectors

    def _start(self, prompt: EncodedPrompt, params: SamplingParams | None, cache_salt: str) -> Iterator[RequestOutput]:
        listed = self._params_for(1, params)
        (collector,) = self._submit([prompt], listed, [Options(cache_salt=cache_salt)])
        stream = self._stream(collector)
        next(stream)  # now it is inside its `try`, and being dropped before its first item aborts the request too
        return stream

    def _stream(self, collector: Collector) -> Iterator[RequestOutput]:
        try:
            yield collector.output()  # for `_start`
            num_seen = 0
            while True:
                if collector.num_taken > num_seen:
                    num_seen = collector.num_taken
                    yield collector.output()
                elif collector.finished:
                    break
                else:
                    self._step()
            self._close()
        except GeneratorExit:  # the reader left
            self._abort([collector])
            self._close()
            raise
        finally:
            self._abort([collector])

    def _abort(self, collectors: Sequence[Collector]) -> None:
        """Drop what is left of these, if anything is."""
        with held_interrupts():
            for name in (name for collector in collectors for name in collector.names):
                if self._live.pop(name, None) is not None:
                    self._engine.abort(name)
