"""Small engines for tests: one set of compiled steps for all of them, and nothing clean in their pools.

Whatever pool sizes a test asks for, the device's pools have one shape, so that a step is compiled once for all engines
of a model; the books alone keep to the sizes. Pools start full of NaN: what nobody wrote must never show.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from oracles.numpy_model import OracleModel

from gdn_jax import LLM, RequestOutput, SamplingParams
from gdn_jax.serving import startup
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.engine import EngineStats
from gdn_jax.serving.runner.runner import PoolSizes, Runner

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TINY = GOLDEN / "tiny-hybrid"
BLOCKS, SLOTS, LANES = 48, 32, 4  # on the device, the null block and slot not counted
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": LANES,
    "max_num_batched_tokens": 256,
    "num_blocks": BLOCKS,
    "num_state_slots": SLOTS,
    "warm_up": False,
    "use_tqdm": False,
}
MIN_GAP = 0.01  # float32 logits are good to about 1e-4


def one_shape(**sizes: Any) -> PoolSizes:
    """Pool sizes of the device whatever the books say."""
    return replace(PoolSizes(**sizes), num_blocks=BLOCKS + 1, num_slots=SLOTS + 1, num_lanes=LANES)


def make_llm(folder: str | Path = TINY, **settings: Any) -> LLM:
    """Start an engine on pools full of NaN; settings as for LLM, with small defaults."""
    with patch.object(startup, "PoolSizes", one_shape):
        llm = LLM(str(folder), **SETTINGS | settings)
    poison(llm)
    return llm


def runner_of(llm: LLM) -> Runner:
    return llm._engine._runner


def scheduler_of(llm: LLM) -> Scheduler:
    return llm._engine._scheduler


def poison(llm: LLM) -> None:
    """Fill every pool with NaN, as if no slot or page had ever been written."""
    runner = runner_of(llm)
    runner._state = jax.tree.map(lambda array: jnp.full_like(array, jnp.nan), runner._state)


def greedy(max_tokens: int = 8, **params: Any) -> SamplingParams:
    """Greedy parameters that only a length ends, with log probabilities."""
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0} | params)


def ask(llm: LLM, prompts: Sequence[Sequence[int]], *params: SamplingParams, **options: Any) -> list[RequestOutput]:
    """Complete prompts, with one SamplingParams for all or one for each."""
    chosen = params[0] if len(params) == 1 else list(params)
    return llm.generate([list(prompt) for prompt in prompts], chosen, use_tqdm=False, **options)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


def idle(stats: EngineStats) -> bool:
    """Whether nothing is held and nobody waits."""
    return not (stats.blocks_used or stats.slots_used or stats.waiting or stats.running)


def random_ids(seed: int, length: int, below: int = 300) -> list[int]:
    """Token ids that have a text."""
    return np.random.RandomState(seed).randint(0, below, length).tolist()


class Oracle:
    """The float64 model of a folder. It never chooses an id without text, as the engine never does."""

    def __init__(self, folder: str | Path, num_tokens: int) -> None:
        self.model = OracleModel(folder)
        self._num_tokens = num_tokens
        self._known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy continuation, end tokens ignored; refuses prompts that float32 might decide otherwise."""
        return self._complete(prompt, count)[0][:count]

    def logprobs(self, prompt: Sequence[int], count: int) -> list[float]:
        """Return the log probabilities of the tokens of `greedy`."""
        return self._complete(prompt, count)[1][:count]

    def lively(self, length: int, count: int, seed: int = 0) -> list[int]:
        """Return a random prompt whose continuation is decided clearly and does not fall into a loop at once."""
        while True:
            prompt = random_ids(1000 * seed + length, length)
            try:
                if len(set(self.greedy(prompt, count))) > count // 2:
                    return prompt
            except NearTieError:
                pass
            seed += 100

    def _complete(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        known = self._known.get(tuple(prompt), ([], []))
        if len(known[0]) < count:
            known = self._known[tuple(prompt)] = self._continue(prompt, count)
        return known

    def _continue(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        logprobs: list[float] = []
        span, memory = list(prompt), self.model.empty_cache()
        while len(tokens) < count:
            hidden, memory = self.model.advance(span, memory)
            logits = hidden[-1] @ self.model.head.T
            second, first = np.sort(logits[: self._num_tokens])[-2:]
            if first - second < MIN_GAP:
                raise NearTieError(f"token {len(tokens)} of this prompt is a near tie: choose another seed")
            tokens.append(int(logits[: self._num_tokens].argmax()))
            logprobs.append(float(first - logits.max() - np.log(np.exp(logits - logits.max()).sum())))
            span = tokens[-1:]
        return tokens, logprobs


class NearTieError(ValueError):
    """Two tokens are nearly equally likely, so that rounding decides."""


@cache
def tiny_oracle() -> Oracle:
    """The oracle of the tiny golden model."""
    return Oracle(TINY, 318)


def assert_right(outputs: Sequence[RequestOutput], oracle: Oracle) -> None:
    """Compare every completion with the oracle: tokens, and log probabilities, which show a state that is nearly right.

    The tolerance is twenty times the float32 error seen on these models.
    """
    for output in outputs:
        for completion in output.outputs:
            count = len(completion.token_ids)
            assert completion.finish_reason == "length"
            assert completion.token_ids == oracle.greedy(output.prompt_token_ids, count)
            reports = zip(completion.token_ids, completion.logprobs or [], strict=True)
            found = [report[token].logprob for token, report in reports]
            np.testing.assert_allclose(found, oracle.logprobs(output.prompt_token_ids, count), atol=1e-4)
