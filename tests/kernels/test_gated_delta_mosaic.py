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
from mosaic_runs import ON_GPU, assert_no_barrier_is_missing, run_mosaic
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
from gdn_jax.kernels.gated_delta.mosaic_prefill import gdn_prefill as mosaic_prefill
from gdn_jax.kernels.gated_delta.mosaic_substitution import (
    HALF,
    PAIR,
    inverse_scratch,
    merge_halves,
    store_gram,
    store_parts,
    substitute_forward,
)
from gdn_jax.kernels.gated_delta.tiles import PrefillTiles, prefill_tiles
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
    owned = np.zeros(256, bool)
    for first, count in zip(begin, length, strict=True):
        owned[first : first + count] = True
    outputs, _ = prefill(poisoned(args, ~owned))
    assert (outputs[~owned] == 0).all()
    assert (np.abs(outputs[owned]).max(axis=(1, 2)) > 0).all()
    want, _ = oracle.delta_prefill(args.q, args.inputs, args.rows, args.pool)
    assert_close(outputs, want, TOLERANCES[USUAL])


def poisoned(args: PrefillArguments, where: np.ndarray) -> PrefillArguments:
    """Return the arguments with NaN for some tokens."""
    q, inputs = jax.tree.map(lambda x: x.at[where].set(jnp.nan), (args.q, args.inputs))
    return replace(args, q=q, inputs=inputs)


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


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs a warpgroup as one thread")
@pytest.mark.parametrize(
    ("heads", "num_rows"), [((4, 8, 128, 128), 20), ((4, 8, 128, 128), 3), ((1, 3, 64, 128), 20), ((2, 2, 128, 64), 9)]
)
def test_no_barrier_is_missing(heads: tuple[int, int, int, int], num_rows: int) -> None:
    num_key, num_value, key_dim, value_dim = heads
    args = make_prefill(
        PrefillCase(
            name="barriers",
            heads=Heads(num_key=num_key, num_value=num_value, key_dim=key_dim, value_dim=value_dim),
            spans=tuple(Span(37 * row, 50 * row) for row in range(num_rows)),
            num_tokens=50 * num_rows * (num_rows - 1) // 2,
            num_rows=num_rows,
            dtype="bfloat16",
            export_every=CHUNK,
        )
    )
    assert_no_barrier_is_missing(mosaic_prefill, args.q, args.inputs, args.rows, args.pool)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_inverses_of_drawn_zero_and_repeated_keys_equal_the_float64_ones(dtype) -> None:
    rng = np.random.default_rng(0)
    drawn = rng.standard_normal((CHUNK, 2 * CHUNK))
    shared = drawn * 0.3 + rng.standard_normal(2 * CHUNK)
    strengths = np.stack([np.ones(CHUNK), rng.uniform(size=CHUNK)])
    for keys in (drawn, shared, np.ones_like(drawn), np.zeros_like(drawn)):
        keys = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-30)
        gram = keys @ keys.T
        got = invert(gram, strengths, dtype)
        for inverse, strength in zip(got, strengths, strict=True):
            want = np.linalg.inv(np.eye(CHUNK) + np.tril(strength[:, None] * gram, -1)).T
            assert (np.tril(inverse, -1) == 0).all()
            assert (np.diagonal(inverse) == 1).all()
            assert_close(inverse, want, 2e-6 if dtype == jnp.float32 else 2e-5)


def invert(gram: np.ndarray, strengths: np.ndarray, dtype) -> np.ndarray:
    """Return X^T of both heads as a kernel does for keys of a dtype, from K K^T and beta."""
    halves_of_gram, halves, parts = inverse_scratch(dtype)

    def body(gram, strengths, out, diagonal, halves, parts, here) -> None:
        plgpu.copy_gmem_to_smem(strengths, here["strengths"], here["loaded"])
        plgpu.barrier_wait(here["loaded"])
        matrix = plgpu.load(gram, layout=plgpu.Layout.WGMMA, optimized=False)
        store_gram(matrix, diagonal, interpret=not ON_GPU)
        substitute_forward(diagonal, here["strengths"], halves)
        store_parts(matrix[:, HALF:], parts["corner"])
        for member in range(PAIR):
            strength = here["strengths"].at[member, 1]
            out[member] = merge_halves(halves.at[member], strength, **parts, interpret=not ON_GPU)

    strengths_here = plgpu.SMEM((PAIR, 2, HALF), jnp.float32)
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((PAIR, CHUNK, CHUNK), jnp.float32),
        scratch_types=(halves_of_gram, halves, parts, {"strengths": strengths_here, "loaded": plgpu.Barrier()}),
    )
    operands = jnp.asarray(gram, jnp.float32), jnp.asarray(strengths, jnp.float32).reshape(PAIR, 2, HALF)
    return np.asarray(run_mosaic(lambda: run(*operands)))


def test_two_warpgroups_run_where_programs_are_more_than_multiprocessors() -> None:
    for num_states, value_dim, warpgroups in ((64, 128, 1), (66, 128, 1), (67, 128, 2), (1024, 64, 1)):
        assert prefill_tiles(num_states, value_dim).warpgroups == warpgroups


def test_tiles_that_copy_nothing_ahead_or_own_no_column_are_refused() -> None:
    with pytest.raises(ValueError, match="stages must be 2 or more"):
        PrefillTiles(warpgroups=1, stages=1)
    with pytest.raises(ValueError, match="must have 1 or 2 warpgroups"):
        PrefillTiles(warpgroups=3, stages=2)
    with pytest.raises(ValueError, match="2 warpgroups must share a head's 64 value columns"):
        prefill(make_prefill(narrow("one-row")), PrefillTiles(warpgroups=2, stages=2))


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
