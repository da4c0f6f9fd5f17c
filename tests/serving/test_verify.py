"""A verify row on the device: what it emits, keeps and drafts, whatever drafts it is given."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.runner_rig import SIZES, blocks, make_runner, row, run, small_config

from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.model import LanguageModel, abstract_model
from gdn_jax.serving.core.plan import Phase, RowPlan, RowResult
from gdn_jax.serving.runner.runner import Runner
from gdn_jax.weights import dummy_weights

NUM_DRAFTS = 3
DRAFTING = replace(SIZES, window=1 + NUM_DRAFTS)
PROMPT = tuple(range(10, 30))


def model_with_head() -> LanguageModel:
    config = replace(small_config(), num_mtp_layers=1)
    return dummy_weights(abstract_model(config, dtype=jnp.dtype("float32"), implementation=Implementation.JAX))


@pytest.fixture(scope="module")
def chain() -> list[int]:
    """The pending token after the prompt and the tokens after that, as plain decoding finds them."""
    runner = make_runner(model_with_head(), sizes=DRAFTING)
    tokens = list(prefill(runner).tokens)
    while len(tokens) < 6:
        tokens += verify(runner, tokens, num_drafts=0).tokens
    assert len(set(tokens)) == 6, "another seed would give distinct tokens"
    return tokens


def prefill(runner: Runner, lane: int = 0) -> RowResult:
    """Run the prompt on a lane."""
    slots = {"write_anchor": lane + 1, "new_blocks": blocks(2 * lane + 1, 2 * lane + 2)}
    return run(runner, row(f"r{lane}", lane=lane, tokens=PROMPT, emits=True, **slots))[0]


def verifying(known: Sequence[int], *, lane: int = 0, num_drafts: int = NUM_DRAFTS, num_replay: int = 0) -> RowPlan:
    """A row whose pending token is the last known one; all known ones follow the prompt."""
    anchors = {"read_anchor": lane + 1, "write_anchor": lane + 1, "table_start": 2}
    start = len(PROMPT) + len(known) - 1
    tokens = (known[-1],)
    plan = {"num_drafts": num_drafts, "num_replay": num_replay, "emits": True, "start": start, "tokens": tokens}
    return row(f"r{lane}", phase=Phase.VERIFY, lane=lane, **anchors, **plan)


def verify(runner: Runner, known: Sequence[int], *, num_drafts: int = NUM_DRAFTS) -> RowResult:
    """Run lane 0 one token further; the row replays the one before."""
    return run(runner, verifying(known, num_drafts=num_drafts, num_replay=min(len(known) - 1, 1)))[0]


def give_drafts(runner: Runner, *drafts: Sequence[int], lane: int = 0) -> None:
    """Replace what the head guessed for lanes from `lane` on."""
    table = np.array(runner.device.drafts)
    table[lane : lane + len(drafts)] = drafts
    runner._device = replace(runner.device, drafts=jnp.asarray(table))


@pytest.mark.parametrize("num_right", range(NUM_DRAFTS + 1))
def test_a_row_emits_the_drafts_that_stand_and_one_token_more(chain: list[int], num_right: int) -> None:
    runner = make_runner(model_with_head(), sizes=DRAFTING)
    assert prefill(runner).tokens == (chain[0],)
    drafts = [*chain[1 : 1 + num_right], *[(token + 1) % 300 for token in chain[1 + num_right : 1 + NUM_DRAFTS]]]
    give_drafts(runner, drafts)
    result = verify(runner, chain[:1])
    assert list(result.tokens) == chain[1 : 2 + num_right]
    assert (result.num_drafts, result.finite) == (NUM_DRAFTS, True)
    # What was rejected has left no trace: the next tokens are those of plain decoding.
    known = chain[: 2 + num_right]
    (after,) = run(runner, verifying(known, num_drafts=0, num_replay=1 + num_right))
    assert list(after.tokens) == chain[2 + num_right : 3 + num_right]


@pytest.mark.parametrize("num_drafts", range(NUM_DRAFTS + 1))
def test_a_row_runs_no_more_drafts_than_its_plan_says(chain: list[int], num_drafts: int) -> None:
    runner = make_runner(model_with_head(), sizes=DRAFTING)
    prefill(runner)
    give_drafts(runner, chain[1 : 1 + NUM_DRAFTS])
    assert list(verify(runner, chain[:1], num_drafts=num_drafts).tokens) == chain[1 : 2 + num_drafts]


@pytest.mark.parametrize("drafted", ["accepted", "rejected"])
def test_a_draft_whose_numbers_are_not_finite_changes_no_answer(chain: list[int], drafted: str) -> None:
    """It spoils its window, which runs again without drafts; if it is the right token, its request ends there."""
    model = model_with_head()
    table = model.decoder.embed_tokens.weight
    broken = chain[2] if drafted == "accepted" else chain[5]
    table[...] = table[...].at[broken].set(jnp.nan)
    runner = make_runner(model, sizes=DRAFTING)
    for lane in range(2):
        prefill(runner, lane)
    give_drafts(runner, [chain[1], broken, chain[3]], [chain[1], chain[4], chain[4]])
    spoilt, neighbour = run(runner, verifying(chain[:1]), verifying(chain[:1], lane=1))
    assert (list(neighbour.tokens), neighbour.finite) == (chain[1:3], True)
    known = [chain[0], *spoilt.tokens]
    assert (spoilt.num_drafts > 0, spoilt.finite) == (len(known) > 1, True)
    num_replay = len(spoilt.tokens)
    while len(known) < 3:
        result = run(runner, verifying(known, num_drafts=0, num_replay=num_replay))[0]
        assert result.finite
        known, num_replay = [*known, *result.tokens], 1
    assert known == chain[:3]
    last = run(runner, verifying(known, num_drafts=0, num_replay=1))[0]
    assert last.finite == (drafted == "rejected")


def test_drafts_and_rows_that_are_padding_change_no_lane() -> None:
    runner = make_runner(model_with_head(), sizes=DRAFTING)
    prefill(runner)
    give_drafts(runner, [1, 2, 3], [4, 5, 6], [7, 8, 9], lane=0)
    runner.warm_up()
    assert np.asarray(runner.device.drafts).tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
