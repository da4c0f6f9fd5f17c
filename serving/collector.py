"""Collector: what the steps gave one prompt's completions, put together into RequestOutputs of the kind asked for.

Taking a step's output costs no more than what it brings. An item of kind DELTA costs as much; a cumulative one copies
the lists so far, since whoever reads it may keep it.
"""

from collections.abc import Sequence

from gdn_jax.serving.core.plan import TokenLogprobs
from gdn_jax.serving.core.request import FinishReason
from gdn_jax.serving.engine_types import EngineOutput
from gdn_jax.serving.outputs import CompletionOutput, PositionLogprobs, RequestOutput, position_logprobs
from gdn_jax.serving.prompts import EncodedPrompt
from gdn_jax.serving.sampling_params import RequestOutputKind, SamplingParams
from gdn_jax.serving.text.detokenizer import IncrementalDetokenizer
from gdn_jax.serving.text.tokenizer import Tokenizer


class _Reporter:
    """Makes the reports of one text's tokens, in order."""

    def __init__(self, decoder: IncrementalDetokenizer | None) -> None:
        self._decoder = decoder  # stands before the next token: tells what an alternative would have read like

    def report(self, token: int, found: TokenLogprobs) -> PositionLogprobs:
        """Return the report of the next token."""
        top = list(zip(found.top_ids, found.top, strict=True))
        report = position_logprobs(token, found.chosen, found.rank, top, self._decode)
        if self._decoder is not None:
            self._decoder.push([token])
        return report

    def _decode(self, token: int) -> str | None:
        return None if self._decoder is None else self._decoder.peek(token)


class _Completion:
    """One of the `n` completions: all of it so far, or what was not yet handed on."""

    def __init__(self, index: int, reporter: _Reporter) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.cumulative = 0.0
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_accepted = self.num_rejected = 0
        self.has_news = False
        self._reporter = reporter

    def take(self, given: EngineOutput) -> None:
        """Add what a step gave."""
        step, self.has_news = given.output, True
        self.text += step.text
        self.token_ids += step.token_ids
        self.finish, self.stop_reason = step.finish_reason, step.stop_reason
        self.num_accepted += step.num_accepted
        self.num_rejected += step.num_rejected
        for token, found in zip(step.token_ids, step.logprobs, strict=False):  # none, where none were asked for
            self.cumulative += found.chosen
            self.logprobs.append(self._reporter.report(token, found))

    def output(self, *, has_logprobs: bool) -> CompletionOutput:
        """Return what is here; lists that will grow are copied."""
        grows = self.finish is None
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=list(self.token_ids) if grows else self.token_ids,
            cumulative_logprob=self.cumulative if has_logprobs else None,
            logprobs=(list(self.logprobs) if grows else self.logprobs) if has_logprobs else None,
            finish_reason=None if self.finish is None else self.finish.value,
            stop_reason=self.stop_reason,
            num_accepted_drafts=self.num_accepted,
            num_rejected_drafts=self.num_rejected,
        )

    def hand_over(self, *, has_logprobs: bool) -> CompletionOutput:
        """Return what came since the last call, and keep none of it."""
        output = self.output(has_logprobs=has_logprobs)
        self.text, self.token_ids, self.logprobs = "", [], []
        return output


class Collector:
    """Gathers the outputs of one prompt's completions by the engine's request ids."""

    def __init__(
        self, name: str, request_ids: Sequence[str], prompt: EncodedPrompt, params: SamplingParams, tokenizer: Tokenizer
    ) -> None:
        """Start with nothing.

        Args:
            name: what the caller calls the whole.
            request_ids: the engine's ids of its completions, in order.
            prompt: what was asked.
            params: how.
            tokenizer: makes the text of alternatives.
        """
        self.name, self.request_ids = name, tuple(request_ids)
        self._prompt, self._kind = prompt, params.output_kind
        self._has_logprobs = params.logprobs is not None
        self._tokenizer = tokenizer if params.detokenize else None
        self._completions = {
            request_id: _Completion(index, self._reporter(prompt.token_ids if self._has_logprobs else None))
            for index, request_id in enumerate(request_ids)
        }
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._num_open = len(self.request_ids)
        self._num_cached = 0
        self._has_news = False

    def take(self, output: EngineOutput) -> None:
        """Add what a step gave one completion."""
        completion = self._completions[output.request_id]
        completion.take(output)
        if output.output.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt_reports(output.output.prompt_logprobs)
        self._has_news = True
        self._num_open -= completion.finish is not None
        if completion.index == 0 and output.num_cached_tokens is not None:
            self._num_cached = output.num_cached_tokens

    def _reporter(self, ids: Sequence[int] | None) -> _Reporter:
        """Return who reports the tokens after `ids`; None: there is nothing to report."""
        if self._tokenizer is None or ids is None:
            return _Reporter(None)
        return _Reporter(IncrementalDetokenizer(self._tokenizer, ids, skip_special_tokens=False))

    def _prompt_reports(self, found: Sequence[TokenLogprobs]) -> list[PositionLogprobs | None]:
        first, *rest = self._prompt.token_ids
        reporter = self._reporter([first])
        return [None, *(reporter.report(token, one) for token, one in zip(rest, found, strict=True))]

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return self._num_open == 0

    def news(self) -> RequestOutput | None:
        """Return the next item of a stream of the kind asked for; None while there is nothing for one."""
        if not self._has_news or (self._kind is RequestOutputKind.FINAL_ONLY and not self.finished):
            return None
        self._has_news = False
        if self._kind is not RequestOutputKind.DELTA:
            return self.output()
        changed = [completion for completion in self._completions.values() if completion.has_news]
        for completion in changed:
            completion.has_news = False
        output = self._output([completion.hand_over(has_logprobs=self._has_logprobs) for completion in changed])
        self._prompt_logprobs = None
        return output

    def output(self) -> RequestOutput:
        """Return what there is so far; of kind DELTA, what was not handed on yet."""
        outputs = [one.output(has_logprobs=self._has_logprobs) for one in self._completions.values()]
        return self._output(outputs)

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self.name,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,  # one list for all items: nobody changes it
            prompt_logprobs=self._prompt_logprobs,  # the same
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self._num_cached,
        )
