"""The Mosaic prefill of the gated delta rule against a float64 model; its bit-level promises; its parts on their own.

The interpreter multiplies float32 in float32, so that a wrong token, decay or state shows at once; it also looks for
races between warpgroups and asynchronous copies. A GPU's tensor cores multiply 16 bits.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from mosaic_runs import ON_GPU, run_mosaic
from oracles import kernel_float64 as oracle
from oracles.delta_checks import assert_close, assert_stored, with_rows

from gdn_jax.kernels.dispatch import UnsupportedKernelError
from gdn_jax.kernels.gated_delta.cases import (
    CASES,
    PREFILL_TESTS,
    Heads,
    PrefillArguments,
    PrefillCase,
    Span,
    make_prefill,
)
from gdn_jax.kernels.gated_delta.chunk_slots import chunk_slots, num_slots
from gdn_jax.kernels.gated_delta.mosaic_prefill import gdn_prefill as mosaic_prefill
from gdn_jax.kernels.gated_delta.mosaic_substitution import PADDED, PAIR, SLICE, substitute_forward
from gdn_jax.kernels.gated_delta.tiles import PrefillTiles
from gdn_jax.kernels.mosaic import row_by_row
from gdn_jax.kernels.numerics import CHUNK

# 16-bit operands carry 8 or 11 bits, and a chunk sums 64 products of them.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
USUAL = "float16" if ON_GPU else "float32"
NARROW = Heads(num_key=1, num_value=2, key_dim=64, value_dim=64)


def narrow(name: str, **changes: object) -> PrefillCase:
    """Return a test packing with the least widths and heads that share a key head."""
    return replace(CASES[f"test/{name}"], **{"heads": NARROW, "dtype": USUAL, **changes})


def prefill(args: PrefillArguments, tiles: PrefillTiles | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Run a prefill; returns outputs and pool."""
    run = partial(mosaic_prefill, args.q, args.inputs, args.rows, args.pool, tiles=tiles, interpret=not ON_GPU)
    outputs, pool = run_mosaic(run)
    return np.asarray(outputs), np.asarray(pool)


def assert_right(args: PrefillArguments, tolerance: float) -> None:
    """Outputs and stored states equal the float64 model's, and nothing else is touched."""
    outputs, pool = prefill(args)
    want, stored = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
    assert_close(outputs, want, tolerance)
    assert_stored(pool, args.pool, stored, tolerance)


@pytest.mark.parametrize("case", PREFILL_TESTS, ids=lambda case: case.name)
def test_every_packing_equals_the_float64_model_and_touches_nothing_else(case: PrefillCase) -> None:
    args = make_prefill(replace(case, heads=NARROW, dtype=USUAL))
    assert_right(args, TOLERANCES[USUAL])


@pytest.mark.parametrize("heads", [(2, 2, 128, 64), (1, 3, 64, 64), (1, 4, 64, 128)])
def test_every_grouping_and_width_equals_the_float64_model(heads: tuple[int, int, int, int]) -> None:
    num_key, num_value, key_dim, value_dim = heads
    sizes = Heads(num_key=num_key, num_value=num_value, key_dim=key_dim, value_dim=value_dim)
    case = PrefillCase(
        name="heads",
        heads=sizes,
        spans=(Span(0, 66), Span(64, 9)),
        num_tokens=80,
        num_rows=2,
        dtype=USUAL,
        export_every=CHUNK,
    )
    assert_right(make_prefill(case), TOLERANCES[USUAL])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_operands_stay_within_their_tolerance(dtype: str) -> None:
    spans = Span(70, 100), Span(63, 2)
    args = make_prefill(narrow("misaligned", dtype=dtype, spans=spans, num_tokens=104, num_rows=2))
    assert_right(args, TOLERANCES[dtype])


def test_tokens_between_rows_that_no_row_owns_have_outputs_of_zero() -> None:
    args = make_prefill(narrow("lengths", spans=(Span(0, 256),)))
    begin, length = np.array([10, 100, 0, 203]), np.array([30, 70, 0, 1])
    args = with_rows(args, offset=begin, length=length, start=[0, 6, 0, 0], write_slot=[5, 6, 0, 7])
    outputs, _ = prefill(args)
    owned = np.zeros(256, bool)
    for first, count in zip(begin, length, strict=True):
        owned[first : first + count] = True
    assert (outputs[~owned] == 0).all()
    assert (np.abs(outputs[owned]).max(axis=(1, 2)) > 0).all()
    want, _ = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
    assert_close(outputs, want, TOLERANCES[USUAL])


def test_a_16_bit_pool_holds_the_float32_state_rounded_once() -> None:
    args = make_prefill(narrow("one-row", spans=(Span(0, 100),)))
    outputs, pool = prefill(args)
    outputs16, pool16 = prefill(replace(args, pool=args.pool.astype(jnp.bfloat16)))
    assert outputs16.tobytes() == outputs.tobytes()
    assert pool16.tobytes() == np.asarray(jnp.asarray(pool).astype(jnp.bfloat16)).tobytes()


@pytest.mark.parametrize(("start", "cut"), [(0, 128), (37, 64)])
def test_a_span_cut_on_the_grid_equals_the_whole_bit_for_bit(start: int, cut: int) -> None:
    whole = make_prefill(narrow("one-row", spans=(Span(start, 200 - start),), dtype="bfloat16"))
    outputs, pool = prefill(whole)
    middle = int(whole.rows.export_slot[0, (cut - start // CHUNK * CHUNK) // CHUNK - 1])
    head, spare = cut - start, 15
    first = with_rows(whole, length=[head, 0, 0, 0], write_slot=[spare, 0, 0, 0])
    first_outputs, first_pool = prefill(first)
    second = with_rows(
        replace(whole, pool=jnp.asarray(first_pool)),
        offset=[head, 0, 0, 0],
        length=[200 - cut, 0, 0, 0],
        start=[cut, 0, 0, 0],
        read_slot=[spare, 0, 0, 0],
        export_slot=np.zeros((4, 5)),
    )
    second_outputs, second_pool = prefill(second)
    both = np.concatenate([first_outputs[:head], second_outputs[head : 200 - start]])
    assert both.tobytes() == outputs[: 200 - start].tobytes()
    end = int(whole.rows.write_slot[0])
    assert second_pool[end].tobytes() == pool[end].tobytes()
    assert first_pool[spare].tobytes() == pool[middle].tobytes(), "an export is the end of a prefill up to there"


def test_a_row_depends_on_neither_its_place_nor_its_neighbours() -> None:
    crowd = make_prefill(narrow("one-row", spans=(Span(64, 30), Span(70, 90), Span(0, 70)), dtype="bfloat16"))
    outputs, pool = prefill(crowd)
    rows, row, begin, length = crowd.rows, 1, 30, 90
    tokens = np.r_[np.arange(256 - length), np.arange(begin, begin + length)] % 256
    alone = replace(crowd, q=crowd.q[tokens], inputs=jax.tree.map(lambda x: x[tokens], crowd.inputs))
    only = {name: np.zeros(np.shape(value), np.int32) for name, value in vars(rows).items()}
    for name, value in vars(rows).items():
        only[name][2] = value[row]
    only["offset"][:] = 256 - length
    alone_outputs, alone_pool = prefill(with_rows(alone, **only))
    assert alone_outputs[256 - length :].tobytes() == outputs[begin : begin + length].tobytes()
    for slot in {int(rows.write_slot[row]), *np.asarray(rows.boundaries()[1])[row].tolist()} - {0}:
        assert alone_pool[slot].tobytes() == pool[slot].tobytes()


def test_small_decays_after_a_strong_one_keep_their_precision() -> None:
    args = make_prefill(narrow("one-row"))
    is_strong = (jnp.arange(256) % CHUNK < 40)[:, None]
    g = jnp.broadcast_to(jnp.where(is_strong, -110.0, -0.03), args.inputs.g.shape)
    assert_right(replace(args, inputs=replace(args.inputs, g=g)), TOLERANCES[USUAL])


def test_tiles_change_no_bit() -> None:
    wide = replace(NARROW, num_value=1, value_dim=128)
    spans = Span(0, 140), Span(70, 9)
    args = make_prefill(narrow("misaligned", heads=wide, dtype="bfloat16", spans=spans, num_tokens=152, num_rows=2))
    one, two = (prefill(args, PrefillTiles(warpgroups=count, stages=1 + count)) for count in (1, 2))
    assert [array.tobytes() for array in one] == [array.tobytes() for array in two]


@pytest.mark.parametrize("case", [*PREFILL_TESTS, narrow("lengths", spans=(Span(63, 2),) * 4)], ids=lambda c: c.name)
def test_chunks_of_all_rows_have_numbers_of_their_own_and_hold_every_token_once(case: PrefillCase) -> None:
    rows = make_prefill(case).rows
    slots = chunk_slots(rows, case.num_tokens)
    held = []
    for token, first, end in np.asarray(slots):
        held += range(token + first, token + end)
    assert len(slots) == num_slots(case.num_tokens, case.num_rows)
    assert held == list(range(int(np.asarray(rows.length).sum())))


def test_substitution_inverts_drawn_matrices_and_those_of_repeated_keys() -> None:
    drawn = np.tril(np.random.default_rng(0).standard_normal((CHUNK, CHUNK)), -1) * 0.3
    lower = np.stack([drawn, np.tril(np.ones((CHUNK, CHUNK)), -1)])

    def body(lower, out, matrices, loaded) -> None:
        plgpu.copy_gmem_to_smem(lower, matrices, loaded)
        plgpu.barrier_wait(loaded)
        substitute_forward(matrices)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(matrices, out)
        plgpu.wait_smem_to_gmem(0)

    shape = (PAIR, CHUNK, PADDED)
    scratch = (plgpu.SMEM(shape, jnp.float32, transforms=row_by_row(SLICE)), plgpu.Barrier())
    invert = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(shape, jnp.float32), scratch_types=scratch)
    padded = jnp.asarray(np.pad(lower, ((0, 0), (0, 0), (0, PADDED - CHUNK))), jnp.float32)
    got = np.asarray(run_mosaic(lambda: invert(padded)))[:, :, :CHUNK]
    want = np.linalg.inv(np.eye(CHUNK) + lower).swapaxes(1, 2)
    for inverse, right in zip(got, want, strict=True):
        assert_close(np.triu(inverse), right, 1e-6)


def test_operands_of_different_dtypes_and_sizes_that_it_cannot_run_are_refused() -> None:
    args = make_prefill(narrow("one-row", dtype="bfloat16"))
    mixed = replace(args, q=args.q.astype(jnp.float16))
    wide = make_prefill(narrow("one-row", heads=replace(NARROW, key_dim=96), dtype="bfloat16"))
    for case, rule in (
        (make_prefill(narrow("one-row", dtype="float32")), "must all be bfloat16 or all float16"),
        (mixed, "must all be bfloat16 or all float16"),
        (wide, "widths of keys and values must be 64 or 128"),
    ):
        with pytest.raises(UnsupportedKernelError, match=rule):
            mosaic_prefill(case.q, case.inputs, case.rows, case.pool)
