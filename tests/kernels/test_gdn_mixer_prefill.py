"""The mixer in prefill: every implementation against the reference; what the kernel before the delta rule lays out.

Tolerance: float32 1e-5 of the largest value, as for the delta rule. Convolution windows are moved and never computed,
so they are equal bits. Interpretation is slow, so that most packings run the kernels around the delta rule alone, whose
own tests are those of `test_gated_delta_mosaic.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mosaic_runs import ON_GPU, assert_no_barrier_is_missing, run_mosaic

from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.kernels.causal_conv1d import causal_conv1d_prefill
from gdn_jax.kernels.dispatch import Implementation, UnsupportedKernelError
from gdn_jax.kernels.gated_delta import DeltaInputs, delta_inputs
from gdn_jax.kernels.gated_delta.cases import Heads, PrefillCase, Span, make_rows
from gdn_jax.kernels.gated_delta.chunk_grid import (
    NOBODY,
    num_places,
    place_of_tokens,
    used_chunks,
)
from gdn_jax.kernels.gated_rms_norm import gated_rms_norm
from gdn_jax.kernels.gdn_mixer import (
    MixerTokens,
    MixerWeights,
    RecurrentState,
    ReplayWindow,
    gdn_mixer_prefill,
    mosaic_prefill,
)
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_inputs import prefill_inputs
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_norm import norm_from_grid
from gdn_jax.kernels.gdn_mixer.tiles import MixerTiles, check_tiles, mixer_tiles
from gdn_jax.kernels.numerics import CHUNK

# On a GPU tensor cores multiply 16 bits, and sums in another order may round to the next of 8 bits.
USUAL, TOLERANCE = ("bfloat16", 2.0**-6) if ON_GPU else ("float32", 1e-5)
EPS = 1e-6
NARROW = (1, 1, 64)
SMALL = MixerTiles(heads=1, places=32)
PACKINGS = {
    "lengths": ((0, 1), (0, 2), (0, 3), (0, 4)),
    "chunks": ((0, 63), (64, 64), (128, 65)),
    "misaligned": ((70, 50), (63, 2), (1, 1), (127, 66)),
    "exports within the window": ((62, 2), (61, 3), (63, 1), (62, 70)),
    "windows that reach back over a tile": ((30, 40), (31, 33), (94, 3)),
    "empty rows": ((0, 0), (64, 0), (70, 20), (5, 0)),
    "two chunks each": ((63, 2), (63, 2), (63, 2), (63, 2)),
    "nothing": (),
}

Arguments = tuple[MixerTokens, MixerWeights, PrefillRows, RecurrentState]


def draw(
    *spans: tuple[int, int],
    heads: tuple[int, int, int] = NARROW,
    num_tokens: int = 200,
    num_rows: int = 4,
    taps: int = 4,
    dtype: str = USUAL,
) -> Arguments:
    """Draw arguments for rows of (start, length); tokens that no row owns, and slots that no row reads, hold NaN."""
    rng = np.random.default_rng(0)
    num_key, num_value, width = heads
    case = PrefillCase(
        name="",
        heads=Heads(num_key=num_key, num_value=num_value, key_dim=width, value_dim=width),
        spans=tuple(Span(*span) for span in spans),
        num_tokens=num_tokens,
        num_rows=num_rows,
        export_every=CHUNK,
        min_slots=16,
    )
    rows, num_slots = make_rows(case)
    channels = (2 * num_key + num_value) * width
    is_read = np.isin(np.arange(num_slots), np.asarray(rows.read_slot)) & (np.arange(num_slots) != NULL_SLOT)

    def normal(*shape: int, as_dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), as_dtype)

    def poisoned(kept: np.ndarray, *shape: int, as_dtype: str = dtype) -> jax.Array:
        drawn = rng.standard_normal((len(kept), *shape))
        return jnp.asarray(np.where(kept.reshape(-1, *[1] * len(shape)), drawn, np.nan), as_dtype)

    tokens = partial(poisoned, np.asarray(rows.row_of(num_tokens)[1]))
    gate, kept = normal(1, 1, num_value, as_dtype="float32"), normal(1, 1, num_value, width)
    delta = DeltaInputs(k=normal(1, 1, num_key, width), v=kept, g=gate, beta=gate)
    return (
        MixerTokens.of(tokens(channels), tokens(num_value, width), tokens(num_value), tokens(num_value)),
        MixerWeights(
            taps=normal(taps, channels),
            a_log=normal(num_value, as_dtype="float32"),
            dt_bias=normal(num_value, as_dtype="float32"),
            norm=normal(width, as_dtype="float32"),
        ),
        rows,
        RecurrentState(
            recurrent=poisoned(is_read, num_value, width, width, as_dtype="float32"),
            conv=poisoned(is_read, taps - 1, channels),
            replay=ReplayWindow(conv=normal(1, 1, channels), delta=delta),
        ),
    )


def close(got: jax.Array | np.ndarray, want: jax.Array | np.ndarray, tolerance: float) -> None:
    """Compare relative to the largest expected magnitude; NaN must stand where it is expected, and nowhere else."""
    wide, right = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert (np.isnan(wide) == np.isnan(right)).all()
    finite = right[~np.isnan(right)]
    error = np.abs(wide[~np.isnan(right)] - finite).max(initial=0.0)
    assert error <= tolerance * np.abs(finite).max(initial=1e-30), f"error {error}"


def prefill(args: Arguments, implementation: Implementation) -> tuple[jax.Array, RecurrentState]:
    """Run a mixer: the Mosaic one by itself, since the dispatch would lead float32 to plain JAX."""
    if implementation == Implementation.MOSAIC:
        return run_mosaic(lambda: mosaic_prefill.gdn_mixer_prefill(*args, eps=EPS, interpret=not ON_GPU))
    return jax.jit(partial(gdn_mixer_prefill, eps=EPS, implementation=implementation))(*args)


@pytest.mark.parametrize("implementation", [Implementation.JAX, Implementation.MOSAIC])
class TestMixer:
    def assert_equal(self, args: Arguments, implementation: Implementation, tolerance: float) -> None:
        """Compare with the reference: outputs of owned tokens, every slot, and replay windows, which stay."""
        got, want = prefill(args, implementation), prefill(args, Implementation.REFERENCE)
        is_owned = np.asarray(args[2].row_of(args[0].packed.shape[0])[1])
        close(got[0][is_owned], want[0][is_owned], tolerance)
        close(got[1].recurrent, want[1].recurrent, tolerance)
        close(got[1].conv, want[1].conv, 0.0)
        for kept, before in zip(*map(jax.tree.leaves, (got[1].replay, args[3].replay)), strict=True):
            close(kept, before, 0.0)

    def test_rows_of_every_kind_equal_the_reference(self, implementation: Implementation) -> None:
        args = draw((62, 3), (128, 0), (70, 60), num_tokens=72, num_rows=3)
        self.assert_equal(args, implementation, TOLERANCE)

    def test_16_bit_activations_are_rounded_where_the_reference_rounds(self, implementation: Implementation) -> None:
        args = draw((64, 5), heads=(1, 2, 64), num_tokens=16, num_rows=1, dtype="bfloat16")
        self.assert_equal(args, implementation, 2.0**-6)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter runs a warpgroup as one thread")
@pytest.mark.parametrize("name", ["chunks", "misaligned", "windows that reach back over a tile"])
def test_no_barrier_is_missing(name: str) -> None:
    args = draw(*PACKINGS[name], heads=(4, 8, 128))
    assert_no_barrier_is_missing(partial(mosaic_prefill.gdn_mixer_prefill, eps=EPS), *args)


@partial(jax.jit, static_argnums=1)
def _lay_out(args: Arguments, tiles: MixerTiles) -> tuple[dict[str, jax.Array], jax.Array]:
    tokens, weights, rows, state = args
    num_key = state.replay.delta.k.shape[2]
    return prefill_inputs(tokens, weights, rows, state.conv, num_key=num_key, tiles=tiles)


def lay_out(args: Arguments, tiles: MixerTiles = SMALL) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Run the kernel before the delta rule; returns what stands in chunks that a row uses, and the windows."""
    laid, conv = run_mosaic(lambda: _lay_out(args, tiles))
    num_key = args[3].replay.delta.k.shape[2]
    parts = jnp.split(laid.pop("tokens"), (num_key, 2 * num_key), axis=1)
    laid |= dict(zip(("q", "k", "v"), parts, strict=True))
    return {name: np.asarray(x) for name, x in laid.items()}, np.asarray(conv)


def on_grid(packed: jax.Array, rows: PrefillRows) -> np.ndarray:
    """Put tokens where they stand on the grid axis, zeros elsewhere."""
    place = np.asarray(place_of_tokens(rows, packed.shape[0]))
    to = np.zeros((num_places(packed.shape[0], rows.offset.shape[0]), *packed.shape[1:]), np.float64)
    to[place[place != NOBODY]] = np.asarray(packed, np.float64)[place != NOBODY]
    return to


def assert_laid_out(args: Arguments, tiles: MixerTiles, tolerance: float) -> None:
    """Compare with the single operations' references: every chunk that a row uses, and every window."""
    tokens, weights, rows, state = args
    laid, conv = lay_out(args, tiles)
    reference = Implementation.REFERENCE
    mixed, want_conv = causal_conv1d_prefill(tokens.raw, weights.taps.T, rows, state.conv, implementation=reference)
    num_key, width = state.replay.delta.k.shape[2:]
    q, inputs = delta_inputs(
        mixed, tokens.a, tokens.b, weights.a_log, weights.dt_bias, num_key_heads=num_key, key_dim=width
    )
    close(conv, want_conv, 0.0)
    used = np.repeat(np.asarray(used_chunks(rows, len(laid["g"]))), CHUNK)
    for name, packed in {"q": q, "k": inputs.k, "v": inputs.v}.items():
        close(laid[name][used], on_grid(packed, rows)[used], tolerance)
    for name, packed in {"g": inputs.g, "beta": inputs.beta}.items():
        close(laid[name].reshape(-1, packed.shape[1])[used], on_grid(packed, rows)[used], 1e-5)


class TestInputs:
    @pytest.mark.parametrize("name", PACKINGS)
    def test_every_packing_is_laid_out_as_the_single_operations_compute_it(self, name: str) -> None:
        assert_laid_out(draw(*PACKINGS[name]), SMALL, TOLERANCE)

    @pytest.mark.parametrize(
        ("heads", "tiles", "taps"),
        [
            ((1, 3, 64), MixerTiles(heads=1, places=64), 2),
            ((1, 4, 128), MixerTiles(heads=1, places=32), 9),
            ((2, 16, 64), MixerTiles(heads=2, places=16), 3),
        ],
        ids=str,
    )
    def test_every_grouping_width_and_tile_is_laid_out_so(
        self, heads: tuple[int, int, int], tiles: MixerTiles, taps: int
    ) -> None:
        assert_laid_out(draw((62, 8), heads=heads, num_tokens=16, num_rows=1, taps=taps), tiles, TOLERANCE)

    def test_16_bit_activations_are_rounded_where_the_reference_rounds(self) -> None:
        args, tiles = (
            draw((0, 8), heads=(2, 4, 128), num_tokens=16, num_rows=1, dtype="bfloat16"),
            mixer_tiles(16, 2, 4),
        )
        assert lay_out(args, tiles)[0]["q"].dtype == jnp.bfloat16
        assert_laid_out(args, tiles, 2.0**-8)

    def test_gates_keep_their_precision_where_they_are_tiny(self) -> None:
        tokens, weights, rows, state = draw((0, 4))
        a = jnp.full((200, 1), jnp.nan, USUAL).at[:4, 0].set(jnp.asarray([-40.0, -12.0, 3.0, 60.0], USUAL))
        tokens = MixerTokens.of(tokens.raw, tokens.z, tokens.b, a)
        laid, _ = lay_out((tokens, replace(weights, dt_bias=jnp.zeros((1,))), rows, state))
        rate = np.exp(np.asarray(weights.a_log, np.float64))
        # A GPU's exponential of -40 is right to the sixth digit.
        want = -rate * np.log1p(np.exp(np.asarray(a[:4], np.float64)))
        np.testing.assert_allclose(laid["g"][0, :4], want, rtol=3e-6 if ON_GPU else 1e-6)

    def test_a_span_cut_on_the_grid_equals_the_whole_bit_for_bit(self) -> None:
        whole = draw((37, 160))
        laid, conv = lay_out(whole)
        middle, spare = int(whole[2].export_slot[0, 1]), 15  # after 128 tokens, 91 of the row
        first, first_conv = lay_out(with_rows(whole, length=[91, 0, 0, 0], write_slot=[spare, 0, 0, 0]))
        rest = with_rows(
            (*whole[:3], replace(whole[3], conv=jnp.asarray(first_conv))),
            offset=[91, 0, 0, 0],
            length=[69, 0, 0, 0],
            start=[128, 0, 0, 0],
            read_slot=[spare, 0, 0, 0],
            export_slot=np.zeros((4, 4)),
        )
        second, second_conv = lay_out(rest)
        at, begin = place_of_tokens(whole[2], 200), place_of_tokens(rest[2], 200)
        for name in ("q", "k", "v"):
            assert first[name][at[:91]].tobytes() == laid[name][at[:91]].tobytes()
            assert second[name][begin[91:160]].tobytes() == laid[name][at[91:160]].tobytes()
        for name in ("g", "beta"):
            flat, parts = laid[name].reshape(-1), (first[name].reshape(-1), second[name].reshape(-1))
            assert parts[0][at[:91]].tobytes() == flat[at[:91]].tobytes()
            assert parts[1][begin[91:160]].tobytes() == flat[at[91:160]].tobytes()
        end = int(whole[2].write_slot[0])
        assert second_conv[end].tobytes() == conv[end].tobytes()
        assert first_conv[spare].tobytes() == conv[middle].tobytes(), "an export is the window of a prefill up to there"

    def test_a_row_depends_on_neither_its_place_nor_its_neighbours(self) -> None:
        tokens, weights, rows, state = crowd = draw((64, 30), (70, 90), (0, 70))
        laid, conv = lay_out(crowd)
        begin, length = 30, 90
        order = np.r_[np.arange(200 - length), np.arange(begin, begin + length)] % 200
        moved = replace(tokens, packed=tokens.packed[order])
        only = {name: np.zeros(np.shape(value), np.int32) for name, value in vars(rows).items()}
        for name, value in vars(rows).items():
            only[name][0] = value[1]
        alone = with_rows((moved, weights, rows, state), **{**only, "offset": [200 - length, 0, 0, 0]})
        laid_alone, conv_alone = lay_out(alone)
        here, there = place_of_tokens(rows, 200)[begin : begin + length], place_of_tokens(alone[2], 200)[200 - length :]
        for name in ("q", "k", "v"):
            assert laid_alone[name][there].tobytes() == laid[name][here].tobytes()
        slots = [int(rows.write_slot[1]), *(int(slot) for slot in rows.export_slot[1] if slot != NULL_SLOT)]
        assert conv_alone[slots].tobytes() == conv[slots].tobytes()


def with_rows(args: Arguments, **changes: object) -> Arguments:
    """Return the arguments with some fields of the rows replaced."""
    changed = {name: jnp.asarray(value, jnp.int32) for name, value in changes.items()}
    return (*args[:2], replace(args[2], **changed), args[3])


class TestNorm:
    @pytest.mark.parametrize(("heads", "dtype"), [((1, 3, 64), USUAL), ((8, 16, 128), "bfloat16")], ids=str)
    def test_outputs_come_back_from_the_grid_normed_and_gated(self, heads: tuple[int, int, int], dtype: str) -> None:
        tokens, weights, rows, _ = draw((70, 5), (0, 3), heads=heads, num_tokens=10, dtype=dtype)
        drawn = np.random.default_rng(1).standard_normal((num_places(10, 4), *heads[1:]))
        place = place_of_tokens(rows, 10)
        out = np.full_like(drawn, np.nan)
        out[place[:8]] = drawn[place[:8]]
        norm: Callable[..., jax.Array] = jax.jit(partial(norm_from_grid, eps=EPS))
        got = run_mosaic(lambda: norm(jnp.asarray(out, dtype), tokens, place, weights.norm))
        want = gated_rms_norm(jnp.asarray(drawn[place], dtype), tokens.z, weights.norm, eps=EPS)
        assert got.dtype == dtype
        close(got[:8], want[:8], TOLERANCE if dtype == "float32" else 2.0**-8)
        assert (np.asarray(got[8:], np.float32) == 0).all(), "tokens that no row owns"


@pytest.mark.parametrize("num_tokens", [64, 512, 2048, 8192])
@pytest.mark.parametrize("heads", [(16, 32), (2, 8), (1, 1), (3, 6), (16, 48)])
def test_tiles_divide_heads_and_chunks_and_fill_a_device(num_tokens: int, heads: tuple[int, int]) -> None:
    tiles = mixer_tiles(num_tokens, *heads)
    assert all(count % tiles.heads == 0 for count in heads)
    assert CHUNK % tiles.places == 0
    assert tiles.places in (16, CHUNK) or num_tokens // tiles.places * (2 * heads[0] + heads[1]) >= 132


def test_tiles_whose_gates_would_not_be_made_are_refused_and_those_that_are_chosen_are_not() -> None:
    with pytest.raises(ValueError, match="must have 64 places or more for 2 value heads; got 32"):
        check_tiles(MixerTiles(heads=2, places=32), 2, 2)
    for num_value in (1, 2, 3, 4, 8, 32, 48):
        check_tiles(mixer_tiles(64, num_value, num_value), num_value, num_value)


def test_tiles_of_heads_of_two_kinds_or_of_parts_that_no_chunk_has_are_refused() -> None:
    with pytest.raises(ValueError, match="must divide the numbers of key and value heads; got 2 for 1 and 2"):
        check_tiles(MixerTiles(heads=2, places=64), 1, 2)
    with pytest.raises(ValueError, match="must have 1 or 2 heads; got 4"):
        MixerTiles(heads=4, places=64)
    with pytest.raises(ValueError, match="must have 16, 32 or 64 places; got 24"):
        MixerTiles(heads=1, places=24)


def test_what_the_mosaic_mixer_cannot_run_is_refused() -> None:
    args = draw((0, 4), num_tokens=64, dtype="float32")
    wide = (*args[:3], replace(args[3], recurrent=jnp.zeros((16, 1, 128, 64))))
    with pytest.raises(UnsupportedKernelError, match="must all be bfloat16 or all float16"):
        mosaic_prefill.gdn_mixer_prefill(*args, eps=EPS)
    with pytest.raises(UnsupportedKernelError, match="of one width for the Mosaic mixer; got 64 and 128"):
        mosaic_prefill.gdn_mixer_prefill(*wide, eps=EPS)
    many = draw((0, 4), num_tokens=64, dtype="bfloat16", taps=10)
    with pytest.raises(UnsupportedKernelError, match="at most 9 taps for the Mosaic mixer; got 10"):
        mosaic_prefill.gdn_mixer_prefill(*many, eps=EPS)
    crowd = jnp.zeros((args[3].recurrent.shape[0], 449, 64, 64), "bfloat16")
    crowded = draw((0, 4), num_tokens=64, dtype="bfloat16")
    with pytest.raises(UnsupportedKernelError, match="at most 448 value heads for the Mosaic mixer; got 449"):
        mosaic_prefill.gdn_mixer_prefill(*crowded[:3], replace(crowded[3], recurrent=crowd), eps=EPS)
