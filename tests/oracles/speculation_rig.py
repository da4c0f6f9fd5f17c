"""Engines that speculate, and what their verify rows did; small models on which every draft is known or can be forced.

All engines made here run one prefill and one advance shape per number of drafts that their steps are compiled for,
whatever the test asks for, and all models have the same sizes. A step costs as much time to compile as hundreds of
thousands of tokens take to run, so most tests have one such number, and cut drafts to fewer on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from oracles.checkpoints import write_checkpoint
from oracles.engine_rig import LANES, LOGPROB_ERROR, Oracle, make_llm, runner_of, scheduler_of
from oracles.markov import NUM_TOKENS, SIZES

from gdn_jax import LLM, RequestOutput
from gdn_jax.serving.core.plan import Phase, RowPlan, StepPlan, StepResult
from gdn_jax.serving.runner.buckets import Buckets
from gdn_jax.serving.runner.runner import LaunchedStep

DEPTHS = (1, 2, 3, 4)  # drafts per step
_CLEAR = 1e-3  # a gap between first and second choice that float32 sees as float64 does
_SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 64, "state_interval": 64}


def one_bucket(*, budget: int, max_model_len: int, block_size: int, **sizes: Any) -> Buckets:
    """One size per phase, with room for every engine made here."""
    assert budget <= 2 * block_size
    assert max_model_len <= 8 * block_size
    return Buckets(prefill=((2 * block_size, LANES),), advance_rows=(LANES,), table_blocks=(8,))


def make_spec_llm(folder: str | Path, depth: int, *, compiled: int | None = None, **settings: Any) -> LLM:
    """Start an engine on pools full of NaN.

    Args:
        folder: of the model.
        depth: drafts per step.
        compiled: drafts that the steps make; all but the first `depth` are cut on the host. None: `depth`.
        settings: as for LLM.
    """
    made = depth if compiled is None else compiled
    llm = make_llm(folder, choose_buckets=one_bucket, **_SETTINGS | {"speculative_tokens": made} | settings)
    if depth < made:
        limit_drafts(llm, lambda: depth)
    return llm


class Window(NamedTuple):
    """One decode or verify row: what was known before it, and what it gave."""

    request_id: str
    known: tuple[int, ...]  # prompt and output; the last one is pending
    num_drafts: int  # verified
    emitted: tuple[int, ...]  # accepted drafts and one more, before any cut
    num_next: int  # drafts made for the next step

    @property
    def start(self) -> int:
        """Return the position of the pending token."""
        return len(self.known) - 1

    @property
    def num_accepted(self) -> int:
        """Return how many drafts stood."""
        return max(len(self.emitted) - 1, 0)


def record_windows(llm: LLM) -> list[Window]:
    """Keep what every decode and verify row does from now on."""
    windows: list[Window] = []
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    collect = runner.collect

    def keep(step: LaunchedStep) -> StepResult:
        known = [tuple(scheduler.get(row.request_id).tokens) for row in step.plan.rows]
        result = collect(step)
        for row, before, after in zip(step.plan.rows, known, result.rows, strict=True):
            if row.phase is not Phase.PREFILL and row.emits:
                windows.append(Window(row.request_id, before, row.num_drafts, after.tokens, after.num_drafts))
        return result

    runner.collect = keep  # type: ignore[method-assign]
    return windows


def accepted(windows: Sequence[Window]) -> list[int]:
    """Return how many drafts stood in each row that verified some."""
    return [window.num_accepted for window in windows if window.num_drafts]


def limit_drafts(llm: LLM, limit: Callable[[], int]) -> None:
    """Cut the drafts of every row to what `limit` says, as if the head had made no more; it is asked row by row."""
    runner = runner_of(llm)
    collect = runner.collect

    def cut(step: LaunchedStep) -> StepResult:
        rows = collect(step).rows
        return StepResult(rows=tuple(row._replace(num_drafts=min(row.num_drafts, limit())) for row in rows))

    runner.collect = cut  # type: ignore[method-assign]


class DraftOracle(Oracle):
    """The float64 model of a folder with its MTP head."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder, NUM_TOKENS)
        self.folder = Path(folder)
        self._entries: dict[tuple[int, ...], tuple[np.ndarray, Any]] = {}

    def _entries_of(self, text: tuple[int, ...]) -> tuple[np.ndarray, Any]:
        """Return the head's output at every true entry of a text, and its memory of them."""
        if text not in self._entries:
            hidden = self.model.hidden(text[:-1])
            self._entries[text] = self.model.advance_mtp(hidden, text[1:], self.model.empty_attention())
        return self._entries[text]

    def drafts(self, text: tuple[int, ...], num_known: int, count: int) -> tuple[list[int], list[float]]:
        """Return greedy drafts after the first `num_known` tokens of a text, and how clear each choice is."""
        output, memory = self._entries_of(text)
        last, own = output[num_known - 2 : num_known - 1], tuple(array[:, : num_known - 1] for array in memory)
        drafts: list[int] = []
        gaps: list[float] = []
        while True:
            logits = (last[0] @ self.model.head.T)[:NUM_TOKENS]
            second, first = np.partition(logits, -2)[-2:]
            drafts.append(int(logits.argmax()))
            gaps.append(float(first - second))
            if len(drafts) == count:
                return drafts, gaps
            last, own = self.model.advance_mtp(last, drafts[-1:], own)

    def check_drafts(self, windows: Sequence[Window]) -> int:
        """Compare greedy rows with the drafts that the float64 head makes; return how many drafts were compared.

        What a row emitted tells which of its drafts stood, and that the next one did not.
        """
        longest: dict[str, tuple[int, ...]] = {}
        for window in windows:
            longest[window.request_id] = window.known  # a request's tokens only ever grow
        num_compared = 0
        for window in windows:
            if not window.num_drafts:
                continue
            drafts, gaps = self.drafts(longest[window.request_id], len(window.known), window.num_drafts)
            for index, (draft, gap) in enumerate(zip(drafts, gaps, strict=True)):
                if gap < _CLEAR or index > window.num_accepted:
                    break
                stood = index < window.num_accepted
                assert (draft == window.emitted[index]) == stood, (window, drafts, gaps)
                num_compared += 1
        return num_compared


def write_little(folder: Path) -> DraftOracle:
    """Write a random model of the sizes of the Markov ones: here states matter, and drafts are right now and then."""
    return DraftOracle(write_checkpoint(folder, "q35-dense", 3, readable=True, **SIZES))


def assert_same_answers(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Compare all that clients see but what depends on the cache; log probabilities within float32's error."""
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt_token_ids, one.finished) == (other.prompt_token_ids, other.finished)
        for ours, theirs in zip(one.outputs, other.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert (ours.index, ours.text) == (theirs.index, theirs.text)
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            if ours.logprobs is None or theirs.logprobs is None:
                continue
            assert len(ours.logprobs) == len(ours.token_ids)
            for report, reference in zip(ours.logprobs, theirs.logprobs, strict=True):
                assert {token: entry.rank for token, entry in report.items()} == {
                    token: entry.rank for token, entry in reference.items()
                }
                for token, entry in report.items():
                    assert abs(entry.logprob - reference[token].logprob) < LOGPROB_ERROR
                    assert entry.decoded_token == reference[token].decoded_token
            assert ours.cumulative_logprob is not None
            total = sum(report[token].logprob for token, report in zip(ours.token_ids, ours.logprobs, strict=True))
            assert abs(ours.cumulative_logprob - total) < 1e-6 * (1 + abs(total))


def force_drafts(llm: LLM, texts: Sequence[Sequence[int]], num_right: Callable[[RowPlan], int]) -> None:
    """Put drafts of our own in place of those that rows are about to verify.

    Args:
        llm: of any model.
        texts: prompts with their greedy answers, which must reach a window past the end of what is asked for.
        num_right: how many leading drafts of a row are to be right; the one after them is wrong.
    """
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    launch = runner.launch

    def drafts_for(row: RowPlan) -> list[int]:
        known = scheduler.get(row.request_id).tokens
        (text,) = {tuple(text[: row.end]) for text in texts if list(text[: len(known)]) == list(known)}
        right = text[len(known) : row.end]
        return [token if index < num_right(row) else (token + 1) % 256 for index, token in enumerate(right)]

    def forced(plan: StepPlan) -> LaunchedStep:
        drafts = np.array(runner.device.drafts)
        for row in plan.rows:
            if row.num_drafts:
                drafts[row.lane, : row.num_drafts] = drafts_for(row)
        runner._device = replace(runner.device, drafts=jnp.asarray(drafts))
        return launch(plan)

    runner.launch = forced  # type: ignore[method-assign]
