"""The gated delta rule: every implementation against a float64 model, and its bit-level promises.

Tolerances, relative to the largest expected value. float32: 1e-5, twenty times what sums over a few hundred float32
tokens show. bfloat16 operands: 2e-2, since operands carry 8 bits and a chunk sums 64 products of them. Bit-level tests
compare runs of one shape exactly.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_runs import ON_GPU, run_mosaic
from oracles import kernel_float64 as oracle
from oracles.delta_checks import assert_close, assert_stored, with_rows

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.kernels.dispatch import Implementation, UnsupportedKernelError
from gdn_jax.kernels.gated_delta import DeltaInputs, gdn_advance, gdn_prefill
from gdn_jax.kernels.gated_delta.cases import (
    ADVANCE_TESTS,
    CASES,
    HEADS_TESTS,
    PREFILL_TESTS,
    AdvanceArguments,
    AdvanceCase,
    Heads,
    PrefillArguments,
    PrefillCase,
    Span,
    make_advance,
    make_prefill,
)
from gdn_jax.kernels.gated_delta.mosaic_advance import gdn_advance as mosaic_advance
from gdn_jax.kernels.gated_delta.tiles import AdvanceTiles, advance_tiles

FLOAT32, BFLOAT16 = 1e-5, 2e-2
IN_JAX = pytest.mark.parametrize("implementation", [Implementation.REFERENCE, Implementation.JAX])
EVERY = pytest.mark.parametrize("implementation", list(Implementation))


def named(case: PrefillCase | AdvanceCase) -> str:
    return case.name


def prefill(args: PrefillArguments, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Run a prefill; returns outputs and pool."""
    out = gdn_prefill(args.q, args.inputs, args.rows, args.pool, implementation=implementation)
    return np.asarray(out[0]), np.asarray(out[1])


def advance(args: AdvanceArguments, implementation: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Run an advance; returns outputs and pool. Mosaic kernels must be free of races where they are interpreted."""
    run = partial(gdn_advance, args.q, args.new, args.replay, args.rows, args.pool, implementation=implementation)
    out = run_mosaic(run) if implementation == Implementation.MOSAIC else run()
    return np.asarray(out[0]), np.asarray(out[1])


@IN_JAX
class TestPrefill:
    @pytest.mark.parametrize("case", [*PREFILL_TESTS, *HEADS_TESTS], ids=named)
    def test_equals_the_float64_model_and_touches_nothing_else(
        self, case: PrefillCase, implementation: Implementation
    ) -> None:
        args = make_prefill(case)
        outputs, pool = prefill(args, implementation)
        want, stored = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
        assert_close(outputs, want, FLOAT32)
        assert (outputs[np.asarray(args.rows.length).sum() :] == 0).all()
        assert_stored(pool, args.pool, stored, FLOAT32)

    def test_bfloat16_operands_stay_within_their_tolerance(self, implementation: Implementation) -> None:
        args = make_prefill(replace(CASES["test/misaligned"], dtype="bfloat16"))
        outputs, pool = prefill(args, implementation)
        want, stored = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
        assert outputs.dtype == jnp.bfloat16
        assert_close(outputs, want, BFLOAT16)
        assert_stored(pool, args.pool, stored, BFLOAT16)

    def test_a_16_bit_pool_holds_the_float32_state_rounded_once(self, implementation: Implementation) -> None:
        case = replace(CASES["test/lengths"], spans=(Span(0, 250), Span(0, 3)))
        args = make_prefill(case)
        outputs, pool = prefill(args, implementation)
        outputs16, pool16 = prefill(replace(args, pool=args.pool.astype(jnp.bfloat16)), implementation)
        assert outputs16.tobytes() == outputs.tobytes()
        assert pool16.tobytes() == np.asarray(jnp.asarray(pool).astype(jnp.bfloat16)).tobytes()

    @pytest.mark.parametrize("start", [0, 37])
    @pytest.mark.parametrize("cut", [64, 128, 192])
    def test_a_span_cut_on_the_grid_equals_the_whole_bit_for_bit(
        self, start: int, cut: int, implementation: Implementation
    ) -> None:
        whole = make_prefill(replace(CASES["test/one-row"], spans=(Span(start, 250 - start),)))
        outputs, pool = prefill(whole, implementation)
        middle = int(whole.rows.export_slot[0, (cut - start // 64 * 64) // 64 - 1])
        head, spare = cut - start, 15
        first = with_rows(whole, length=[head, 0, 0, 0], write_slot=[spare, 0, 0, 0])
        first_outputs, first_pool = prefill(first, implementation)
        second = with_rows(
            replace(whole, pool=jnp.asarray(first_pool)),
            offset=[head, 0, 0, 0],
            length=[250 - cut, 0, 0, 0],
            start=[cut, 0, 0, 0],
            read_slot=[spare, 0, 0, 0],
            export_slot=np.zeros((4, 5)),
        )
        second_outputs, second_pool = prefill(second, implementation)
        assert np.concatenate([first_outputs[:head], second_outputs[head:]]).tobytes() == outputs.tobytes()
        end = int(whole.rows.write_slot[0])
        assert second_pool[end].tobytes() == pool[end].tobytes()
        assert first_pool[spare].tobytes() == pool[middle].tobytes(), "an export is the end of a prefill up to there"

    def test_a_row_depends_on_neither_its_place_nor_its_neighbours(self, implementation: Implementation) -> None:
        crowd = make_prefill(
            replace(CASES["test/one-row"], spans=(Span(64, 30), Span(70, 90), Span(0, 0), Span(3, 40)))
        )
        outputs, pool = prefill(crowd, implementation)
        rows = crowd.rows
        for row, (begin, length) in enumerate([(0, 30), (30, 90), (120, 0), (120, 40)]):
            alone_at = (row + 1) % 4  # another row, other packed tokens
            tokens = np.r_[np.arange(256 - length), np.arange(begin, begin + length)] % 256
            args = replace(crowd, q=crowd.q[tokens], inputs=jax.tree.map(lambda x, t=tokens: x[t], crowd.inputs))
            only = {name: np.zeros(np.shape(value), np.int32) for name, value in vars(rows).items()}
            for name, value in vars(rows).items():
                only[name][alone_at] = value[row]
            only["offset"][:] = 256 - length
            alone_outputs, alone_pool = prefill(with_rows(args, **only), implementation)
            assert alone_outputs[256 - length :].tobytes() == outputs[begin : begin + length].tobytes()
            for slot in {int(rows.write_slot[row]), *np.asarray(rows.boundaries()[1])[row].tolist()} - {0}:
                assert alone_pool[slot].tobytes() == pool[slot].tobytes()

    def test_small_decays_after_a_strong_one_keep_their_precision(self, implementation: Implementation) -> None:
        args = make_prefill(CASES["test/one-row"])
        is_strong = (jnp.arange(256) % 64 < 40)[:, None]
        g = jnp.broadcast_to(jnp.where(is_strong, -110.0, -0.03), args.inputs.g.shape)
        args = replace(args, inputs=replace(args.inputs, g=g))
        outputs, _ = prefill(args, implementation)
        want, _ = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
        assert_close(outputs, want, FLOAT32)  # differences of plain running sums, here about -4400, err by 1e-4


@EVERY
class TestAdvance:
    @pytest.mark.parametrize("case", ADVANCE_TESTS, ids=named)
    def test_equals_the_float64_model_and_touches_nothing_else(
        self, case: AdvanceCase, implementation: Implementation
    ) -> None:
        args = make_advance(case)
        outputs, pool = advance(args, implementation)
        want, stored = oracle.delta_advance(args.q, args.new, args.replay, args.rows, args.pool)
        assert_close(outputs, want, FLOAT32)
        assert (outputs[~np.asarray(args.rows.is_new(case.window))] == 0).all()
        assert_stored(pool, args.pool, stored, FLOAT32)

    def test_two_rows_may_read_one_slot(self, implementation: Implementation) -> None:
        args = make_advance(CASES["test/advance/verify"])
        shared = args.rows.read_slot.at[2].set(args.rows.read_slot[0])  # rows 0 and 2 write to slots of their own
        args = replace(args, rows=replace(args.rows, read_slot=shared))
        outputs, pool = advance(args, implementation)
        want, stored = oracle.delta_advance(args.q, args.new, args.replay, args.rows, args.pool)
        assert_close(outputs, want, FLOAT32)
        assert_stored(pool, args.pool, stored, FLOAT32)

    def test_bfloat16_inputs_and_a_float16_pool_round_only_inputs_outputs_and_slots(
        self, implementation: Implementation
    ) -> None:
        args = make_advance(replace(CASES["test/advance/verify"], dtype="bfloat16", state_dtype="float16"))
        outputs, pool = advance(args, implementation)
        want, stored = oracle.delta_advance(args.q, args.new, args.replay, args.rows, args.pool)
        assert outputs.dtype == jnp.bfloat16
        assert_close(outputs, want, 2.0**-8)  # one rounding to 8 bits at the end
        assert_stored(pool, args.pool, stored, 2.0**-10)  # one rounding to 11 bits at the slot

    def test_a_row_depends_on_neither_its_place_nor_its_neighbours(self, implementation: Implementation) -> None:
        args = make_advance(CASES["test/advance/verify"])
        outputs, pool = advance(args, implementation)
        order = np.array([3, 5, 0, 4, 2, 1])
        moved = replace(jax.tree.map(lambda x: x[order], args), pool=args.pool)
        moved_outputs, moved_pool = advance(moved, implementation)
        assert moved_outputs.tobytes() == outputs[order].tobytes()
        assert moved_pool.tobytes() == pool.tobytes()

    def test_decoding_with_rejected_drafts_gives_the_states_and_outputs_of_a_prefill(
        self, implementation: Implementation
    ) -> None:
        heads = Heads(num_key=1, num_value=1, key_dim=64, value_dim=64)
        args = make_prefill(replace(CASES["test/one-row"], heads=heads, spans=(Span(0, 80),)))
        want, stored = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
        at_64, end = int(args.rows.export_slot[0, 0]), int(args.rows.write_slot[0])
        outputs, pool = decode_with_drafts(args, num_tokens=80, implementation=implementation)
        assert_close(outputs, want[:80], FLOAT32)
        assert_close(pool[1], stored[end], FLOAT32)
        assert_close(pool[2], stored[at_64], FLOAT32)
        assert np.isnan(pool[[0, 3]]).all()


class TestMosaicAdvance:
    @pytest.mark.parametrize("state_dtype", ["float32", "float16"])
    def test_tiles_change_no_bit(self, state_dtype: str) -> None:
        args = make_advance(replace(CASES["test/advance/heads/2x4/128x64"], state_dtype=state_dtype))
        outputs, stored = oracle.delta_advance(args.q, args.new, args.replay, args.rows, args.pool)
        runs = [
            run_mosaic(partial(mosaic_advance, *vars(args).values(), tiles=AdvanceTiles(value_rows=rows)))
            for rows in (32, 64)
        ]
        for tiled, pool in runs:
            assert_close(np.asarray(tiled), outputs, FLOAT32)
            assert_stored(np.asarray(pool), args.pool, stored, FLOAT32 if state_dtype == "float32" else 2.0**-10)
        for one, other in zip(*runs, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_tiles_of_other_sizes_are_refused(self) -> None:
        with pytest.raises(ValueError, match="a tile must have 32 or 64 rows, 8 or 16 for each warp; got 16"):
            AdvanceTiles(value_rows=16)

    @pytest.mark.parametrize(
        ("num_states", "window", "state_dtype", "expected"),
        [(32, 4, "float32", 32), (256, 4, "float32", 64), (2048, 1, "float32", 32), (2048, 1, "float16", 64)],
    )
    def test_small_batches_and_light_work_get_more_and_smaller_programs(
        self, num_states: int, window: int, state_dtype: str, expected: int
    ) -> None:
        assert advance_tiles(num_states, 128, window, jnp.dtype(state_dtype)).value_rows == expected

    def test_a_token_has_the_same_bits_wherever_it_stands_in_a_window(self) -> None:
        args = make_advance(
            replace(CASES["test/advance/verify"], heads=Heads(num_key=1, num_value=1, key_dim=64, value_dim=64))
        )
        row = int(np.argmax((np.asarray(args.rows.num_new) == 4) & (np.asarray(args.rows.read_slot) > 0)))
        tokens, queries = jax.tree.map(lambda x: x[row : row + 1], (args.new, args.q))
        start = args.pool[args.rows.read_slot[row]]

        def step(state: jax.Array, old: slice, fresh: slice) -> tuple[np.ndarray, jax.Array]:
            """Replay some tokens from a state and run others; returns outputs and the state after the replay."""

            def window(cut: slice, x: jax.Array) -> jax.Array:
                return jnp.full_like(x, jnp.nan).at[:, : cut.stop - cut.start].set(x[:, cut])

            old_tokens, new_tokens = (jax.tree.map(partial(window, cut), tokens) for cut in (old, fresh))
            counts = {"read_slot": 1, "write_slot": 2, "save_slot": 0, "save_at": 0, "folded": 0}
            counts |= {"num_replay": old.stop - old.start, "num_new": fresh.stop - fresh.start}
            rows = AdvanceRows(**{name: jnp.asarray([value], jnp.int32) for name, value in counts.items()})
            pool = jnp.zeros((3, *state.shape)).at[1].set(state)
            step = partial(mosaic_advance, window(fresh, queries), new_tokens, old_tokens, rows, pool)
            outputs, pool = run_mosaic(step)
            return np.asarray(outputs)[0, : fresh.stop - fresh.start], pool[2]

        outputs, _ = step(start, slice(0, 0), slice(0, 4))
        state = start
        for place in range(4):
            rest, _ = step(start, slice(0, place), slice(place, 4))
            assert rest.tobytes() == outputs[place:].tobytes()
            _, at_once = step(start, slice(0, place + 1), slice(0, 0))
            _, state = step(state, slice(place, place + 1), slice(0, 0))
            assert np.asarray(at_once).tobytes() == np.asarray(state).tobytes()

    def test_outputs_have_the_dtype_of_the_values(self) -> None:
        args = make_advance(CASES["test/advance/one-token"])
        values = replace(args.new, v=args.new.v.astype(jnp.bfloat16))
        outputs, _ = advance(replace(args, new=values), Implementation.MOSAIC)
        assert outputs.dtype == jnp.bfloat16

    @pytest.mark.skipif(ON_GPU, reason="only the interpreter finds races")
    @pytest.mark.parametrize(("first", "second"), [("write_slot", "write_slot"), ("write_slot", "save_slot")])
    def test_the_race_detector_sees_two_rows_that_write_one_slot(self, first: str, second: str) -> None:
        args = make_advance(replace(CASES["test/advance/verify"], heads=CASES["test/advance/heads/1x1/64x128"].heads))
        slots = getattr(args.rows, second).at[1].set(getattr(args.rows, first)[0])
        args = replace(args, rows=replace(args.rows, **{second: slots}))
        with pytest.raises(Exception, match="RACE DETECTED"):
            advance(args, Implementation.MOSAIC)

    @pytest.mark.parametrize(
        ("heads", "state_dtype", "rule"),
        [
            (
                Heads(num_key=1, num_value=1, key_dim=96, value_dim=64),
                "float32",
                "widths of keys and values must be 64",
            ),
            (
                Heads(num_key=1, num_value=1, key_dim=64, value_dim=32),
                "float32",
                "widths of keys and values must be 64",
            ),
            (Heads(num_key=1, num_value=1, key_dim=64, value_dim=64), "float8_e4m3fn", "states must be one of"),
        ],
    )
    def test_sizes_that_it_cannot_run_are_refused(self, heads: Heads, state_dtype: str, rule: str) -> None:
        args = make_advance(replace(CASES["test/advance/one-token"], heads=heads, state_dtype=state_dtype))
        with pytest.raises(UnsupportedKernelError, match=rule):
            gdn_advance(*vars(args).values(), implementation=Implementation.MOSAIC)


def decode_with_drafts(
    args: PrefillArguments, *, num_tokens: int, implementation: Implementation
) -> tuple[np.ndarray, np.ndarray]:
    """Run row 0's tokens in windows of up to 4, of which only some are kept; save at 64; end with a closing row."""
    rng = np.random.default_rng(3)
    q, inputs = np.asarray(args.q), {name: np.asarray(x) for name, x in vars(args.inputs).items()}
    pool = jnp.full((4, *args.pool.shape[1:]), jnp.nan)
    replay, folded, num_replay, done, outputs = None, 0, 0, 0, []
    while True:
        num_new = min(4, num_tokens - done)
        window = (done + np.arange(4)) % 256
        new = DeltaInputs(**{name: jnp.asarray(x[window][None]) for name, x in inputs.items()})
        counts = {
            "read_slot": [int(folded > 0)],
            "write_slot": [1],
            "save_slot": [2],
            "save_at": [64],
            "folded": [folded],
            "num_replay": [num_replay],
            "num_new": [num_new],
        }
        rows = AdvanceRows(**{name: jnp.asarray(value, jnp.int32) for name, value in counts.items()})
        step = AdvanceArguments(q=jnp.asarray(q[window][None]), new=new, replay=replay or new, rows=rows, pool=pool)
        out, stored = advance(step, implementation)
        pool = jnp.asarray(stored)
        if num_new == 0:
            return np.concatenate(outputs), stored
        kept = int(rng.integers(1, num_new + 1))
        outputs.append(out[0, :kept])
        folded, num_replay, done, replay = folded + num_replay, kept, done + kept, new
