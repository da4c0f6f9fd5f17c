"""Laws of the decoder's two ways through its layers: cuts, anchors, rejected drafts and neighbours change nothing.

Equal bits are asked for where the same arithmetic must have run: within one size of call, the chunk grid is absolute
and a row knows nothing of the others. Decode folds token by token what prefill multiplies chunk by chunk, so there
float32 rounds differently.
"""

from collections.abc import Sequence

import jax
import numpy as np
import pytest
from model_steps import LANES, SLOTS, Output, Span, Steps, Window, slot_of, slot_pools, small_steps

from gdn_jax.state import ModelState

# States and hidden vectors of size 3, logits of deviation 5: sums of up to 200 float32 terms, seen to differ by 1e-6
# and 4e-6.
STATES = {"rtol": 1e-5, "atol": 1e-5}
LOGITS = {"rtol": 0, "atol": 1e-4}
IDS = np.random.RandomState(0).randint(0, 97, 190)
PAGES = (5, 2, 7)
OWN = 1  # the slot that a sequence runs in


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> Steps:
    return small_steps(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(steps) -> tuple[Output, ModelState]:
    """190 tokens in one prefill, with the states after 64 and 128 of them in slots 2 and 3."""
    span = Span(tokens=IDS, pages=PAGES, write=OWN, exports={64: 2, 128: 3})
    (output,), state = steps.prefill(steps.pools(), span)
    return output, state


def assert_same_bits(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def prefill_in_parts(steps: Steps, cuts: Sequence[int]) -> tuple[list[Output], ModelState]:
    """Prefill IDS in spans between `cuts`, each reading and writing the sequence's own slot."""
    state, outputs = steps.pools(), []
    for start, stop in zip((0, *cuts), (*cuts, len(IDS)), strict=True):
        pages = PAGES[: -(-stop // 64)]
        span = Span(tokens=IDS[start:stop], pages=pages, start=start, read=OWN if start else 0, write=OWN)
        (output,), state = steps.prefill(state, span)
        outputs.append(output)
    return outputs, state


def decode(
    steps: Steps, state: ModelState, start: int, accepted: Sequence[int], *, rejected: Sequence[int] = (), save: int = 0
) -> tuple[list[Output], list[ModelState]]:
    """Advance IDS from `start` on, `accepted[i]` tokens in step i followed by rejected drafts, then close.

    Returns each step's output for the accepted tokens, and the state after each step; the last one only folds. The
    state after `save` tokens goes to slot 4.
    """
    outputs, states, folded, num_replay = [], [], start, 0
    for count in (*accepted, 0):
        position = folded + num_replay
        drafts = rejected[: 3 - count] if count else ()
        window = Window(
            tokens=[*IDS[position : position + count], *drafts],
            pages=PAGES,
            lane=LANES - 1,  # the one that a padding row would hit if it were not past the end
            read=OWN,
            write=OWN,
            folded=folded,
            num_replay=num_replay,
            save=(4, save) if save else (0, 0),
        )
        (output,), state = steps.advance(state, window)
        outputs.append(Output(hidden=output.hidden[:count], logits=output.logits[:count]))
        states.append(state)
        folded, num_replay = position, count
    return outputs, states


@pytest.mark.parametrize("cuts", [(64,), (128,), (64, 128)], ids=str)
def test_a_prompt_cut_on_the_grid_gives_the_bits_of_the_whole(steps, whole, cuts):
    outputs, state = prefill_in_parts(steps, cuts)
    assert_same_bits([np.concatenate([output.logits for output in outputs])], [whole[0].logits])
    assert_same_bits(slot_of(state, OWN), slot_of(whole[1], OWN))
    for layer, wanted in zip(state.layers, whole[1].layers, strict=True):
        if not hasattr(layer, "recurrent"):
            assert_same_bits([layer.k, layer.v], [wanted.k, wanted.v])


@pytest.mark.parametrize("cuts", [(1, 3), (70, 75), (63, 65, 127)], ids=str)
def test_a_prompt_cut_anywhere_equals_the_whole(steps, whole, cuts):
    outputs, state = prefill_in_parts(steps, cuts)
    np.testing.assert_allclose(np.concatenate([output.logits for output in outputs]), whole[0].logits, **LOGITS)
    for got, wanted in zip(slot_of(state, OWN), slot_of(whole[1], OWN), strict=True):
        np.testing.assert_allclose(got, wanted, **STATES)


@pytest.mark.parametrize(("count", "slot"), [(64, 2), (128, 3)])
def test_an_export_has_the_bits_of_a_prefill_that_ends_there(steps, whole, count, slot):
    (output,), state = steps.prefill(steps.pools(), Span(tokens=IDS[:count], pages=PAGES, write=OWN))
    assert_same_bits(slot_of(whole[1], slot), slot_of(state, OWN))
    assert_same_bits([slot_of(state, OWN)[-1]], [output.hidden[-1]])  # the hidden vector is the newest token's


def test_exports_past_a_rows_end_are_not_stored(steps):
    _, state = steps.prefill(steps.pools(), Span(tokens=IDS[:127], pages=PAGES, write=OWN, exports={64: 2, 128: 3}))
    assert all(np.isfinite(part).all() for part in slot_of(state, 2))
    assert all(np.isnan(part).all() for part in slot_of(state, 3))


def test_a_state_is_restored_by_reading_another_slot(steps, whole):
    """A hit reads the checkpoint's slot and writes its own; the checkpoint stays what it was."""
    span = Span(tokens=IDS[128:], pages=PAGES, start=128, read=3, write=9)
    (output,), state = steps.prefill(whole[1], span)
    assert_same_bits([output.logits], [whole[0].logits[128:]])
    assert_same_bits(slot_of(state, 9), slot_of(whole[1], OWN))
    assert_same_bits(slot_of(state, 3), slot_of(whole[1], 3))


@pytest.mark.parametrize("accepted", [(1,) * 9, (3, 3, 3), (2, 1, 3, 1, 2)], ids=str)
def test_decode_with_replay_equals_prefill(steps, whole, accepted):
    _, state = steps.prefill(steps.pools(), Span(tokens=IDS[:121], pages=PAGES, write=OWN))
    outputs, states = decode(steps, state, 121, accepted, rejected=(7, 96), save=128)
    logits = np.concatenate([output.logits for output in outputs])
    np.testing.assert_allclose(logits, whole[0].logits[121:130], **LOGITS)
    _, longer = steps.prefill(steps.pools(), Span(tokens=IDS[:130], pages=PAGES, write=OWN))
    for got, wanted in zip(slot_of(states[-1], OWN), slot_of(longer, OWN), strict=True):
        np.testing.assert_allclose(got, wanted, **STATES)
    for got, wanted in zip(slot_of(states[-1], 4), slot_of(whole[1], 3), strict=True):
        np.testing.assert_allclose(got, wanted, **STATES, err_msg="saved after 128 tokens")


def test_a_save_is_stored_only_by_the_fold_that_reaches_it(steps, whole):
    _, states = decode(steps, whole[1], 190 - 9, (3, 3, 3), save=187)
    stored = [not np.isnan(slot_of(state, 4)[0]).any() for state in states]
    assert stored == [False, False, True, True]  # the third step folds tokens 184 to 186
    assert_same_bits(slot_of(states[2], 4), slot_of(states[3], 4))


def test_rejected_drafts_leave_no_trace_in_the_pools(steps):
    _, start = steps.prefill(steps.pools(), Span(tokens=IDS[:121], pages=PAGES, write=OWN))
    accepted = (1, 2, 3, 1, 1)
    plain, plain_states = decode(steps, start, 121, accepted, save=124)
    for rejected in ((7, 96), (0, 0)):
        drafted, drafted_states = decode(steps, start, 121, accepted, rejected=rejected, save=124)
        for got, wanted in zip(drafted, plain, strict=True):
            assert_same_bits([got.hidden, got.logits], [wanted.hidden, wanted.logits])
        for got, wanted in zip(drafted_states, plain_states, strict=True):
            assert_same_bits(slot_pools(got), slot_pools(wanted))


def test_a_verify_step_reads_its_slot_and_changes_none(steps):
    _, start = steps.prefill(steps.pools(), Span(tokens=IDS[:121], pages=PAGES, write=OWN))
    _, states = decode(steps, start, 121, (3,))
    assert_same_bits(slot_pools(states[0]), slot_pools(start))
    assert not np.array_equal(slot_of(states[1], OWN)[0], slot_of(start, OWN)[0])  # the closing row folds


def two_prompts() -> list[Span]:
    return [
        Span(tokens=IDS[:100], pages=(5, 2), write=1, exports={64: 3}),
        Span(tokens=IDS[100:], pages=(7, 9), write=2, exports={64: 4}),
    ]


def two_windows(replay: int) -> list[Window]:
    return [
        Window(tokens=IDS[:3], pages=(5, 2), lane=0, read=1, write=1, folded=100, num_replay=replay),
        Window(tokens=IDS[5:7], pages=(7, 9), lane=2, read=2, write=2, folded=90, num_replay=replay),
    ]


def test_row_order_and_what_padding_holds_change_no_bit(steps):
    one, one_state = steps.prefill(steps.pools(), *two_prompts())
    two, two_state = steps.prefill(steps.pools(), *reversed(two_prompts()), filler=96)
    for replay in (0, 2):
        assert_same_bits([output.logits for output in one], [output.logits for output in reversed(two)])
        assert_same_bits(jax.tree.leaves(one_state.layers), jax.tree.leaves(two_state.layers))
        assert_same_bits(slot_pools(one_state), slot_pools(two_state))
        one, one_state = steps.advance(one_state, *two_windows(replay))
        two, two_state = steps.advance(two_state, *reversed(two_windows(replay)))


def test_a_row_alone_has_the_bits_it_has_among_others(steps):
    both, both_state = steps.prefill(steps.pools(), *two_prompts())
    for index, (span, window) in enumerate(zip(two_prompts(), two_windows(0), strict=True)):
        (alone,), state = steps.prefill(steps.pools(), span)
        assert_same_bits([alone.logits], [both[index].logits])
        (alone,), _ = steps.advance(state, window)
        together, _ = steps.advance(both_state, *two_windows(0))
        assert_same_bits([alone.logits], [together[index].logits])


def test_memory_that_nobody_owns_reaches_no_output_and_is_not_written(steps):
    def run(content: float) -> tuple[list[Output], ModelState]:
        outputs, state = steps.prefill(steps.pools(content), *two_prompts())
        for replay in (0, 2):
            more, state = steps.advance(state, *two_windows(replay))
            outputs += more
        return outputs, state

    outputs, state = run(np.nan)
    for got, wanted in zip(outputs, run(0.0)[0], strict=True):
        assert_same_bits([got.hidden, got.logits], [wanted.hidden, wanted.logits])
    untouched = [pool[[0, *range(5, SLOTS)]] for pool in slot_pools(steps.pools())]
    assert_same_bits([pool[[0, *range(5, SLOTS)]] for pool in slot_pools(state)], untouched)
    assert np.isnan(np.asarray(state.layers[0].replay.conv)[1]).all()  # lanes 0 and 2 ran
    pages = np.asarray(state.layers[1].k)
    assert np.isnan(pages[[0, 1, 3, 4, 6, 8]]).all()
    assert not np.isnan(pages[[5, 7]]).any()


def test_a_step_of_padding_alone_changes_nothing(steps, whole):
    for run in (steps.prefill, steps.advance):
        _, after = run(whole[1])
        assert_same_bits(jax.tree.leaves(after), jax.tree.leaves(whole[1]))


def test_an_empty_span_moves_its_state_to_another_slot(steps, whole):
    _, state = steps.prefill(whole[1], Span(tokens=(), pages=(), start=128, read=3, write=8))
    assert_same_bits(slot_of(state, 8), slot_of(whole[1], 3))
