"""LLM: the Python API, shaped so that a vLLM script ports by changing its import.

Whoever waits for an answer runs the engine's steps, for everybody: one lock makes each step, and each change to what is
queued, one thread's. Streams that are dropped may be collected anywhere, in the middle of a step too, so their requests
are only noted there, and aborted before the next step.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import NoReturn, cast

from tqdm import tqdm

from gdn_jax.serving.collector import Collector
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.errors import InvalidParameterError, InvariantError
from gdn_jax.serving.engine_types import EngineStats
from gdn_jax.serving.intake import Intake, Options, one_per_prompt
from gdn_jax.serving.interrupts import held_interrupts
from gdn_jax.serving.outputs import RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt, Message, Prompt, as_conversations, as_prompts
from gdn_jax.serving.sampling_params import RequestOutputKind, SamplingParams
from gdn_jax.serving.startup import build_engine
from gdn_jax.serving.text.tokenizer import Tokenizer

_RUNNING, _COMPILING = "prompts", "prompts (compiling a step for its first use)"  # what a bar says


class _Bars:
    """Which bar stands for the wait for a step; a part of its own, lest the engine hold the LLM that holds it."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None

    @contextmanager
    def waiting(self, bar: "tqdm[NoReturn] | None") -> Iterator[None]:
        """Let a bar, if there is one, say what the block waits for."""
        self._bar = bar
        try:
            yield
        finally:
            self._bar = None
            if bar is not None and bar.desc != _RUNNING:
                bar.set_description_str(_RUNNING)

    def say_compiling(self) -> None:
        """Say that a step is being compiled; not within a stream, whose last line a bar would wipe out."""
        if self._bar is not None:
            self._bar.set_description_str(_COMPILING)


class LLM:
    """A model with its engine in this process; several threads may call it."""

    def __init__(self, model: str | PathLike[str], **settings: object) -> None:
        """Load a model and get ready to run; every choice made is logged.

        Args:
            model: a folder with config.json, weights and tokenizer, or the name of a shipped model: "pico".
            settings: fields of `EngineConfig`, or vLLM's names where they mean the same; and `use_tqdm`
                (default True) to show progress while loading.

        Raises:
            TypeError: an unknown setting.
            ValueError: a setting out of range, or a model that cannot be loaded; subclasses say which.
        """
        show = bool(settings.pop("use_tqdm", True))
        self.config = EngineConfig.from_arguments(model, settings)
        self._bars = _Bars()
        parts = build_engine(self.config, show_progress=show, on_compile=self._bars.say_compiling)
        self._engine, self._tokenizer = parts.engine, parts.tokenizer
        self._intake = Intake(parts, seed=self.config.seed)
        self.model_config, self.memory = parts.model_config, parts.memory
        self.max_model_len, self.kernels = parts.memory.max_model_len, parts.kernels
        self._live: dict[str, Collector] = {}  # by the id of each completion that is not finished
        self._left: deque[str] = deque()  # ids of dropped streams, to be aborted
        self._lock = threading.Lock()  # of the engine, the intake and the books here

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
            use_tqdm: show a progress bar; it says, too, when a step has to be compiled first.
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
        encoded = [self._intake.reader.render(one, **template) for one in as_conversations(messages)]
        return self._run(encoded, sampling_params, None, cache_salt, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding after every step that brought something.

        Each item holds all there is so far, or what `SamplingParams.output_kind` says. The request starts with the
        call, not with the first item. Leaving the iteration early aborts it.
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
        return self._start(self._intake.reader.render(messages, **template), sampling_params, cache_salt)

    def stats(self) -> EngineStats:
        """Return counts since start and gauges now."""
        with self._lock, held_interrupts():
            self._abort_left()
            return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        with self._lock, held_interrupts():
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
        listed = [_whole(one) for one in self._params_for(len(prompts), sampling_params)]
        priorities = [0] * len(prompts) if priority is None else one_per_prompt("priority", priority, len(prompts))
        options = [Options(priority=one, cache_salt=cache_salt) for one in priorities]
        collectors = self._submit(prompts, listed, options)
        try:
            mine = set(collectors)
            with tqdm(total=len(collectors), desc=_RUNNING, disable=not use_tqdm, leave=False) as bar:
                # One look at one prompt per step, however many there are.
                for collector in collectors:
                    while not collector.finished:
                        if ended := mine.intersection(self._step(collector, bar if use_tqdm else None)):
                            bar.update(len(ended))
                self._close()
        finally:
            self._abort(collectors)
        return [collector.output() for collector in collectors]

    def _step(self, waiting: Collector | None = None, bar: "tqdm[NoReturn] | None" = None) -> list[Collector]:
        """Run one step and hand out what it brought, also to those who are not waiting just now.

        Args:
            waiting: whom the step is for; if another thread's step has ended it, none is run.
            bar: says so while the step has to be compiled first.

        Returns:
            The collectors that ended with it.
        """
        ended: list[Collector] = []
        with self._lock, held_interrupts():
            self._abort_left()
            if waiting is not None and waiting.finished:
                return []
            if waiting is not None and not self._engine.has_work:  # it would wait for ever
                raise InvariantError(f"the engine has lost the requests {sorted(self._live)}")
            with self._bars.waiting(bar):
                outputs = self._engine.step()
            for output in outputs:
                collector = self._live[output.request_id]
                collector.take(output)
                if output.output.finish_reason is not None:
                    del self._live[output.request_id]
                    ended += [collector] if collector.finished else []
            self._abort_left()
        return ended

    def _close(self) -> None:
        """Run the closing rows of requests that ended, whose checkpoints the next turn will want."""
        while self._engine.has_closing_rows:
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
        collectors: list[Collector] = []
        try:
            with self._lock, held_interrupts():
                taken = [self._intake.take(*asked) for asked in zip(prompts, params, options, strict=True)]
                collectors = [collector for collector, _ in taken]
                try:
                    for collector, requests in taken:
                        for request in requests:
                            self._engine.add(request)
                            self._live[request.request_id] = collector
                except BaseException:  # refused, while no step can have run those before it
                    self._withdraw(collectors)
                    raise
        except BaseException:  # interrupted, if anything is left
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
            while not collector.finished:
                if (output := self._news(collector)) is not None:
                    yield output
                else:
                    self._step(collector)
            self._close()  # now: whoever has the last item need not ask for another
            if (output := self._news(collector)) is not None:
                yield output
        finally:
            if not collector.finished:  # the reader left, perhaps in the middle of a step
                self._left.extend(collector.request_ids)
                with held_interrupts():  # one between the two next lines would leave the lock taken
                    if self._lock.acquire(blocking=False):
                        try:
                            self._abort_left(waits=False)  # here an interrupt or error would be lost
                        finally:
                            self._lock.release()

    def _news(self, collector: Collector) -> RequestOutput | None:
        """Return what came, whole: another thread's step may be bringing more."""
        with self._lock:
            return collector.news()

    def _abort(self, collectors: Sequence[Collector]) -> None:
        """Drop what is left of these, if anything is."""
        self._left.extend([own_id for collector in collectors for own_id in collector.request_ids])
        with self._lock, held_interrupts():
            self._abort_left()

    def _withdraw(self, collectors: Sequence[Collector]) -> None:
        """Take back what was added of a call that is refused; whoever calls this has the lock."""
        for own_id in [own_id for collector in collectors for own_id in collector.request_ids]:
            if self._live.pop(own_id, None) is not None:
                self._engine.withdraw(own_id)

    def _abort_left(self, *, waits: bool = True) -> None:
        """Abort what was noted to be left; whoever calls this has the lock.

        A row of it may be in flight, or of one that ended when its caller was interrupted, and nobody may ever ask for
        another step: once all have left, that row is waited for here, so that nothing stays held.

        Args:
            waits: False in a stream's end, which the collector of garbage may run anywhere, in the midst of a trace
                too: no step can be run there, and the next call of anything waits instead.
        """
        while self._left:
            own_id = self._left.popleft()
            if self._live.pop(own_id, None) is not None:
                self._engine.abort(own_id)
        while waits and not self._live and self._engine.has_step_in_flight:
            self._engine.step()


def _whole(params: SamplingParams) -> SamplingParams:
    """Return parameters whose collector keeps everything to the end."""
    if params.output_kind is not RequestOutputKind.DELTA:
        return params
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
