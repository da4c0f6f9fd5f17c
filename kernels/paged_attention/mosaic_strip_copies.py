"""How a program of the Mosaic prefill attention moves a strip's queries, pages and results."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.mosaic import RowsOverLanes
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.mosaic_pages import Part, Ring, is_owned
from gdn_jax.kernels.paged_attention.prefill_tiles import PrefillTiles
from gdn_jax.kernels.paged_attention.tiles import TILE_QUERIES

_CLEARED_KEYS, _LANES = 32, 16  # at once; that share a key: a thread that loads has few registers


@dataclass(frozen=True, kw_only=True)
class Call:
    """What is known of a call before it runs."""

    first_key: int
    tiles: PrefillTiles
    interpret: bool


@dataclass(frozen=True, kw_only=True)
class QueryTile:
    """The queries of one warpgroup."""

    all_here: Any  # [WARPGROUPS, TILE_QUERIES, width] in shared memory; the result takes their place
    warpgroup: Array  # which of those that multiply
    token: Array  # packed index of the first token
    begin: Array  # packed tokens that are the row's, from here
    end: Array  # to before here
    head: Array  # the first query head

    @property
    def here(self) -> Any:
        """Where this warpgroup's lie in shared memory."""
        return self.all_here.at[self.warpgroup]

    def whole(self, tiles: PrefillTiles) -> Array:
        """Return whether all tokens are the row's."""
        return (self.begin <= self.token) & (self.token + tiles.tokens <= self.end)


def load_queries(tile: QueryTile, q: Any, loaded: Any, tiles: PrefillTiles) -> None:
    """Copy the tile's queries, head after head, and wait for them; those of other rows come along."""
    for member in range(tiles.heads):
        there = q.at[pl.ds(pl.multiple_of(tile.token, 8), tiles.tokens), tile.head + member]
        plgpu.copy_gmem_to_smem(there, tile.here.at[pl.ds(member * tiles.tokens, tiles.tokens)], loaded)
    plgpu.barrier_wait(loaded)


def load_pages(part: Part, tables: Any, pages: tuple[Any, Any], k: Ring, v: Ring, raw: Any, call: Call) -> None:
    """Copy the part's pages into the rings, each as soon as there is room.

    Unowned memory may hold anything, and a weight of 0 times NaN is NaN: values that no query may see are cleared here,
    where no products wait.

    Args:
        part: the pages.
        tables: block tables.
        pages: all pages of keys, and of values.
        k: ring of keys.
        v: ring of values.
        raw: barrier of values that are not cleared yet.
        call: the call.
    """
    k_pages, v_pages = pages
    stages = call.tiles.stages

    def load(index: Array, nothing: None) -> None:
        stage = lax.rem(index, jnp.int32(stages))
        page = tables[part.row, part.first + index]
        position = (part.first + index) * CHUNK
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(k.free.at[stage]))
        plgpu.copy_gmem_to_smem(k_pages.at[page, :, part.head], k.tiles.at[stage], k.here.at[stage])
        pl.when(index >= stages)(lambda: plgpu.barrier_wait(v.free.at[stage]))
        values = v_pages.at[page, :, part.head]
        has_unowned = position + CHUNK > part.num_keys
        if call.first_key:
            has_unowned |= position < call.first_key

        @pl.when(~has_unowned)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values, v.tiles.at[stage], v.here.at[stage])

        @pl.when(has_unowned)
        def _() -> None:
            plgpu.copy_gmem_to_smem(values, v.tiles.at[stage], raw)
            plgpu.barrier_wait(raw)
            _clear_unowned(part, position, v.tiles.at[stage], call)
            plgpu.barrier_arrive(v.here.at[stage])

        return nothing

    def see_out(index: Array, nothing: None) -> None:
        stage = lax.rem(index, jnp.int32(stages))
        plgpu.barrier_wait(k.free.at[stage])
        plgpu.barrier_wait(v.free.at[stage])
        return nothing

    lax.fori_loop(0, part.count, load, None)
    # Every completion of a barrier is to be waited for, those after the last copy, too.
    lax.fori_loop(jnp.maximum(part.count - stages, 0), part.count, see_out, None)


def store_strip(result: Float[Array, "queries D"], tile: QueryTile, plain: Any, out: Any, tiles: PrefillTiles) -> None:
    """Store the row's tokens of a result: one copy for each head, or token by token where others' lie among them."""
    tile.here[...] = result.astype(tile.here.dtype)

    @pl.when(tile.whole(tiles))
    def _() -> None:
        plgpu.commit_smem()
        for member in range(tiles.heads):
            there = out.at[pl.ds(pl.multiple_of(tile.token, 8), tiles.tokens), tile.head + member]
            plgpu.copy_smem_to_gmem(tile.here.at[pl.ds(member * tiles.tokens, tiles.tokens)], there)

    @pl.when(~tile.whole(tiles))
    def _() -> None:
        # Only a tile that is not swizzled can be copied from any row on.
        size = tiles.plain_rows
        layout = RowsOverLanes(size, 16, jnp.float16).matrix
        for first in range(0, TILE_QUERIES, size):
            for column in range(0, tile.here.shape[1], tiles.columns):
                columns = pl.ds(column, tiles.columns)
                values = plgpu.load(tile.here.at[pl.ds(first, size), columns], layout=layout)
                plain.at[:, columns][...] = values
            plgpu.commit_smem()

            def store_row(index: Array, nothing: None, first: int = first) -> None:
                head, place = lax.div(first + index, tiles.tokens), lax.rem(first + index, tiles.tokens)
                token = tile.token + place

                @pl.when((token >= tile.begin) & (token < tile.end))
                def _() -> None:
                    there = out.at[pl.ds(token, 1), tile.head + head]
                    plgpu.copy_smem_to_gmem(plain.at[pl.ds(index, 1)], there)

                return nothing

            lax.fori_loop(0, size, store_row, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next rows take the same place

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile, before the program ends


def store_part(
    result: Float[Array, "queries D"], weight: Float[Array, "queries"], room: tuple[Any, Any], to: tuple[Any, Any]
) -> None:
    """Store a part's result, some columns at a time, and the logarithm of its sum of weights."""
    (tile, weight_tile), (out, weights) = room, to
    weight_tile[...] = weight
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(weight_tile, weights)
    columns = tile.shape[1]
    for column in range(0, result.shape[1], columns):
        tile[...] = result[:, column : column + columns]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out.at[:, pl.ds(column, columns)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next columns take the same place


def _clear_unowned(part: Part, position: Array, values: Any, call: Call) -> None:
    """Zero the unowned values of a page whose first key stands at `position`."""
    columns = call.tiles.columns
    layout = RowsOverLanes(_CLEARED_KEYS, _LANES, values.dtype).matrix
    for first in range(0, CHUNK, _CLEARED_KEYS):
        key = plgpu.broadcasted_iota(jnp.int32, (_CLEARED_KEYS, columns), 0, layout=layout) + (position + first)
        for column in range(0, values.shape[1], columns):
            there = values.at[pl.ds(first, _CLEARED_KEYS), pl.ds(column, columns)]
            old = plgpu.load(there, layout=layout)
            there[...] = jnp.where(is_owned(part, key, call.first_key), old, jnp.zeros_like(old))
    plgpu.commit_smem()
