"""Sampled tokens follow the distribution that the parameters name, also where most of them were drafted.

A model of eight live tokens, whose next-token distributions are known. Chi-square over all transitions of many
completions; seeds are fixed, so a test passes or fails for good.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaincc
from oracles.engine_rig import ask
from oracles.markov import ALPHABET, NUM_CLASSES, Markov, class_of, prompt_before, write_markov, wrong_after
from oracles.speculation_rig import Window, make_spec_llm, record_windows

from gdn_jax import SamplingParams

NUM_LIVE = 8
DEPTH = 3
SIGNIFICANT = 1e-3  # a sound sampler falls below this once in a thousand choices of seeds
NUM_COMPLETIONS, NUM_TOKENS = 64, 16  # of each of two prompts
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Markov:
    """A head that is right after five of eight tokens, and draws from another distribution after the others."""
    table = np.random.RandomState(4).uniform(0.0, 5.0, (NUM_CLASSES, NUM_CLASSES))
    table[:, NUM_LIVE:] = -30.0
    return write_markov(tmp_path_factory.mktemp("eight"), head=wrong_after(1, 4, 6), table=table)


def distribution(logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """Return the probabilities of tokens: temperature, then what top-k, top-p and min-p keep, in this order."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits[order] - logits.max()) / temperature)
    if top_k:
        p[top_k:] = 0.0
    p /= p.sum()
    p[np.concatenate([[0.0], np.cumsum(p)[:-1]]) >= top_p] = 0.0
    p[p < min_p * p[0]] = 0.0
    result = np.zeros_like(p)
    result[order] = p / p.sum()
    return result


def counts(texts: Sequence[Sequence[int]]) -> np.ndarray:
    """Return how often each class followed each [classes, classes]."""
    found = np.zeros((NUM_CLASSES, NUM_CLASSES))
    for text in texts:
        classes = [class_of(token) for token in text]
        np.add.at(found, (classes[:-1], classes[1:]), 1)
    return found


def p_value(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the probability of transitions at least so unlike the expected distributions [classes, classes].

    Cells that expect fewer than five are taken together, row by row.
    """
    square, freedom = 0.0, 0
    for seen, p in zip(found, expected, strict=True):
        wanted = p * seen.sum()
        large = wanted >= 5
        cells = [*zip(seen[large], wanted[large], strict=True)]
        if (rest := wanted[~large].sum()) >= 5:
            cells.append((seen[~large].sum(), rest))
        square += sum((one - other) ** 2 / other for one, other in cells)
        freedom += max(len(cells) - 1, 0)
    assert freedom > 10
    return float(gammaincc(jnp.float32(freedom / 2), jnp.float32(square / 2)))


def texts_of(model: Markov, params: dict[str, Any], depth: int) -> tuple[list[list[int]], list[Window]]:
    """Sample many completions of two prompts; return them with the token before each, and the rows behind them."""
    llm = make_spec_llm(model.folder, depth, compiled=DEPTH)
    windows = record_windows(llm)
    # Of equal seeds the noise would be equal too, and the completions of one prompt no witnesses beside the other's.
    asked = [
        SamplingParams(n=NUM_COMPLETIONS, seed=seed, max_tokens=NUM_TOKENS, detokenize=False, **params)
        for seed in (7, 8)
    ]
    outputs = ask(llm, [prompt_before(1, 3), prompt_before(5, 3)], *asked)
    texts = [[output.prompt_token_ids[-1], *one.token_ids] for output in outputs for one in output.outputs]
    assert len(texts) == 2 * NUM_COMPLETIONS
    return texts, windows


@pytest.mark.parametrize("params", PARAMETERS, ids=lambda params: "-".join(f"{k}={v}" for k, v in params.items()))
def test_tokens_follow_their_distribution_whether_drafted_or_not(model: Markov, params: dict[str, Any]) -> None:
    expected = np.stack([distribution(row, **params) for row in model.table])
    texts, windows = texts_of(model, params, DEPTH)
    found = counts(texts)
    assert not found[expected == 0].any()
    assert p_value(found, expected) > SIGNIFICANT
    # Drafts that stood, and tokens that stand in a rejected one's place, are each drawn as all others are.
    accepted = sum(window.num_accepted for window in windows)
    assert 0.2 < accepted / sum(window.num_drafts for window in windows) < 0.9
    first = counts([(window.known[-1], window.emitted[0]) for window in windows])
    assert p_value(first, expected) > SIGNIFICANT


def test_plain_decode_gives_the_same_tokens_and_the_measure_sees_a_sampler_that_is_slightly_off(model: Markov) -> None:
    texts, _ = texts_of(model, {"temperature": 1.0}, DEPTH)
    assert texts_of(model, {"temperature": 1.0}, 0)[0] == texts
    right, warmer = (np.stack([distribution(row, temperature=t) for row in model.table]) for t in (1.0, 1.4))
    assert p_value(counts(texts), right) > SIGNIFICANT
    assert p_value(counts(texts), warmer) < 1e-5
    assert ALPHABET[:NUM_LIVE] == tuple(sorted({token for text in texts for token in text[1:]}))
