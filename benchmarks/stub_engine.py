"""An engine without a model: everything the HTTP server needs of one, in the time that a generator takes.

It has the tokenizer, the chat template and the stop rules of a real one; only its tokens come from a hash, so that a
greedy answer is a function of the prompt alone and equal seeds give equal answers. It needs no JAX.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

from gdn_jax.serving.core.errors import DuplicateRequestError, PromptTooLongError
from gdn_jax.serving.cut import Cutter
from gdn_jax.serving.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from gdn_jax.serving.prompts import EncodedPrompt, PromptReader
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "golden" / "tiny-hybrid"
VOCAB_SIZE = 320
Script = Callable[[Sequence[int], int], Iterator[int]]  # from a prompt and the seed of a choice to its tokens


def hashed_tokens(prompt: Sequence[int], seed: int) -> Iterator[int]:
    """Yield printable tokens for ever."""
    state = crc32(repr((list(prompt), seed)).encode())
    while True:
        state = (state * 1664525 + 1013904223) % (1 << 32)
        yield (state >> 16) % 94  # the tokens of "!" to "~"


class StubEngine:
    """An engine for the server; see the module.

    Attributes:
        max_model_len: most tokens of one sequence.
        max_num_seqs: most completions that run at once.
        is_running: whether requests are taken; a test may clear it.
        started: names of the requests that ever ran.
        live: names of those that run now.
    """

    def __init__(
        self,
        *,
        script: Script = hashed_tokens,
        delay: float = 0.0,
        max_model_len: int = 4096,
        max_num_seqs: int = 16,
    ) -> None:
        """Start.

        Args:
            script: the tokens.
            delay: seconds per step; 0: as fast as the event loop goes round.
            max_model_len: most tokens of one sequence.
            max_num_seqs: most completions that run at once.
        """
        self.max_model_len, self.max_num_seqs, self.is_running = max_model_len, max_num_seqs, True
        self.started: list[str] = []
        self.live: set[str] = set()
        self._script, self._delay = script, delay
        self._tokenizer = Tokenizer(FOLDER, VOCAB_SIZE)
        self._reader = PromptReader(self._tokenizer, ChatTemplate.from_folder(FOLDER), VOCAB_SIZE)
        self._lanes = asyncio.Semaphore(max_num_seqs)
        self._num_waiting = self._num_tokens = self._num_seedless = 0

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what the model recommends."""
        found = self._tokenizer.generation_defaults
        return SamplingParams(temperature=found.temperature, top_p=found.top_p, top_k=found.top_k)

    def encode(self, prompt: str | list[int]) -> EncodedPrompt:
        """Encode a prompt."""
        return self._reader.read(prompt)

    def render(self, messages: object, **options: object) -> EncodedPrompt:
        """Render a conversation."""
        return self._reader.render(messages, **options)

    async def generate(
        self,
        prompt: EncodedPrompt,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt, one token per choice and step; each output holds what is new."""
        room = self.max_model_len - len(prompt.token_ids)
        if room < (sampling_params.max_tokens or 1):
            raise PromptTooLongError(f"no room for {sampling_params.max_tokens} tokens after {len(prompt.token_ids)}")
        if request_id in self.live:
            raise DuplicateRequestError(f"{request_id} is in use")
        self._num_waiting += 1
        try:
            await self._lanes.acquire()
        finally:
            self._num_waiting -= 1
        self.live.add(request_id)
        self.started.append(request_id)
        try:
            choices = [
                _Choice(self._tokenizer, prompt, sampling_params, index, self._tokens(prompt, sampling_params, index))
                for index in range(sampling_params.n)
            ]
            scored = _prompt_reports(prompt, sampling_params)
            while any(choice.finish is None for choice in choices):
                await asyncio.sleep(self._delay)
                changed = [choice for choice in choices if choice.finish is None]
                self._num_tokens += sum(choice.step(room) for choice in changed)
                yield RequestOutput(
                    request_id=request_id,
                    prompt=prompt.text,
                    prompt_token_ids=prompt.token_ids,
                    prompt_logprobs=scored,
                    outputs=[choice.hand_over() for choice in changed],
                    finished=all(choice.finish is not None for choice in choices),
                    num_cached_tokens=0,
                )
                scored = None  # they come once
        finally:
            self.live.discard(request_id)
            self._lanes.release()

    def _tokens(self, prompt: EncodedPrompt, params: SamplingParams, index: int) -> Iterator[int]:
        if params.greedy:
            return self._script(prompt.token_ids, 0)
        if params.seed is None:
            self._num_seedless += 1
            return self._script(prompt.token_ids, -self._num_seedless)
        return self._script(prompt.token_ids, 1 + params.seed + index)

    async def stats(self) -> object:
        """Return what a real engine counts, as far as it happens here."""
        return SimpleNamespace(
            running=len(self.live),
            waiting=self._num_waiting,
            output_tokens=self._num_tokens,
            blocks=100,
            blocks_used=len(self.live),
            slots=100,
            slots_used=len(self.live),
            checkpoints=0,
            queried_tokens=0,
            hit_tokens=0,
            preemptions=0,
            compilations=0,
            verified_rows=0,
            drafted_tokens=0,
            accepted_tokens=0,
            accepted_by_position=(0, 0, 0),
        )

    def shutdown(self) -> None:
        """Stop."""
        self.is_running = False


def _prompt_reports(prompt: EncodedPrompt, params: SamplingParams) -> list[PositionLogprobs | None] | None:
    count = params.prompt_logprobs
    return None if count is None else [None, *(_report(token, count) for token in prompt.token_ids[1:])]


def _report(token: int, count: int) -> PositionLogprobs:
    others = [one for one in range(0x41, 0x41 + count + 1) if one != token]
    report = {token: Logprob(logprob=-0.5, rank=1)}
    return report | {
        one: Logprob(logprob=-1.0 - place, rank=place + 2) for place, one in enumerate(others[: max(0, count - 1)])
    }


class _Choice:
    """One completion."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: EncodedPrompt, params: SamplingParams, index: int, tokens: Iterator[int]
    ) -> None:
        self._tokenizer, self._params, self._index, self._tokens = tokenizer, params, index, tokens
        most = params.max_tokens if params.max_tokens is not None else 1 << 30
        self._cutter = Cutter(
            params, prompt.token_ids, most, tokenizer=tokenizer, end_token_ids=tokenizer.end_token_ids
        )
        self._text, self._ids, self._num_ids = "", list[int](), 0
        self._logprobs: list[PositionLogprobs] = []
        self.finish: str | None = None
        self._stop_reason: int | str | None = None

    def step(self, room: int) -> int:
        """Take a token; returns how many were kept."""
        token = next(self._tokens)
        _, found = self._cutter.cut([token])
        self._num_ids += len(found.token_ids)
        self._text += found.text
        self._ids += found.token_ids
        if self._params.logprobs is not None:
            self._logprobs += [_report(one, self._params.logprobs) for one in found.token_ids]
        if found.finish_reason is not None:
            self.finish, self._stop_reason = found.finish_reason.value, found.stop_reason
        elif self._num_ids >= room:
            self.finish = "length"
        return len(found.token_ids)

    def hand_over(self) -> CompletionOutput:
        """Return what came since the last call."""
        output = CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=self._ids,
            logprobs=self._logprobs if self._params.logprobs is not None else None,
            finish_reason=self.finish,
            stop_reason=self._stop_reason,
        )
        self._text, self._ids, self._logprobs = "", [], []
        return output
