"""Engine outputs as what is new in them: one Delta per choice that got something.

`wanted` asks the engine for its form of output and `DeltaReader` reads that form; nothing else knows it.
"""

from dataclasses import dataclass

from gdn_jax.serving.outputs import FinishReason, PositionLogprobs, RequestOutput
from gdn_jax.serving.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class Delta:
    """What one step gave one choice.

    Attributes:
        choice: its index in the answer.
        text: new characters.
        token_ids: new tokens.
        logprobs: a report for each; None unless asked for.
        finish_reason: None while it goes on.
        stop_reason: the stop string or token that ended it, if one did.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


def wanted(params: SamplingParams) -> SamplingParams:
    """Return parameters that make the engine report in the form that `DeltaReader` reads."""
    return params


class DeltaReader:
    """Reads the outputs of one prompt, each of which holds all there is so far."""

    def __init__(self, num_choices: int, first_choice: int) -> None:
        """Read a prompt's choices, numbered from `first_choice`."""
        self._first = first_choice
        self._seen = [(0, 0)] * num_choices  # characters and tokens of each
        self._ended = [False] * num_choices

    def read(self, output: RequestOutput) -> list[Delta]:
        """Return what is new."""
        deltas: list[Delta] = []
        for completion in output.outputs:
            index, tokens = completion.index, completion.token_ids
            num_characters, num_tokens = self._seen[index]
            ends = completion.finish_reason is not None
            if self._ended[index] or (len(tokens) == num_tokens and not ends):
                continue
            self._seen[index], self._ended[index] = (len(completion.text), len(tokens)), ends
            deltas.append(
                Delta(
                    self._first + index,
                    completion.text[num_characters:],
                    tokens[num_tokens:],
                    None if completion.logprobs is None else completion.logprobs[num_tokens:],
                    completion.finish_reason,
                    completion.stop_reason,
                )
            )
        return deltas
