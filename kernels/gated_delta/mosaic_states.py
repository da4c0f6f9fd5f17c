"""The serial part of the Mosaic prefill: states carried over the chunks of each row, outputs on the way.

    W = diag(beta) (V - diag(exp G) K S)        V' = T W        O = diag(exp G) Q S + P V'
    S <- exp(G_n) S + K^T diag(exp(G_n - G)) V'

with T, P and gates as `mosaic_chunks.py` leaves them. One program owns some value columns of one head of one row, 64
for each warpgroup that multiplies (`mosaic_chain.py`). One more warpgroup copies what they need into a ring in shared
memory, some chunks ahead. The programs of one row more than there are fill the outputs that no row owns with zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.kernels.gated_delta.mosaic_chain import TOKENS, Columns, Outputs, Ring, Span, run_chunks, span_of
from gdn_jax.kernels.gated_delta.mosaic_cuts import ROWS, is_cut
from gdn_jax.kernels.gated_delta.mosaic_heads import FirstHeads
from gdn_jax.kernels.gated_delta.tiles import COLUMNS, PrefillTiles
from gdn_jax.kernels.mosaic import swizzled
from gdn_jax.kernels.mosaic_blanks import fill_gaps
from gdn_jax.kernels.numerics import CHUNK

_COPIES = 6  # of a stage: k, q, v, T, P, gates


def run_rows(
    tokens: dict[str, Float[Array, "T heads width"]],
    cuts: dict[str, Float[Array, "cuts places heads width"]],
    factors: dict[str, Float[Array, "chunks Nv ..."]],
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    first_heads: FirstHeads,
    tiles: PrefillTiles,
    interpret: bool,
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run all rows, from and into their slots.

    Args:
        tokens: packed `q`, `k` and `v`.
        cuts: the same of cut chunks.
        factors: `inverses`, `scores` and `gates` of all chunks.
        rows: the packing, the anchors and the exports.
        pool: recurrent states; updated in place where the caller's jit donates it.
        first_heads: which heads of their arrays are those of `q`, `k` and `v`.
        tiles: how the work is cut up.
        interpret: whether this is traced for the interpreter.

    Returns:
        Outputs, zeros for tokens that no row owns; the pool.
    """
    num_tokens, (num_heads, value_dim, key_dim) = tokens["v"].shape[0], pool.shape[1:]
    columns, stages, dtype = COLUMNS * tiles.warpgroups, tiles.stages, tokens["v"].dtype
    matrix = plgpu.SMEM((stages, CHUNK, CHUNK), dtype, transforms=swizzled(dtype))
    keys = plgpu.SMEM((stages, CHUNK, key_dim), dtype, transforms=swizzled(dtype))
    states = jax.new_ref(pool)
    out = plgpu.kernel(
        _make_body(num_heads // first_heads.num_key, first_heads, tiles, interpret=interpret),
        kernel_name="gdn_prefill_states",
        out_type=jax.ShapeDtypeStruct((num_tokens, num_heads, value_dim), dtype),
        scratch_types={
            "stage": {
                "k": keys,
                "q": keys,
                "v": plgpu.SMEM((stages, CHUNK, columns), dtype, transforms=swizzled(dtype)),
                "inverses": matrix,
                "scores": matrix,
                "gates": plgpu.SMEM((stages, 3, CHUNK), jnp.float32),
            },
            "here": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=stages),
            "swizzled_tiles": plgpu.SMEM((tiles.warpgroups, CHUNK, COLUMNS), dtype, transforms=swizzled(dtype)),
            "plain_tiles": plgpu.SMEM((tiles.warpgroups, TOKENS, COLUMNS), dtype),
        },
        grid=(rows.offset.shape[0] + 1, num_heads, value_dim // columns),
        grid_names=("row", "head", "part"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(tokens, cuts, factors, vars(rows), states)
    return out, jax.freeze(states)


def _make_body(group: int, first_heads: FirstHeads, tiles: PrefillTiles, *, interpret: bool) -> Any:
    """Return the program for `group` value heads per key head."""

    def gdn_prefill_states_body(
        tokens: dict[str, Any],
        cuts: dict[str, Any],
        factors: dict[str, Any],
        rows: dict[str, Any],
        pool: Any,
        out: Any,
        *,
        stage: dict[str, Any],
        here: Any,
        free: Any,
        swizzled_tiles: Any,
        plain_tiles: Any,
    ) -> None:
        row, head, part, warpgroup = (lax.axis_index(name) for name in ("row", "head", "part", "warpgroup"))
        num_rows, loads = rows["offset"].shape[0], warpgroup == tiles.warpgroups
        first_column = (part * tiles.warpgroups + warpgroup) * COLUMNS
        columns = Columns(head=head, there=pl.ds(first_column, COLUMNS), here=pl.ds(warpgroup * COLUMNS, COLUMNS))
        ring = Ring(stage=stage, here=here, free=free, size=tiles.stages)

        @pl.when((row == num_rows) & ~loads)
        def _() -> None:
            fill_gaps(rows, out.at[:, head, columns.there], plain_tiles.at[warpgroup])

        @pl.when(row < num_rows)
        def _() -> None:
            span = span_of(rows, row)

            @pl.when((span.count > 0) | (rows["write_slot"][row] != NULL_SLOT))
            def _() -> None:
                @pl.when(loads)
                def _() -> None:
                    if tiles.warpgroups > 1:  # else each thread may have 255 registers
                        plgpu.set_max_registers(tiles.load_registers, action="decrease")
                    key_head = lax.div(head, jnp.int32(group))
                    heads = {"k": first_heads.k + key_head, "v": first_heads.v + head, "q": first_heads.q + key_head}
                    _load_chunks(tokens, cuts, factors, span, ring, (heads, head, part))

                @pl.when(~loads)
                def _() -> None:
                    if tiles.warpgroups > 1:
                        plgpu.set_max_registers(tiles.chain_registers, action="increase")
                    swizzled_tile, plain_tile = swizzled_tiles.at[warpgroup], plain_tiles.at[warpgroup]
                    outputs = Outputs(out=out, swizzled=swizzled_tile, plain=plain_tile)
                    run_chunks(span, columns, ring, rows, pool, outputs, interpret=interpret)

    return gdn_prefill_states_body


def _load_chunks(
    tokens: dict[str, Any],
    cuts: dict[str, Any],
    factors: dict[str, Any],
    span: Span,
    ring: Ring,
    place: tuple[dict[str, Array], Array, Array],
) -> None:
    """Copy a row's chunks into the ring, each as soon as there is room."""
    heads, head, part = place
    key_dim, width = ring.stage["k"].shape[2], ring.stage["v"].shape[2]
    columns = {"k": pl.ds(0, key_dim), "v": pl.ds(part * width, width), "q": pl.ds(0, key_dim)}

    def load(index: Array, nothing: None) -> None:
        stage = ring.at(index)
        pl.when(index >= ring.size)(lambda: plgpu.barrier_wait(ring.free.at[stage]))
        number, token = span.number + index, span.token + index * CHUNK

        def copy(name: str, source: Any) -> None:
            plgpu.copy_gmem_to_smem(source, ring.stage[name].at[stage], ring.here.at[stage])

        cut = is_cut(token, *span.places(index))

        @pl.when(~cut)
        def _() -> None:
            there = pl.ds(pl.multiple_of(token, ROWS), CHUNK)
            for name, of_head in heads.items():
                copy(name, tokens[name].at[there, of_head, columns[name]])

        @pl.when(cut)
        def _() -> None:
            for name, of_head in heads.items():
                copy(name, cuts[name].at[number, :, of_head, columns[name]])

        for name, factor in factors.items():
            copy(name, factor.at[number, head])
        return nothing

    def see_out(index: Array, nothing: None) -> None:
        plgpu.barrier_wait(ring.free.at[ring.at(index)])
        return nothing

    lax.fori_loop(0, span.count, load, None)
    # Every completion of a barrier is to be waited for, those after the last copy, too.
    lax.fori_loop(jnp.maximum(span.count - ring.size, 0), span.count, see_out, None)
