"""The advance of the gated delta rule as one Pallas kernel for Hopper GPUs (Mosaic GPU), its pool updated in place.

One program owns `value_rows` rows of one head's transposed state for one row of the batch. It reads them once, folds
the replay window in registers, writes them once (and once more where a save falls into the window), and runs the new
tokens on what it holds. So a step moves one read and one write of each state, whatever the number of drafts.

Programs of one call run in any order. They touch disjoint parts of the pool as long as no row writes a slot that
another row reads or writes, which `AdvanceRows` demands.
"""

from collections.abc import Callable
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
from gdn_jax.kernels.mosaic import RowsOverLanes, everywhere, over_columns, over_rows, swizzled


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
    value_rows = (tiles or advance_tiles(pool.dtype)).value_rows
    dtype = q.dtype
    states = jax.new_ref(pool)
    out = plgpu.kernel(
        _make_body(num_heads // num_key, value_rows),
        kernel_name="gdn_advance",
        out_type=jax.ShapeDtypeStruct((num_rows, num_new, num_heads, value_dim), dtype),
        scratch_types={
            "tile": plgpu.SMEM((value_rows, key_dim), pool.dtype, transforms=swizzled(pool.dtype)),
            "queries": plgpu.SMEM((num_new, key_dim), dtype),
            "keys": plgpu.SMEM((num_new, key_dim), dtype),
            "values": plgpu.SMEM((num_new, value_rows), dtype),
            "outputs": plgpu.SMEM((num_new, value_rows), dtype),
            "old_keys": plgpu.SMEM((num_replay, key_dim), dtype),
            "old_values": plgpu.SMEM((num_replay, value_rows), dtype),
            "loaded": plgpu.Barrier(num_arrivals=6),  # one for each of the six above
        },
        grid=(num_rows, num_heads, value_dim // value_rows),
        grid_names=("row", "head", "part"),
    )(q, vars(new), vars(replay), vars(rows), states)  # dicts: the dataclasses take arrays alone, and no references
    return out, jax.freeze(states)


def _make_body(group: int, value_rows: int) -> Callable[..., None]:
    """Return the program for `group` value heads per key head; its arguments are those of `gdn_advance` as refs."""
    layout = RowsOverLanes(value_rows)

    def take(ref: Any, index: Any, lanes: Any) -> Array:
        return plgpu.load(ref.at[index], layout=lanes).astype(jnp.float32)

    def gdn_advance_body(
        q: Any,
        new: dict[str, Any],
        replay: dict[str, Any],
        rows: dict[str, Any],
        pool: Any,
        out: Any,
        *,
        tile: Any,
        queries: Any,
        keys: Any,
        values: Any,
        outputs: Any,
        old_keys: Any,
        old_values: Any,
        loaded: Any,
    ) -> None:
        row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
        owned = pl.ds(part * value_rows, value_rows)
        read_slot, write_slot, save_slot = rows["read_slot"][row], rows["write_slot"][row], rows["save_slot"][row]
        num_new = jnp.clip(rows["num_new"][row], 0, outputs.shape[0])
        num_replay = jnp.clip(rows["num_replay"][row], 0, old_keys.shape[0])
        save_after = (
            rows["save_at"][row] - rows["folded"][row]
        )  # replayed tokens; a value out of range is never reached

        def load() -> Array:
            key_head = head // group
            plgpu.copy_gmem_to_smem(pool.at[read_slot, head, owned], tile, loaded)
            plgpu.copy_gmem_to_smem(replay["k"].at[row, :, key_head], old_keys, loaded)
            plgpu.copy_gmem_to_smem(replay["v"].at[row, :, head, owned], old_values, loaded)
            plgpu.copy_gmem_to_smem(q.at[row, :, key_head], queries, loaded)
            plgpu.copy_gmem_to_smem(new["k"].at[row, :, key_head], keys, loaded)
            plgpu.copy_gmem_to_smem(new["v"].at[row, :, head, owned], values, loaded)
            plgpu.barrier_wait(loaded)
            state = plgpu.load(tile, layout=layout.matrix).astype(jnp.float32)
            # A choice, not a product: the null slot may hold NaN.
            return jnp.where(everywhere(read_slot == NULL_SLOT, state.shape), jnp.zeros_like(state), state)

        def store(slot: Array, state: Array) -> None:
            tile[...] = state.astype(tile.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, pool.at[slot, head, owned])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile may be written again, and the program may end

        def fold(index: Array, state: Array) -> Array:
            k, v = take(old_keys, index, layout.row), take(old_values, index, layout.column)
            decay, beta = jnp.exp(replay["g"][row, index, head]), replay["beta"][row, index, head]
            error = beta * (v - decay * _read(state, k))
            state = _updated(state, decay, k, error)
            pl.when((save_slot != NULL_SLOT) & (index + 1 == save_after))(lambda: store(save_slot, state))
            return state

        def run(index: Array, state: Array) -> Array:
            k, v = take(keys, index, layout.row), take(values, index, layout.column)
            query = take(queries, index, layout.row)
            decay, beta = jnp.exp(new["g"][row, index, head]), new["beta"][row, index, head]
            error = beta * (v - decay * _read(state, k))
            # S^T q after the update, from the state before it: nobody needs the state after the last token.
            output = decay * _read(state, query) + error * jnp.sum(k * query)
            outputs[index] = output.astype(outputs.dtype)
            return lax.cond(index + 1 < num_new, lambda: _updated(state, decay, k, error), lambda: state)

        def leave_blank(index: Array, nothing: None) -> None:
            outputs[index] = plgpu.layout_cast(jnp.zeros((value_rows,), outputs.dtype), layout.column)

        @pl.when((write_slot != NULL_SLOT) | (num_replay > 0) | (num_new > 0))  # a padding row moves nothing
        def _() -> None:
            state = lax.fori_loop(0, num_replay, fold, load())
            pl.when(write_slot != NULL_SLOT)(lambda: store(write_slot, state))
            lax.fori_loop(0, num_new, run, state)

        lax.fori_loop(num_new, outputs.shape[0], leave_blank, None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(outputs, out.at[row, :, head, owned])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return gdn_advance_body


def _read(state: Float[Array, "value_rows dk"], key: Float[Array, "dk"]) -> Float[Array, "value_rows"]:
    """Return S^T k of the rows."""
    return jnp.sum(state * over_rows(key, state.shape), axis=1)


def _updated(
    state: Float[Array, "value_rows dk"],
    decay: Float[Array, ""],
    key: Float[Array, "dk"],
    error: Float[Array, "value_rows"],
) -> Float[Array, "value_rows dk"]:
    """Return decay S + k error^T, transposed."""
    return decay * state + over_columns(error, state.shape) * over_rows(key, state.shape)
