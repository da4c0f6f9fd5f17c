"""The serial part of the Mosaic prefill: states carried over the chunks of each row, outputs on the way.

    W = diag(beta) (V - diag(exp G) K S)        V' = T W        O = diag(exp G) Q S + P V'
    S <- exp(G_n) S + K^T diag(exp(G_n - G)) V'

with T, P and gates as `mosaic_chunks.py` leaves them. One program owns some value columns of one head of one row, 64
for each warpgroup that multiplies (`mosaic_chain.py`). One more warpgroup copies what they need into two rings in
shared memory, ahead of them (`mosaic_ring.py`). A turn of their loop ends with W of the next chunk: so keys are read in
two turns, all else in one.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.kernels.gated_delta.mosaic_chain import Chain, Room
from gdn_jax.kernels.gated_delta.mosaic_chunks import IN, OUT
from gdn_jax.kernels.gated_delta.mosaic_heads import FirstHeads
from gdn_jax.kernels.gated_delta.mosaic_ring import Ring, ring_room, span_of
from gdn_jax.kernels.gated_delta.tiles import COLUMNS, PrefillTiles
from gdn_jax.kernels.mosaic import swizzled
from gdn_jax.kernels.numerics import CHUNK

_KEYS = 3  # chunks whose keys are held: the one that is multiplied, the next one, and one ahead


def run_rows(
    tokens: dict[str, Float[Array, "places heads width"]],
    factors: dict[str, Float[Array, "chunks Nv ..."]],
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    first_heads: FirstHeads,
    tiles: PrefillTiles,
    interpret: bool,
) -> tuple[Float[Array, "places Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run all rows, from and into their slots.

    Args:
        tokens: `q`, `k` and `v` on the grid axis.
        factors: `inverses`, `scores` and `gates` of its chunks.
        rows: the packing, the anchors and the exports.
        pool: recurrent states; updated in place where the caller's jit donates it.
        first_heads: which heads of their arrays are those of `q`, `k` and `v`.
        tiles: how the work is cut up.
        interpret: whether this is traced for the interpreter.

    Returns:
        Outputs, anything in chunks that no row uses; the pool.

    Raises:
        ValueError: the warpgroups of a program would own more value columns than a head has.
    """
    num_places, (num_heads, value_dim, key_dim) = tokens["v"].shape[0], pool.shape[1:]
    dtype, columns = tokens["v"].dtype, COLUMNS * tiles.warpgroups
    if value_dim % columns:
        raise ValueError(
            f"{tiles.warpgroups} warpgroups must share a head's {value_dim} value columns, {COLUMNS} for each; ask for "
            f"{value_dim // COLUMNS} at most"
        )

    def matrices(count: int, width: int) -> Any:
        return plgpu.SMEM((count, CHUNK, width), dtype, transforms=swizzled(dtype))

    widths = {"q": key_dim, "inverses": CHUNK, "scores": CHUNK, "next_v": columns}
    turn = {name: matrices(tiles.stages, width) for name, width in widths.items()}
    turn |= {name: plgpu.SMEM((tiles.stages, 2, CHUNK), jnp.float32) for name in ("gates", "next_gates")}
    # Slots and heads on one axis: a copy has at most five, of which the tiles in shared memory take four.
    states = jax.new_ref(pool.reshape(-1, value_dim, key_dim))
    out = plgpu.kernel(
        _make_body(num_heads, first_heads, tiles, interpret=interpret),
        kernel_name="gdn_prefill_states",
        out_type=jax.ShapeDtypeStruct((num_places, num_heads, value_dim), dtype),
        scratch_types={
            "key": ring_room({"k": matrices(_KEYS, key_dim)}, _KEYS, tiles.warpgroups),
            "turn": ring_room(turn, tiles.stages, tiles.warpgroups),
            "leave": {
                "output": matrices(tiles.warpgroups, COLUMNS),
                "state": plgpu.SMEM((tiles.warpgroups, COLUMNS, key_dim), pool.dtype, transforms=swizzled(pool.dtype)),
            },
        },
        grid=(rows.offset.shape[0], num_heads, value_dim // columns),
        grid_names=("row", "head", "part"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(tokens, factors, vars(rows), states)
    return out, jax.freeze(states).reshape(pool.shape)


def _make_body(num_heads: int, first_heads: FirstHeads, tiles: PrefillTiles, *, interpret: bool) -> Callable[..., None]:
    """Return the program for `num_heads` value heads."""
    group = num_heads // first_heads.num_key
    width = COLUMNS * tiles.warpgroups

    def gdn_prefill_states_body(
        tokens: dict[str, Any],
        factors: dict[str, Any],
        rows: dict[str, Any],
        pool: Any,
        out: Any,
        *,
        key: dict[str, Any],
        turn: dict[str, Any],
        leave: dict[str, Any],
    ) -> None:
        row, head, part, warpgroup = (lax.axis_index(name) for name in ("row", "head", "part", "warpgroup"))
        copies = warpgroup == tiles.warpgroups
        keys, turns = Ring(**key, size=_KEYS), Ring(**turn, size=tiles.stages)

        def set_registers(count: int, action: Literal["increase", "decrease"]) -> None:
            if tiles.warpgroups > 1:  # else each thread may have 255
                plgpu.set_max_registers(count, action=action)

        @pl.when((rows["length"][row] > 0) | (rows["write_slot"][row] != NULL_SLOT))
        def _() -> None:
            @pl.when(copies)
            def _() -> None:
                set_registers(tiles.copy_registers, "decrease")
                span = span_of(rows, row)  # in either branch: held from before both it would be spilled
                key_head = lax.div(head, jnp.int32(group))
                q, k = (
                    tokens[name].at[:, first + key_head] for name, first in (("q", first_heads.q), ("k", first_heads.k))
                )
                v = tokens["v"].at[:, first_heads.v + head, pl.ds(part * width, width)]

                def factor(name: str, index: Array) -> Any:
                    return factors[name].at[span.number + index, head]

                def of_next(index: Array) -> dict[str, Any]:
                    """Return what is read of a chunk in the turn before, but for its keys."""
                    gates = factor("gates", index).at[pl.ds(IN, 2)]
                    return {"next_v": v.at[span.places(index)], "next_gates": gates}

                def copy_keys(index: Array) -> None:
                    keys.copy(index, {"k": k.at[span.places(index)]})

                def copy(index: Array, nothing: None) -> None:
                    """Copy what is read in the turn of a chunk, and keys of the next; that of the last is the last."""
                    sources = {name: factor(name, index) for name in ("inverses", "scores")}
                    sources |= {"q": q.at[span.places(index)], "gates": factor("gates", index).at[pl.ds(OUT, 2)]}
                    turns.copy(index + 1, sources | of_next(jnp.minimum(index + 1, span.count - 1)))
                    pl.when(index + 1 < span.count)(lambda: copy_keys(index + 1))
                    return nothing

                @pl.when(span.count > 0)
                def _() -> None:
                    first = jnp.int32(0)  # before the turns of chunks is one that forms W of the first alone
                    copy_keys(first)
                    turns.copy(first, of_next(first))
                    lax.fori_loop(0, span.count, copy, None)
                    keys.see_out(span.count)
                    turns.see_out(span.count + 1)

            @pl.when(~copies)
            def _() -> None:
                set_registers(tiles.chain_registers, "increase")
                span = span_of(rows, row)
                here, there = (pl.ds(first + warpgroup * COLUMNS, COLUMNS) for first in (0, part * width))
                Chain(
                    span=span,
                    here=here,
                    keys=keys,
                    turns=turns,
                    rows=rows,
                    pool=lambda slot: pool.at[slot * num_heads + head, there],
                    out=out.at[:, head, there],
                    room=Room(**{name: ref.at[warpgroup] for name, ref in leave.items()}),
                ).run(interpret=interpret)

    return gdn_prefill_states_body
