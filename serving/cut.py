"""Cut: where each row of a step ends. End token, stop string, length; nothing past the first of them is committed.

One Cutter follows one request. It owns the request's incremental detokenizer and stop checker, so that text, stop
strings and token counts agree: what a client reads is exactly what the committed tokens say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gdn_jax.serving.core.plan import RowCut, TokenLogprobs
from gdn_jax.serving.core.request import FinishReason
from gdn_jax.serving.sampling_params import SamplingParams
from gdn_jax.serving.text.detokenizer import IncrementalDetokenizer
from gdn_jax.serving.text.stop import StopChecker
from gdn_jax.serving.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class TokenOutput:
    """What one step adds to one request's answer.

    Attributes:
        token_ids: committed in this step.
        text: newly certain text; may lag behind the tokens by half a character or a possible stop string.
        logprobs: one entry per token, when asked for.
        prompt_logprobs: one entry per prompt token but the first, with the first tokens; None when not asked for.
        finish_reason: set in the last one.
        stop_reason: the stop string or stop token id that ended it; None for end tokens and length.
        num_accepted: drafts among the tokens.
        num_rejected: drafts that the step verified and that are not among them.
    """

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_accepted: int = 0
    num_rejected: int = 0


class Cutter:
    """Cuts the tokens a row emits, and turns those that stand into text."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        max_tokens: int,
        *,
        tokenizer: Tokenizer | None,
        end_token_ids: Sequence[int],
    ) -> None:
        """Follow a new request.

        Args:
            params: its stop rules.
            prompt_ids: its prompt; output text starts after it.
            max_tokens: most tokens it may emit, at least 1.
            tokenizer: None when there is none: no text then.
            end_token_ids: the model's end tokens; not used with `ignore_eos`.
        """
        self._max_tokens = max_tokens
        self._params = params
        self._ends = frozenset[int]() if params.ignore_eos else frozenset(end_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._num_output = 0
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._stop = StopChecker(params.stop_strings, include_stop_string=params.include_stop_str_in_output)

    def cut(self, tokens: Sequence[int]) -> tuple[RowCut, TokenOutput]:
        """Take the tokens a row emitted; return how many stand, and what they add to the answer."""
        output = TokenOutput(token_ids=[], logprobs=[])  # quicker than the defaults' factories, at every row
        for token in tokens:
            self._num_output += 1
            output.token_ids.append(token)
            self._take(token, output)
            if output.finish_reason is not None:
                break
        if output.finish_reason is not None and not self._stop.stopped:
            output.text += self._rest()
        return RowCut(num_kept=len(output.token_ids), finish=output.finish_reason), output

    def fail(self) -> TokenOutput:
        """End the request after a step that failed: no token stands, certain text is still given out."""
        return TokenOutput(text=self._rest(), finish_reason=FinishReason.ERROR)

    def _take(self, token: int, output: TokenOutput) -> None:
        may_stop = self._num_output >= self._params.min_tokens
        is_end = may_stop and (token in self._ends or token in self._stop_ids)
        if is_end:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = None if token in self._ends else token
        silent = is_end and not self._params.include_stop_str_in_output
        if self._detokenizer is not None and not silent:
            text = self._detokenizer.push([token])
            if not may_stop:  # what comes too early to stop at is sent past the stop strings
                output.text += text
            else:
                released = self._stop.push(text)
                output.text += released.text
                if released.matched is not None:
                    output.finish_reason, output.stop_reason = FinishReason.STOP, released.matched
        if output.finish_reason is None and self._num_output >= self._max_tokens:
            output.finish_reason = FinishReason.LENGTH

    def _rest(self) -> str:
        last = self._detokenizer.flush() if self._detokenizer is not None else ""
        return self._stop.flush() + last
