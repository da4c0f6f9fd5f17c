"""The MTP head against the float64 model; its entries by token slot, across cuts, hits and rejected drafts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from model_steps import SMALL, Output, Span, Steps, Window, slot_of, small_steps
from oracles.checkpoints import write_checkpoint
from oracles.numpy_model import OracleModel

from gdn_jax.state import ModelState

# Hidden vectors of size 3 and logits of deviation 5, after two more norms than the decoder's: seen to differ by 3e-5.
HIDDEN = {"rtol": 1e-4, "atol": 1e-4}
LOGITS = {"rtol": 0, "atol": 5e-4}
IDS = np.random.RandomState(1).randint(0, 97, 150)
PAGES = (5, 2, 7)


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target's hidden vectors for IDS, its state afterwards, and the float64 model."""

    hidden: np.ndarray
    state: ModelState
    oracle: OracleModel


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Steps:
    return small_steps(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(steps, tmp_path_factory) -> Target:
    span = Span(tokens=IDS, pages=PAGES, write=1, exports={64: 2, 128: 3})
    (output,), state = steps.prefill(steps.pools(), span)
    oracle = OracleModel(write_checkpoint(tmp_path_factory.mktemp("oracle"), "next-moe", seed=1, **SMALL))
    return Target(hidden=output.hidden, state=state, oracle=oracle)


def entries(steps: Steps, target: Target, state: ModelState, start: int, stop: int) -> tuple[Output, ModelState]:
    """Make the entries start..stop - 1 in one prefill."""
    span = Span(tokens=IDS[start:stop], pages=PAGES[: -(-stop // 64)], start=start)
    (output,), state = steps.mtp_prefill(state, span, hidden=[target.hidden[start - 1 : stop - 1]])
    return output, state


def feed_itself(
    steps: Steps, state: ModelState, first: Output, position: int, drafts: Sequence[int]
) -> tuple[list[np.ndarray], ModelState]:
    """Return the logits after each of `drafts`, whose entries start at `position`, from the output before them."""
    hidden, logits = first.hidden[-1:], []
    for count, draft in enumerate(drafts):
        window = Window(tokens=[draft], pages=PAGES, lane=0, read=0, write=0, folded=position + count)
        (output,), state = steps.mtp_advance(state, window, hidden=[hidden])
        hidden, logits = output.hidden, [*logits, output.logits[0]]
    return logits, state


def test_head_equals_the_float64_model(steps, target):
    got, _ = entries(steps, target, target.state, 1, 150)
    hidden, logits = target.oracle.mtp(target.hidden[:149], IDS[1:])
    np.testing.assert_allclose(got.hidden, hidden, **HIDDEN)
    np.testing.assert_allclose(got.logits, logits, **LOGITS)


def test_an_entry_stands_at_its_tokens_slot_rotated_as_the_token_before(steps, target):
    _, state = entries(steps, target, target.state, 1, 150)
    empty = target.oracle.empty_attention()
    _, memory = target.oracle.advance_mtp(target.hidden[:149].astype(np.float64), IDS[1:], empty)
    for side, wanted in zip(("k", "v"), memory, strict=True):
        pages = np.asarray(getattr(state.mtp, side))[list(PAGES)]  # [blocks, block, Hkv, D]
        in_order = pages.reshape(-1, *pages.shape[2:])
        np.testing.assert_allclose(in_order[1:150].swapaxes(0, 1), wanted, **HIDDEN, err_msg=side)


@pytest.mark.parametrize("cut", [64, 128, 70, 2], ids=str)
def test_entries_made_in_two_spans_equal_those_of_one(steps, target, cut):
    whole, whole_state = entries(steps, target, target.state, 1, 150)
    first, state = entries(steps, target, target.state, 1, cut)
    second, state = entries(steps, target, state, cut, 150)
    tolerance = {"rtol": 0, "atol": 0} if cut % 64 == 0 else LOGITS  # on the grid the same arithmetic runs
    np.testing.assert_allclose(np.concatenate([first.logits, second.logits]), whole.logits, **tolerance)
    for side in ("k", "v"):
        got, wanted = (np.asarray(getattr(pools.mtp, side)) for pools in (state, whole_state))
        np.testing.assert_allclose(got, wanted, **HIDDEN)


def test_no_entry_stands_at_slot_0_and_none_is_read_there(steps, target):
    _, state = entries(steps, target, target.state, 1, 150)
    keys = np.asarray(state.mtp.k)
    assert np.isnan(keys[PAGES[0], 0]).all()
    assert np.isfinite(keys[PAGES[0], 1:]).all()
    unowned = sorted(set(range(len(keys))) - set(PAGES))
    assert np.isnan(keys[unowned]).all()


def test_windows_of_true_entries_equal_a_prefill(steps, target):
    """After each verify the head runs over all tokens that were accepted."""
    whole, _ = entries(steps, target, target.state, 1, 150)
    _, state = entries(steps, target, target.state, 1, 121)
    position = 121
    for count in (1, 3, 2, 3):
        window = Window(tokens=IDS[position : position + count], pages=PAGES, lane=1, read=0, write=0, folded=position)
        fed = target.hidden[position - 1 : position + count - 1]
        (output,), state = steps.mtp_advance(state, window, hidden=[fed])
        np.testing.assert_allclose(output.logits, whole.logits[position - 1 : position + count - 1], **LOGITS)
        position += count


@pytest.mark.parametrize("count", [64, 128])
def test_at_a_hit_the_checkpoints_hidden_vector_makes_the_first_own_entry(steps, target, count):
    whole, whole_state = entries(steps, target, target.state, 1, 150)
    _, state = entries(steps, target, target.state, 1, count)
    checkpoint = slot_of(target.state, {64: 2, 128: 3}[count])[-1]
    fed = np.concatenate([checkpoint[None], target.hidden[count:149]])
    span = Span(tokens=IDS[count:], pages=PAGES, start=count)
    (output,), state = steps.mtp_prefill(state, span, hidden=[fed])
    np.testing.assert_array_equal(output.logits, whole.logits[count - 1 :])
    np.testing.assert_array_equal(np.asarray(state.mtp.k), np.asarray(whole_state.mtp.k))


def test_drafts_feed_each_other_as_in_the_float64_model(steps, target):
    first, state = entries(steps, target, target.state, 1, 150)
    drafts, logits, _ = target.oracle.draft(target.hidden[:149], IDS[1:], target.oracle.empty_attention(), 4)
    assert int(first.logits[-1].argmax()) == drafts[0]
    got, _ = feed_itself(steps, state, first, 150, drafts[:3])
    np.testing.assert_allclose(got, logits[1:], **LOGITS)


def test_entries_of_rejected_drafts_are_never_read_again(steps, target):
    first, state = entries(steps, target, target.state, 1, 121)
    wanted, _ = entries(steps, target, state, 121, 122)
    _, drafted = feed_itself(steps, state, first, 121, [8, 9, 10])
    got, _ = entries(steps, target, drafted, 121, 122)
    np.testing.assert_array_equal(got.logits, wanted.logits)


def test_self_fed_entries_past_the_block_table_go_nowhere(steps, target):
    first, state = entries(steps, target, target.state, 1, 128)
    window = Window(tokens=[8], pages=PAGES[:2], lane=0, read=0, write=0, folded=128)
    _, after = steps.mtp_advance(state, window, hidden=[first.hidden[-1:]])
    np.testing.assert_array_equal(np.asarray(after.mtp.k), np.asarray(state.mtp.k))
    longer = Window(tokens=[8], pages=PAGES, lane=0, read=0, write=0, folded=128)
    _, after = steps.mtp_advance(state, longer, hidden=[first.hidden[-1:]])
    assert np.isfinite(np.asarray(after.mtp.k)[PAGES[2], 0]).all()
