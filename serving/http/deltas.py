"""Engine outputs as what is new in them: one Delta per choice that got something.

`wanted` asks the engine for a form of output and `deltas_of` reads that form; nothing else knows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gdn_jax.serving.outputs import PositionLogprobs, RequestOutput
from gdn_jax.serving.sampling_params import RequestOutputKind, SamplingParams


@dataclass(slots=True, eq=False)
class Delta:
    """What one step gave one choice, or what stands before all that it gets.

    Attributes:
        choice: its index in the answer.
        text: new characters.
        token_ids: new tokens.
        logprobs: a report for each, None for the first one of a prompt; None unless asked for.
        finish_reason: None while it goes on.
        stop_reason: the stop string or token that ended it, if one did.
        num_accepted: drafts among the choice's tokens so far.
        num_rejected: drafts so far that were verified and are not among them.
        prompt_logprobs: reports of the prompt's tokens, where they are a field of their own.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: Sequence[PositionLogprobs | None] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_accepted: int = 0
    num_rejected: int = 0
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None


def wanted(params: SamplingParams) -> SamplingParams:
    """Return parameters that make each output of the engine hold what is new, and no more."""
    return replace(params, output_kind=RequestOutputKind.DELTA)


def deltas_of(output: RequestOutput, first_choice: int) -> list[Delta]:
    """Return what is new for the choices of one prompt, which are numbered from `first_choice`."""
    return [
        Delta(
            first_choice + completion.index,
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.stop_reason,
            completion.num_accepted_drafts,
            completion.num_rejected_drafts,
        )
        for completion in output.outputs
    ]
