"""Small engines for tests: one set of compiled steps for all of them, and nothing clean in their pools.

Whatever pool sizes a test asks for, the device's pools have one shape, so that a step is compiled once for all engines
of a model; the books alone keep to the sizes. Prefill calls have one number of rows for the same reason. Weights and
chat templates are read once. Pools start full of NaN: what nobody wrote must never show.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from oracles.numpy_model import OracleModel

from gdn_jax import LLM, RequestOutput, SamplingParams
from gdn_jax.model import LanguageModel
from gdn_jax.serving import startup
from gdn_jax.serving.config import EngineConfig
from gdn_jax.serving.core.plan import StepPlan
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.engine_types import EngineOutput, EngineStats
from gdn_jax.serving.runner import runner as runner_module
from gdn_jax.serving.runner.buckets import Buckets, make_buckets
from gdn_jax.serving.runner.pools import PoolSizes
from gdn_jax.serving.runner.runner import LaunchedStep, Runner
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.state import KVPages, ModelState

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
_LOAD, _MODELS = startup._load, dict[str, LanguageModel]()
LOGPROB_ERROR = 1e-4  # twenty times the float32 error seen on these models


def one_shape(**sizes: Any) -> PoolSizes:
    """Pool sizes of the device whatever the books say."""
    return replace(PoolSizes(**sizes), num_blocks=BLOCKS + 1, num_slots=SLOTS + 1, num_lanes=LANES)


def one_row_count(**sizes: Any) -> Buckets:
    """Buckets of the steps: those of an engine, but that every prefill call is padded to as many rows as lanes."""
    buckets = make_buckets(**sizes)
    return replace(buckets, prefill=tuple((tokens, LANES) for tokens in sorted({size for size, _ in buckets.prefill})))


def shared_model(config: EngineConfig, *choices: Any, show_progress: bool) -> LanguageModel:
    """Load a model as start-up does, once for all engines: steps do not change it."""
    key = repr((config.model, config.load_format, config.seed, *choices))
    if key not in _MODELS:
        _MODELS[key] = _LOAD(config, *choices, show_progress=show_progress)
    return _MODELS[key]


@cache
def shared_template(folder: Path) -> ChatTemplate:
    """Compile a folder's chat templates as start-up does, once for all engines: nothing changes them."""
    return ChatTemplate.from_folder(folder)


def make_llm(
    folder: str | Path = TINY, *, choose_buckets: Callable[..., Buckets] = one_row_count, **settings: Any
) -> LLM:
    """Start an engine on pools full of NaN; settings as for LLM, with small defaults."""
    with (
        patch.object(startup, "PoolSizes", one_shape),
        patch.object(startup, "make_buckets", choose_buckets),
        patch.object(startup, "_load", shared_model),
        patch.object(startup, "ChatTemplate", SimpleNamespace(from_folder=shared_template)),
    ):
        llm = LLM(str(folder), **SETTINGS | settings)
    poison(llm)
    return llm


def runner_of(llm: LLM) -> Runner:
    return llm._engine._runner


def scheduler_of(llm: LLM) -> Scheduler:
    return llm._engine._scheduler


def poison(llm: LLM) -> None:
    """Fill every pool with NaN, as if no slot or page had ever been written."""
    poison_all(runner_of(llm))


def poison_all(runner: Runner) -> None:
    """Fill every array of the device state with NaN, and those of integers with an id that no model has."""

    def fill(array: jax.Array) -> jax.Array:
        return jnp.full_like(array, jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else 2**30)

    runner._device = jax.tree.map(fill, runner.device)


def put_state(runner: Runner, state: ModelState) -> None:
    """Replace the model's part of the device state."""
    runner._device = replace(runner.device, model=state)


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


def floor(count: int) -> int:
    """Return the last boundary at or before a token count."""
    return count // 64 * 64


def step(llm: LLM, times: int = 1) -> None:
    """Run steps for whoever is live, as many as there is work for."""
    for _ in range(times):
        if llm._engine.has_work:
            llm._step()


def record_plans(llm: LLM) -> list[StepPlan]:
    """Keep every plan that runs from now on."""
    plans: list[StepPlan] = []
    runner = runner_of(llm)
    launch = runner.launch

    def keep(plan: StepPlan) -> LaunchedStep:
        plans.append(plan)
        return launch(plan)

    runner.launch = keep  # type: ignore[method-assign]
    return plans


def record_ends(llm: LLM) -> list[str]:
    """Keep the ids of requests in the order they end in."""
    ends: list[str] = []
    engine = llm._engine
    real = engine.step

    def keep() -> list[EngineOutput]:
        outputs = real()
        ends.extend(output.request_id for output in outputs if output.output.finish_reason is not None)
        return outputs

    engine.step = keep  # type: ignore[method-assign]
    return ends


def fail_once(set_attribute: Callable[[object, str, object], None], name: str, error: BaseException) -> None:
    """Let the next call of a step function raise; `set_attribute` is that of a monkeypatch."""
    real = getattr(runner_module, name)

    def fails(*args: Any) -> Any:
        set_attribute(runner_module, name, real)
        raise error

    set_attribute(runner_module, name, fails)


def poison_what_nobody_owns(llm: LLM) -> None:
    """Fill with NaN every slot and page that is neither held nor published."""
    holdings, runner = scheduler_of(llm).holdings, runner_of(llm)
    running = scheduler_of(llm).running()
    slots = {*holdings.checkpoints.names().values(), *(request.slot for request in running)}
    pages = {*holdings.blocks.names().values(), *(block for request in running for block in request.blocks)}

    def wipe(array: Any, keep: set[Any]) -> Any:
        free = [index for index in range(array.shape[0]) if index not in keep]
        return array.at[jnp.asarray(free)].set(jnp.nan)

    layers = tuple(
        KVPages(k=wipe(layer.k, pages), v=wipe(layer.v, pages))
        if isinstance(layer, KVPages)
        else replace(layer, recurrent=wipe(layer.recurrent, slots), conv=wipe(layer.conv, slots))
        for layer in runner.state.layers
    )
    mtp = runner.state.mtp
    if mtp is not None:
        mtp = KVPages(k=wipe(mtp.k, pages), v=wipe(mtp.v, pages))
    put_state(runner, replace(runner.state, layers=layers, hidden=wipe(runner.state.hidden, slots), mtp=mtp))


class Oracle:
    """The float64 model of a folder. It never chooses an id without text, as the engine never does."""

    def __init__(self, folder: str | Path, num_tokens: int) -> None:
        self.model = OracleModel(folder)
        self._num_tokens = num_tokens
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """Return the log probabilities [answer, vocabulary] at the position of each token of an answer."""
        ids = (*prompt, *answer)
        if ids not in self._known:
            logits = self.model.logits(ids[:-1])
            self._known[ids] = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        return self._known[ids][len(prompt) - 1 :]

    def check(self, prompt: Sequence[int], answer: Sequence[int], reported: Sequence[float]) -> None:
        """Compare a greedy answer: each token must be the likeliest after those before it.

        Its reported log probability must be right too, which shows a state that is only nearly right.
        """
        rows = self.logprobs(prompt, answer)
        chosen = rows[np.arange(len(answer)), np.asarray(answer)]
        np.testing.assert_allclose(reported, chosen, atol=LOGPROB_ERROR, rtol=0)
        likeliest = rows[:, : self._num_tokens].max(axis=1)
        np.testing.assert_allclose(chosen, likeliest, atol=2 * LOGPROB_ERROR, rtol=0)


@cache
def tiny_oracle() -> Oracle:
    """The oracle of the tiny golden model."""
    return Oracle(TINY, 318)


def assert_right(outputs: Sequence[RequestOutput], oracle: Oracle) -> None:
    """Compare every completion, which only its length ended, with the oracle."""
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "length"
            reports = zip(completion.token_ids, completion.logprobs or [], strict=True)
            oracle.check(
                output.prompt_token_ids, completion.token_ids, [report[token].logprob for token, report in reports]
            )
