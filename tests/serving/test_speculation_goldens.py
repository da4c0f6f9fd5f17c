"""Speculative rounds of the engine against recorded ones: tokens, every draft, and how many of them stood.

The reference folders, made with the published implementation, lie beside the checkout; those tests skip where they are
absent. The project's own folders under tests/golden are always compared.
"""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from oracles.engine_rig import GOLDEN, ask, greedy, make_llm, runner_of
from oracles.speculation_rig import one_bucket
from safetensors.numpy import load_file

from gdn_jax import LLM
from gdn_jax.model import LanguageModel
from gdn_jax.serving import startup
from gdn_jax.serving.core.plan import Phase, StepPlan, StepResult
from gdn_jax.serving.runner.runner import LaunchedStep, Runner

REFERENCE = ("tiny-next-dense", "tiny-next-moe", "tiny-q35-dense", "tiny-q35-moe", "tiny-q35-moe-fp8")
NUM_TOKENS = 32
MOST_DRAFTS = 3


def any_token(model: LanguageModel, *parts: Any, num_valid_tokens: int, **settings: Any) -> Runner:
    """Make a runner that may choose ids without text too, as the recorded rounds do."""
    assert num_valid_tokens < model.config.vocab_size
    return Runner(model, *parts, num_valid_tokens=model.config.vocab_size, **settings)


@cache
def make(folder: Path) -> LLM:
    """Start an engine; it is used for both prompts and every number of drafts, since its steps take long to compile."""
    with patch.object(startup, "Runner", any_token):
        settings = {"max_num_batched_tokens": 128, "speculative_tokens": MOST_DRAFTS}
        return make_llm(folder, choose_buckets=one_bucket, **settings)


class Rounds:
    """Keeps the drafts at hand before each verify row, and how many of them stood; lets rows verify `depth` at most."""

    def __init__(self, llm: LLM, depth: int) -> None:
        self.drafts: list[list[int]] = []
        self.accepted: list[int] = []
        runner = runner_of(llm)
        launch, collect = (getattr(type(runner), name).__get__(runner) for name in ("launch", "collect"))

        def keep(plan: StepPlan) -> LaunchedStep:
            (row,) = plan.rows
            if row.phase is Phase.VERIFY:
                self.drafts.append(np.asarray(runner.device.drafts)[row.lane, :depth].tolist())
            return launch(plan)

        def count(step: LaunchedStep) -> StepResult:
            (found,) = collect(step).rows
            if step.plan.rows[0].phase is Phase.VERIFY:
                self.accepted.append(len(found.tokens) - 1)
            return StepResult(rows=(found._replace(num_drafts=min(found.num_drafts, depth)),))

        runner.launch, runner.collect = keep, count  # type: ignore[method-assign]


def check(folder: Path, depth: int, length: int) -> None:
    """Compare a recorded prompt's rounds; the recorded last one may run past the tokens asked for, the engine's not."""
    want = load_file(folder / "golden.safetensors")
    llm = make(folder)
    rounds = Rounds(llm, depth)
    prompt = want[f"greedy{length}.prompt"].tolist()
    llm.reset_prefix_cache()
    (output,) = ask(llm, [prompt], greedy(NUM_TOKENS, detokenize=False))
    assert output.outputs[0].token_ids == want[f"greedy{length}.tokens"].tolist()
    drafts, accepted = (want[f"spec{length}.k{depth}.{name}"].tolist() for name in ("drafts", "accepted"))
    room, expected = NUM_TOKENS - 2, []  # for drafts, after the prompt's own token and beside the step's
    for stood in accepted:
        if room > 0:  # else the last row decodes plainly
            expected.append(min(stood, room))
        room -= 1 + stood
    assert rounds.accepted == expected
    assert rounds.drafts == drafts[: len(expected)]
    assert sum(expected) > 0
    (warm,) = ask(llm, [prompt], greedy(NUM_TOKENS, detokenize=False))
    assert warm.num_cached_tokens == (length - 1) // 64 * 64
    assert warm.outputs[0].token_ids == output.outputs[0].token_ids
    assert rounds.accepted == 2 * expected
    assert rounds.drafts == 2 * drafts[: len(expected)]


@pytest.mark.parametrize("length", [17, 70])
@pytest.mark.parametrize(("name", "depth"), [*((name, 3) for name in REFERENCE), ("tiny-q35-moe-fp8", 1)])
def test_the_rounds_of_the_reference_are_repeated(golden_folder: Path, name: str, depth: int, length: int) -> None:
    check(golden_folder / name, depth, length)


@pytest.mark.parametrize("length", [17, 70])
@pytest.mark.parametrize(("name", "depth"), [("tiny-next-moe", 1), ("tiny-hybrid", 3)])
def test_our_own_rounds_are_repeated(name: str, depth: int, length: int) -> None:
    check(GOLDEN / name, depth, length)
