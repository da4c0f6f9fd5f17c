"""The advance of the gated delta rule as one Pallas kernel for Hopper GPUs (Mosaic GPU), its pool updated in place.

One program owns some rows of one head's transposed state for one row of the batch. It reads them once, folds the replay
window in registers, writes them once (and once more where a save falls into the window), and runs the new tokens on
what it holds. So a step moves one read and one write of each state, whatever the number of drafts. What tokens need
comes to shared memory once, in float32, while the state is on its way.

Programs of one call run in any order. They touch disjoint parts of the pool as long as no row writes a slot that
another row reads or writes, which `AdvanceRows` demands.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.tiles import AdvanceTiles, advance_tiles, check_advance
from gdn_jax.kernels.mosaic import HeadsOverWarps, RowsOverLanes, everywhere, over_columns, over_rows, swizzled

_LANES = 8  # that share a row, whatever the tiles are: sums over keys have one order then


@partial(jax.jit, static_argnames=("tiles",))
def gdn_advance(
    q: Float[Array, "rows T Nk dk"],
    new: DeltaInputs,
    replay: DeltaInputs,
    rows: AdvanceRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    tiles: AdvanceTiles | None = None,
) -> tuple[Float[Array, "rows T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Fold replay windows and run new tokens; as `gated_delta.gdn_advance`, which says what the arguments mean.

    Args:
        q: queries of the new tokens.
        new: inputs of the new tokens.
        replay: inputs of the replay windows.
        rows: the anchors and counts.
        pool: recurrent states; updated in place where the caller's jit donates it.
        tiles: how the work is cut up; by default as `advance_tiles` chooses.

    Raises:
        UnsupportedKernelError: for widths and dtypes that `check_advance` refuses.
    """
    num_rows, num_new, num_key, key_dim = q.shape
    num_replay, num_heads, value_dim = replay.v.shape[1:]
    check_advance(num_key, num_heads, key_dim, value_dim, pool.dtype)
    tiles = tiles or advance_tiles(num_rows * num_heads, value_dim, num_new, pool.dtype)

    def staged(window: int) -> dict[str, Any]:
        shapes = {"k": (window, key_dim), "v": (window, value_dim), "decay": (window,), "beta": (window,)}
        return {name: plgpu.SMEM(shape, jnp.float32) for name, shape in shapes.items()}

    asked = {"q": plgpu.SMEM((num_new, key_dim), jnp.float32), "k.q": plgpu.SMEM((num_new,), jnp.float32)}
    states = jax.new_ref(pool)
    out = plgpu.kernel(
        _make_body(num_heads // num_key),
        kernel_name="gdn_advance",
        out_type=jax.ShapeDtypeStruct((num_rows, num_new, num_heads, value_dim), new.v.dtype),
        scratch_types={
            "tile": plgpu.SMEM((tiles.value_rows, key_dim), pool.dtype, transforms=swizzled(pool.dtype)),
            "loaded": plgpu.Barrier(),
            "outputs": plgpu.SMEM((num_new, tiles.value_rows), new.v.dtype),
            "folding": staged(num_replay),
            "running": staged(num_new) | asked,
        },
        grid=(num_rows, num_heads, value_dim // tiles.value_rows),
        grid_names=("row", "head", "part"),
        # Each thread of CUDA writes those places of the tile that it has read, in one layout, and `commit_smem` stands
        # between all else that is written to shared memory and its readers. A state has been read from global memory
        # before it is written there. No interpreter sees a barrier that is missing: tests on a GPU do.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(q, vars(new), vars(replay), vars(rows), states)  # dicts: the dataclasses take arrays alone, and no references
    return out, jax.freeze(states)


def _make_body(group: int) -> Callable[..., None]:
    """Return the program for `group` value heads per key head; its arguments are those of `gdn_advance` as refs."""

    def gdn_advance_body(
        q: Any,
        new: dict[str, Any],
        replay: dict[str, Any],
        rows: dict[str, Any],
        pool: Any,
        out: Any,
        *,
        tile: Any,
        loaded: Any,
        outputs: Any,
        folding: dict[str, Any],
        running: dict[str, Any],
    ) -> None:
        value_rows, key_dim = tile.shape
        layout = RowsOverLanes(value_rows, _LANES, tile.dtype)
        row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        key_head, owned = head // group, pl.ds(part * value_rows, value_rows)
        read_slot, write_slot, save_slot = rows["read_slot"][row], rows["write_slot"][row], rows["save_slot"][row]
        num_new = jnp.clip(rows["num_new"][row], 0, out.shape[1])
        num_replay = jnp.clip(rows["num_replay"][row], 0, replay["k"].shape[1])
        # Replayed tokens; a value out of range is never reached.
        save_after = rows["save_at"][row] - rows["folded"][row]

        def stage_tokens() -> None:
            """Bring all that the tokens need to shared memory, in float32; k . q of the new ones, too."""
            entries = []
            for kind, refs in ((replay, folding), (new, running)):
                for places, lanes in _groups(kind["k"].shape[1], key_dim):
                    key = _load(kind["k"].at[row, places, key_head], lanes)
                    entries.append((refs["k"].at[places], key))
                    if kind is new:
                        query = _load(q.at[row, places, key_head], lanes)
                        entries.append((refs["q"].at[places], query))
                        entries.append((refs["k.q"].at[places], jnp.sum(key * query, axis=-1)))
                # Of the whole head: a thread loads no less than 4 bytes, which a tile of 32 numbers has not for each.
                for places, lanes in _groups(*kind["v"].shape[1::2]):
                    entries.append((refs["v"].at[places], _load(kind["v"].at[row, places, head], lanes)))
                for place in range(kind["g"].shape[1]):
                    entries.append((refs["decay"].at[place], jnp.exp(kind["g"][row, place, head])))
                    entries.append((refs["beta"].at[place], kind["beta"][row, place, head]))
            for ref, values in entries:  # once all loads are under way
                ref[...] = values
            plgpu.commit_smem()

        def load_state() -> Array:
            plgpu.barrier_wait(loaded)
            return plgpu.load(tile, layout=layout.matrix).astype(jnp.float32)

        def store_state(slot: Array, state: Array) -> None:
            tile[...] = state.astype(tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, pool.at[slot, head, owned])

        def decayed(token: dict[str, Any], state: Array) -> tuple[Array, Array, Array]:
            """Return the state after a token's decay, its key, and beta e."""
            key = plgpu.load(token["k"], layout=layout.row)
            value = plgpu.load(token["v"].at[owned], layout=layout.column)
            state = state * everywhere(token["decay"][...], state.shape)
            return state, key, token["beta"][...] * (value - _read(state, key))

        def save(state: Array) -> None:
            store_state(save_slot, state)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile will be written again

        def fold(place: Array, state: Array) -> Array:
            state = _updated(*decayed(_at(folding, place), state))
            pl.when((save_slot != NULL_SLOT) & (place + 1 == save_after))(lambda: save(state))
            return state

        def run(place: Array, state: Array) -> Array:
            token = _at(running, place)
            query = plgpu.load(token["q"], layout=layout.row)
            state, key, error = decayed(token, state)
            # S^T q after the update, from the state before it, so that both sums are under way together.
            outputs[place] = (_read(state, query) + error * token["k.q"][...]).astype(outputs.dtype)
            return _updated(state, key, error)

        def leave_blank(place: Array, nothing: None) -> None:
            outputs[place] = plgpu.layout_cast(jnp.zeros((value_rows,), outputs.dtype), layout.column)

        # A padding row moves nothing. The slot to read is asked for here so that it is known as early as the others.
        @pl.when((read_slot != NULL_SLOT) | (write_slot != NULL_SLOT) | (num_replay > 0) | (num_new > 0))
        def _() -> None:
            pl.when(read_slot != NULL_SLOT)(
                lambda: plgpu.copy_gmem_to_smem(pool.at[read_slot, head, owned], tile, loaded)
            )
            stage_tokens()
            zeros = plgpu.layout_cast(jnp.zeros((value_rows, key_dim), jnp.float32), layout.matrix)
            state = lax.cond(read_slot == NULL_SLOT, lambda: zeros, load_state)
            state = lax.fori_loop(0, num_replay, fold, state)
            pl.when(write_slot != NULL_SLOT)(lambda: store_state(write_slot, state))
            lax.fori_loop(0, num_new, run, state)

        lax.fori_loop(num_new, out.shape[1], leave_blank, None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(outputs, out.at[row, :, head, owned])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # a program that ends gives up its shared memory

    return gdn_advance_body


def _at(refs: dict[str, Any], index: Array) -> dict[str, Any]:
    """Return the entries of one token."""
    return {name: ref.at[index] for name, ref in refs.items()}


def _groups(count: int, width: int) -> Iterator[tuple[Any, Any]]:
    """Cut `count` vectors into fours, a warp for each, and single ones; yields their places and their layout."""
    fours = count - count % 4
    for first in range(0, fours, 4):
        yield pl.ds(first, 4), HeadsOverWarps(4, width).matrix
    for single in range(fours, count):
        yield single, HeadsOverWarps(1, width).matrix.reduce(0)


def _load(ref: Any, lanes: Any) -> Float[Array, "*tokens width"]:
    """Load vectors from global memory, in float32."""
    return plgpu.load(ref, layout=lanes, optimized=False).astype(jnp.float32)


def _read(state: Float[Array, "value_rows dk"], key: Float[Array, "dk"]) -> Float[Array, "value_rows"]:
    """Return S^T k of the rows."""
    return jnp.sum(state * over_rows(key, state.shape), axis=1)


def _updated(
    state: Float[Array, "value_rows dk"], key: Float[Array, "dk"], error: Float[Array, "value_rows"]
) -> Float[Array, "value_rows dk"]:
    """Return S + k error^T, transposed."""
    return state + over_columns(error, state.shape) * over_rows(key, state.shape)
