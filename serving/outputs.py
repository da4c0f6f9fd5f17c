"""What comes back from a request: RequestOutput, its completions, and log probabilities. Names are those of vLLM.

Plain values, made once and not changed; who makes them is the engine. Printing one shows its text in full and its long
lists in short.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishName = Literal["stop", "length", "abort", "error"]  # as clients read it; the core has an enum
_SHOWN_IDS = 8
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log probability at one position.

    Attributes:
        logprob: natural logarithm of the probability that the model gave it, before temperature and filters.
        rank: 1 for the likeliest token; equal logits are ranked by token id, so that ranks are distinct.
        decoded_token: its own text; of a token that holds part of a character, the characters it completes after the
            tokens before it. None if text was not asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]  # by token id: the chosen token first, then the likeliest ones in order


def position_logprobs(
    token_id: int,
    logprob: float,
    rank: int,
    top: Sequence[tuple[int, float]],
    decode: Callable[[int], str | None],
) -> PositionLogprobs:
    """Return the report of one position.

    Args:
        token_id: the chosen token; always part of the report, whatever its rank.
        logprob: its log probability.
        rank: its rank, from 1.
        top: (token id, log probability) of the likeliest tokens, likeliest first; may hold the chosen one.
        decode: text of a token at this position. It must not depend on the other alternatives.
    """
    report = {token_id: Logprob(logprob=logprob, rank=rank, decoded_token=decode(token_id))}
    for place, (other, value) in enumerate(top, start=1):
        if other != token_id:
            report[other] = Logprob(logprob=value, rank=place, decoded_token=decode(other))
    return report


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    In a stream of kind DELTA, text, tokens and reports are those since the item before; the rest is as of now.

    Attributes:
        index: its number among the `n` of the request.
        text: the text so far, cut at a stop string; empty if `detokenize` was False.
        token_ids: the tokens so far, with the one that ended the completion.
        cumulative_logprob: sum of the log probabilities of all tokens so far; None unless `logprobs` was asked for.
        logprobs: one report per token of `token_ids`; None unless asked for.
        finish_reason: "stop" at an end token, stop token or stop string, "length" at max_tokens or the end of the
            context, "abort" if cancelled, "error" if a step failed under it; None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for the model's own end token and else.
        num_accepted_drafts: tokens so far that the MTP head had guessed.
        num_rejected_drafts: its guesses so far that were verified and are not among the tokens.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0

    def finished(self) -> bool:
        """Return whether no more tokens will come."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        parts = [f"index={self.index}", f"text={self.text!r}", f"token_ids={_short_ids(self.token_ids)}"]
        if self.cumulative_logprob is not None:
            parts.append(f"cumulative_logprob={self.cumulative_logprob:.4g}")
        if self.logprobs is not None:
            parts.append(f"logprobs=<{len(self.logprobs)} positions>")
        parts += [f"finish_reason={self.finish_reason!r}", f"stop_reason={self.stop_reason!r}"]
        return f"CompletionOutput({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What one prompt came to.

    Attributes:
        request_id: the request's name: its caller's, or a number.
        prompt: the prompt's text; None if token ids were given.
        prompt_token_ids: the prompt's tokens.
        prompt_logprobs: one report per prompt token, None for the first; None unless asked for, and before the first
            token. In a stream of kind DELTA they come once, with that token.
        outputs: the completions in the order of their index; in a stream of kind DELTA those to which something came.
        finished: whether all of them are.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        metrics: times in seconds by name; None if not measured.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    finished: bool
    num_cached_tokens: int = 0
    metrics: dict[str, float] | None = None

    def __repr__(self) -> str:
        parts = [
            f"request_id={self.request_id!r}",
            f"prompt={_short_text(self.prompt)}",
            f"prompt_token_ids={_short_ids(self.prompt_token_ids)}",
            f"outputs={self.outputs!r}",
            f"finished={self.finished}",
            f"num_cached_tokens={self.num_cached_tokens}",
        ]
        if self.prompt_logprobs is not None:
            parts.append(f"prompt_logprobs=<{len(self.prompt_logprobs)} positions>")
        if self.metrics is not None:
            parts.append(f"metrics={self.metrics}")
        return f"RequestOutput({', '.join(parts)})"


def _short_ids(ids: list[int]) -> str:
    if len(ids) <= _SHOWN_IDS:
        return repr(ids)
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}, ... {len(ids)} in all]"


def _short_text(text: str | None) -> str:
    if text is None or len(text) <= _SHOWN_CHARACTERS:
        return repr(text)
    return f"{text[:_SHOWN_CHARACTERS]!r}... {len(text)} characters"
