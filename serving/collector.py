"""Collector: what the steps gave one prompt's completions, put together into a RequestOutput."""

from collections.abc import Sequence

from gdn_jax.serving.core.plan import TokenLogprobs
from gdn_jax.serving.core.request import FinishReason
from gdn_jax.serving.engine import EngineOutput
from gdn_jax.serving.outputs import CompletionOutput, PositionLogprobs, RequestOutput, position_logprobs
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.text.tokenizer import Tokenizer


class _Completion:
    """One of the `n` completions so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.cumulative = 0.0
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None


class Collector:
    """Gathers the outputs of one prompt's completions by request id."""

    def __init__(
        self, names: Sequence[str], prompt: EncodedPrompt, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        """Start with nothing.

        Args:
            names: ids of its completions, in order; the first is the name of the whole.
            prompt: what was asked.
            params: how.
            tokenizer: makes the text of alternatives.
        """
        self.names = tuple(names)
        self._prompt = prompt
        self._params, self._tokenizer = params, tokenizer
        self._completions = {name: _Completion() for name in names}
        self._num_cached = 0
        self.num_taken = 0  # outputs taken so far: tells a reader whether there is something new

    def take(self, output: EngineOutput) -> None:
        """Add what a step gave one completion."""
        completion, step = self._completions[output.request_id], output.output
        self.num_taken += 1
        completion.token_ids += step.token_ids
        completion.text.append(step.text)
        completion.finish, completion.stop_reason = step.finish_reason, step.stop_reason
        if output.request_id == self.names[0] and output.num_cached_tokens is not None:
            self._num_cached = output.num_cached_tokens
        for token, found in zip(step.token_ids, step.logprobs, strict=False):
            completion.cumulative += found.chosen
            completion.logprobs.append(self._report(token, found))

    def _report(self, token: int, found: TokenLogprobs) -> PositionLogprobs:
        top = list(zip(found.top_ids, found.top, strict=True))
        return position_logprobs(token, found.chosen, found.rank, top, self._decode)

    def _decode(self, token: int) -> str | None:
        return self._tokenizer.decode([token], skip_special_tokens=False) if self._params.detokenize else None

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(completion.finish is not None for completion in self._completions.values())

    def output(self) -> RequestOutput:
        """Return what there is so far."""
        wants = self._params.logprobs is not None
        return RequestOutput(
            request_id=self.names[0],
            prompt=self._prompt.text,
            prompt_token_ids=list(self._prompt.token_ids),
            outputs=[
                CompletionOutput(
                    index=index,
                    text="".join(completion.text),
                    token_ids=list(completion.token_ids),
                    cumulative_logprob=completion.cumulative if wants else None,
                    logprobs=list(completion.logprobs) if wants else None,
                    finish_reason=None if completion.finish is None else completion.finish.value,
                    stop_reason=completion.stop_reason,
                )
                for index, completion in enumerate(self._completions.values())
            ],
            finished=self.finished,
            num_cached_tokens=self._num_cached,
        )
