"""Penalties, biases and bad words in NumPy, from the tokens of one sequence: the oracle of `runner/adjust.py`.

One token id after the other, from lists; imports no array library but NumPy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a request asks for, by vLLM's names; bad words as token ids."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()


def adjusted(logits: np.ndarray, wishes: Wishes, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """Return the logits [V] of the token after prompt and output, in float64."""
    result = logits.astype(np.float64)
    for token in range(len(result)):
        if token in prompt or token in output:
            if result[token] > 0:
                result[token] /= wishes.repetition_penalty
            else:
                result[token] *= wishes.repetition_penalty
        result[token] -= wishes.frequency_penalty * list(output).count(token)
        if token in output:
            result[token] -= wishes.presence_penalty
        result[token] += min(max(wishes.logit_bias.get(token, 0.0), -100.0), 100.0)
    for *start, end in wishes.bad_words:
        if list(output)[len(output) - len(start) :] == start and len(start) <= len(output):
            result[end] = -np.inf
    return result


def assert_chosen(
    raw: np.ndarray,
    wishes: Wishes,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    num_tokens: int,
    error: float,
    noise: np.ndarray | None = None,
) -> None:
    """Check each token of an answer: it is the one that its adjusted logits give.

    Args:
        raw: the model's logits [answer, V] before each token.
        wishes: what was asked for.
        prompt: token ids.
        answer: token ids.
        num_tokens: ids from here on have no text.
        error: of a logit.
        noise: what is added to the logits of each place; None: the answer is greedy.
    """
    for place, token in enumerate(answer):
        values = adjusted(raw[place], wishes, prompt, answer[:place])
        values[num_tokens:] = -np.inf
        if noise is not None:
            values = values + noise[place]
        assert values[token] >= values.max() - 2 * error, (place, token)
