"""The Python API on a device that needs no JAX and no model: the tell-tale runner behind the real engine.

The next token is a hash of the prefix, so every answer is known beforehand, whatever the batch and the cache, and a
wrong read fails at once. A test can make rows come out non-finite, and make steps or the rebuilding of pools fail.
"""

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from oracles.tell_tale import TellTaleRunner, next_token

from gdn_jax import LLM, AsyncLLM, SamplingParams
from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import Implementation, KernelChoice
from gdn_jax.serving import async_llm, llm
from gdn_jax.serving.core.limits import Limits
from gdn_jax.serving.core.placement import CacheMode, Placement
from gdn_jax.serving.core.plan import RowPlan, RowResult, StepPlan, StepResult, TokenLogprobs
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.core.scheduler import Scheduler
from gdn_jax.serving.engine import Engine
from gdn_jax.serving.engine_types import EngineRequest
from gdn_jax.serving.runner.memory import MemoryPlan
from gdn_jax.serving.runner.runner import LaunchedStep, RequestSampling, Runner
from gdn_jax.serving.startup import EngineParts
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "tiny-hybrid"
BLOCK = 4
VOCABULARY = 120  # of answers


class QuickRunner(Runner):
    """A runner whose device is a tell-tale one; it is a Runner by name alone, and shares nothing with it.

    Attributes:
        known: how live requests sample.
        is_finite: of a row; every row is by default.
        step_error: raised by the next step.
        reset_error: raised by every reset while it is set.
        before_step: called for every step, when its results are waited for.
    """

    def __init__(self, *, num_drafts: int = 0) -> None:
        self._num_drafts = num_drafts
        self.is_finite: Callable[[RowPlan], bool] = lambda row: True
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.step_error: BaseException | None = None
        self.reset_error: BaseException | None = None
        self.known: dict[RequestId, RequestSampling] = {}
        self.reset()

    def hold(self, step: int) -> threading.Event:
        """Make a step, counted from 0, wait for the event; what is asked for until then comes right after that step.

        Without it a test races with the thread of an engine whose steps take no time.
        """
        steps, go_on = itertools.count(), threading.Event()

        def wait(plan: StepPlan) -> None:
            if next(steps) == step and not go_on.wait(10):
                raise TimeoutError("nobody let the step go on")

        self.before_step = wait
        return go_on

    def reset(self) -> None:
        """Start with nothing on the device."""
        if self.reset_error is not None:
            raise self.reset_error
        self._results: dict[int, tuple[RowResult, ...]] = {}  # of steps not collected, by plan
        self.tell_tale = TellTaleRunner(block_size=BLOCK, vocabulary=VOCABULARY, num_drafts=self._num_drafts)

    @property
    def num_compiled(self) -> int:
        """Return none: nothing is compiled here."""
        return 0

    def add(self, request_id: RequestId, sampling: RequestSampling) -> None:
        """Make a request known."""
        self.known[request_id] = sampling

    def forget(self, request_id: RequestId) -> None:
        """Drop what is known of a request, if anything."""
        self.known.pop(request_id, None)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Run a plan at once: the device waits for nobody."""
        self._results[plan.index] = self.tell_tale.run(plan).rows
        return LaunchedStep(plan=plan, calls=(), scored=())

    def collect(self, step: LaunchedStep) -> StepResult:
        """Say what became of a plan, as the tests arranged it."""
        self.before_step(step.plan)
        if self.step_error is not None:
            error, self.step_error = self.step_error, None
            raise error
        rows = self._results.pop(step.plan.index)
        return StepResult(rows=tuple(self._report(*pair) for pair in zip(step.plan.rows, rows, strict=True)))

    def _report(self, row: RowPlan, result: RowResult) -> RowResult:
        sampling = self.known.get(row.request_id)
        count = sampling.num_logprobs if sampling is not None else None
        reports = [] if count is None else [_logprobs(token, count) for token in result.tokens]
        return result._replace(
            finite=self.is_finite(row), logprobs=tuple(reports), prompt_logprobs=_prompt_logprobs(row, sampling)
        )


def _prompt_logprobs(row: RowPlan, sampling: RequestSampling | None) -> tuple[TokenLogprobs, ...]:
    """Report each prompt token that follows one of a row's."""
    if sampling is None or sampling.scored_prompt is None:
        return ()
    scored = sampling.scored_prompt
    return tuple(_logprobs(token, scored.num_top) for token in scored.token_ids[row.start + 1 : row.end + 1])


def _logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(chosen=-0.5, rank=1, top_ids=(token, 200, 201)[:count], top=(-0.5, -1.0, -2.0)[:count])


def make_parts(
    *,
    lanes: int = 4,
    blocks: int = 200,
    slots: int = 40,
    max_model_len: int = 256,
    num_drafts: int = 0,
    mode: CacheMode = CacheMode.ALL,
    async_scheduling: bool = True,
) -> EngineParts:
    """Compose an engine and what the API reads beside it."""
    config = ModelConfig.from_folder(FOLDER)
    tokenizer = Tokenizer(FOLDER, config.vocab_size, config_eos=config.eos_token_ids)
    limits = Limits(
        num_blocks=blocks,
        num_slots=slots,
        num_lanes=lanes,
        budget=2 * BLOCK,
        max_model_len=max_model_len,
        num_drafts=num_drafts,
    )
    scheduler = Scheduler(limits, Placement(mode=mode, block_size=BLOCK, state_interval=2 * BLOCK))
    return EngineParts(
        engine=Engine(
            scheduler,
            QuickRunner(num_drafts=num_drafts),
            tokenizer=tokenizer,
            end_token_ids=tokenizer.end_token_ids,
            async_scheduling=async_scheduling,
        ),
        model_config=config,
        tokenizer=tokenizer,
        chat_template=ChatTemplate.from_folder(FOLDER),
        defaults=tokenizer.generation_defaults,
        memory=MemoryPlan(
            weight_bytes=1,
            activation_bytes=1,
            block_bytes=1,
            slot_bytes=1,
            lane_bytes=1,
            num_blocks=blocks,
            num_slots=slots,
            max_num_seqs=lanes,
            max_model_len=max_model_len,
            block_size=BLOCK,
        ),
        kernels=KernelChoice(implementation=Implementation.JAX, reason="nothing is computed here"),
    )


def quick_llm(**sizes: int) -> LLM:
    """Start an LLM without a model."""
    with patch.object(llm, "build_engine", lambda config, **options: make_parts(**sizes)):
        return LLM(str(FOLDER), use_tqdm=False)


def quick_async_llm(**sizes: int) -> AsyncLLM:
    """Start an AsyncLLM without a model; inside a running event loop or not."""
    with patch.object(async_llm, "build_engine", lambda config, **options: make_parts(**sizes)):
        return AsyncLLM(str(FOLDER), use_tqdm=False)


def parts_of(engine: Engine) -> tuple[Scheduler, QuickRunner]:
    """Return what an engine is made of."""
    runner = engine._runner
    assert isinstance(runner, QuickRunner)
    return engine._scheduler, runner


def answer(prompt: list[int], count: int) -> list[int]:
    """What a request must get, whatever else runs, if nothing but its length ends it."""
    known = list(prompt)
    while len(known) < len(prompt) + count:
        known.append(next_token(tuple(known), VOCABULARY))
    return known[len(prompt) :]


def lasting(max_tokens: int = 8, **params: Any) -> SamplingParams:
    """Parameters of a request that only its length ends."""
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | params)


def add_request(engine: Engine, request_id: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> None:
    """Queue a request that only its length ends, unless `options` of `EngineRequest` say otherwise."""
    fields = {"params": lasting(max_tokens), "seed": 0, "max_tokens": max_tokens, **options}
    engine.add(EngineRequest(request_id=request_id, prompt=prompt, **fields))


def run_out(engine: Engine) -> dict[str, tuple[list[int], str | None]]:
    """Run until nothing is left, and audit; return each request's tokens from here on and why it ended."""
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str | None] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.output.token_ids)
            ends[output.request_id] = output.output.finish_reason
        audit(engine)
    return {name: (tokens[name], ends[name]) for name in tokens}


def audit(engine: Engine) -> None:
    """Check every owner's books and every published name."""
    scheduler, runner = parts_of(engine)
    scheduler.check()
    runner.tell_tale.audit(scheduler)
