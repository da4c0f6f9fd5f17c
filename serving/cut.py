"""Cut: where each row of a step ends. End token, stop string, length; nothing past the first of them is committed.

One Cutter follows one request. It owns the request's incremental detokenizer and stop checker, so that text, stop
strings and token counts agree: what a client reads is exactly what the committed tokens say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gdn_jax.serving.core.plan import RowCut
from gdn_jax.serving.core.request import FinishReason
from gdn_jax.serving.outputs import Logprob
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
        logprobs: one table per token, when asked for.
        finish_reason: set in the last one.
        stop_reason: the stop string or stop token id that ended it; None for end tokens and length.
    """

    token_ids: list[int] = field(default_factory=list[int])
    text: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list[dict[int, Logprob]])
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Cutter:
    """Cuts the tokens a row emits, and turns those that stand into text."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, end_token_ids: Sequence[int]) -> None:
        """Follow a new request.

        Args:
            params: its stop rules.
            tokenizer: None when no text is wanted or there is no tokenizer.
            end_token_ids: the model's end tokens; not used with `ignore_eos`.
        """
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(end_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._num_output = 0
        wants_text = tokenizer is not None and params.detokenize
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens) if wants_text else None
        )
        self._stop = StopChecker(params.stop, include_stop_string=params.include_stop_str_in_output)

    def cut(self, tokens: Sequence[int]) -> tuple[RowCut, TokenOutput]:
        """Take the tokens a row emitted; return how many stand, and what they add to the answer."""
        output = TokenOutput()
        for token in tokens:
            self._num_output += 1
            output.token_ids.append(token)
            self._end_at(token, output)
            if output.finish_reason is not None:
                break
        if output.finish_reason is not None and not self._stop.stopped:
            output.text += self._flush()
        return RowCut(num_kept=len(output.token_ids), finish=output.finish_reason), output

    def _end_at(self, token: int, output: TokenOutput) -> None:
        may_stop = self._num_output >= self._params.min_tokens
        is_end = may_stop and (token in self._ends or token in self._stop_ids)
        if is_end:
            output.finish_reason = FinishReason.STOP
            output.stop_reason = token if token in self._stop_ids and token not in self._ends else None
        if self._detokenizer is not None and not (is_end and not self._params.include_stop_str_in_output):
            output.text += self._push(self._detokenizer.push([token]), output, may_stop=may_stop)
        if output.finish_reason is None and self._num_output >= self._params.max_tokens:
            output.finish_reason = FinishReason.LENGTH

    def _push(self, text: str, output: TokenOutput, *, may_stop: bool) -> str:
        raise NotImplementedError

    def _flush(self) -> str:
        raise NotImplementedError
