"""The chain of products that carries a state from chunk to chunk: what a warpgroup of the serial kernel does.

It holds S^T `[64, dk]` of its value columns in float32 registers, from the read slot to the write slot. All it
multiplies is transposed: each left operand is the result before it, rounded in registers, and each right operand lies
in shared memory as it was copied there. So nothing on the way from one state to the next passes through shared memory,
and a warpgroup waits for nothing but copies and its own products.

What is not on that way runs beside it: the product of the queries while W is formed, that of the scores while the new
state is rounded, and the storing of a chunk's outputs while the first products of the next one run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT
from gdn_jax.kernels.gated_delta.mosaic_chunks import BETA, IN, OUT
from gdn_jax.kernels.gated_delta.mosaic_cuts import ROWS, is_cut
from gdn_jax.kernels.gated_delta.tiles import COLUMNS
from gdn_jax.kernels.mosaic import RowsOverLanes, add_product, everywhere, over_rows, store_apart
from gdn_jax.kernels.numerics import CHUNK

TOKENS = 32  # of a cut chunk, that are stored together
_MATRIX = plgpu.Layout.WGMMA
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_PLAIN = RowsOverLanes(TOKENS, 16, jnp.float16).matrix  # a token's columns side by side, whichever the 16-bit dtype
_SHAPE = (COLUMNS, CHUNK)


@dataclass(frozen=True, kw_only=True)
class Span:
    """The chunks of one row."""

    row: Array
    count: Array  # of chunks; 0 for an empty row
    number: Array  # of the first chunk
    token: Array  # packed index of the token at its first place
    lead: Array  # places of it before the row's first token
    end: Array  # places from its first one to one past the row's last token

    def places(self, index: Array) -> tuple[Array, Array]:
        """Return the first place of a chunk that holds a token, and one past the last."""
        return jnp.maximum(self.lead - index * CHUNK, 0), jnp.minimum(self.end - index * CHUNK, CHUNK)


def span_of(rows: dict[str, Any], row: Array) -> Span:
    """Return the chunks of a row, numbered as by `chunk_slots`; for inside a kernel."""
    offset, length = rows["offset"][row], rows["length"][row]
    lead = rows["start"][row] & (CHUNK - 1)
    count = lax.div(lead + length + (CHUNK - 1), jnp.int32(CHUNK))
    return Span(
        row=row,
        count=jnp.where(length > 0, count, 0),
        number=lax.div(offset, jnp.int32(CHUNK)) + 2 * row,
        token=offset - lead,
        lead=lead,
        end=lead + length,
    )


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The value columns that a warpgroup owns."""

    head: Array
    there: Any  # of the head
    here: Any  # of a stage's values


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Chunks in shared memory: arrays by name `[size, ...]`, and two barriers for each stage."""

    stage: dict[str, Any]
    here: Any  # completes when a chunk has arrived
    free: Any  # completes when all warpgroups have multiplied with it
    size: int

    def at(self, index: Array) -> Array:
        """Return the stage of a chunk."""
        return lax.rem(index, jnp.int32(self.size))


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where a warpgroup's outputs go, and the two tiles through which they go there."""

    out: Any  # [T, Nv, dv] in global memory
    swizzled: Any  # [CHUNK, COLUMNS], as tensor cores leave it, to be copied whole
    plain: Any  # [TOKENS, COLUMNS], some tokens of a cut chunk, to be copied one after the other


def run_chunks(
    span: Span, columns: Columns, ring: Ring, rows: dict[str, Any], pool: Any, outputs: Outputs, *, interpret: bool
) -> None:
    """Carry a row's state from its read slot over all chunks to its write slot, for some columns."""
    row, num_boundaries = span.row, rows["export_slot"].shape[1]
    read_slot = rows["read_slot"][row]

    def store_state(slot: Array, state: Array) -> None:
        @pl.when(slot != NULL_SLOT)
        def _() -> None:
            store_apart(pool.at[slot, columns.head, columns.there], state.astype(pool.dtype))

    def export(index: Array, state: Array) -> None:
        if num_boundaries:
            is_boundary = (index < num_boundaries) & ((index + 1) * CHUNK <= span.end)
            slot = rows["export_slot"][row, jnp.minimum(index, num_boundaries - 1)]
            store_state(jnp.where(is_boundary, slot, NULL_SLOT), state)

    def run_chunk(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        state, operand, output = carry
        stage = ring.at(index)
        plgpu.barrier_wait(ring.here.at[stage])

        def store_last_output() -> None:
            pl.when(index > 0)(lambda: _store_output(span, index - 1, columns, output, outputs))

        chunk = {name: ref.at[stage] for name, ref in ring.stage.items()}
        run = _run_interpreted if interpret else _run_overlapped
        state, operand, output = run(state, operand, chunk, columns.here, store_last_output)
        plgpu.barrier_arrive(ring.free.at[stage])
        export(index, state)
        return state, operand, output.astype(outputs.out.dtype)

    state = plgpu.load(pool.at[read_slot, columns.head, columns.there], layout=_MATRIX, optimized=False)
    # A choice, not a product: the null slot may hold NaN.
    state = jnp.where(everywhere(read_slot == NULL_SLOT, state.shape), jnp.zeros_like(state), state).astype(jnp.float32)
    output = plgpu.layout_cast(jnp.zeros(_SHAPE, outputs.out.dtype), _MATRIX)
    carry = state, state.astype(outputs.out.dtype), output
    state, _, output = lax.fori_loop(0, span.count, run_chunk, carry)

    pl.when(span.count > 0)(lambda: _store_output(span, span.count - 1, columns, output, outputs))
    store_state(rows["write_slot"][row], state)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tiles, before the program ends


def _run_interpreted(
    state: Float[Array, "columns dk"],
    operand: Float[Array, "columns dk"],
    chunk: dict[str, Any],
    here: Any,
    store_last_output: Callable[[], None],
) -> tuple[Float[Array, "columns dk"], Float[Array, "columns dk"], Float[Array, "columns places"]]:
    """Return S^T after a chunk, the same rounded for products, and O^T, one product after the other."""
    decay_in, decay_out, beta = (over_rows(_gate(chunk, which), _SHAPE) for which in (IN, OUT, BETA))
    nothing = jnp.zeros(_SHAPE, jnp.float32)

    def add(sums: Array, left: Array, right: Any) -> Array:
        return add_product(sums, left.astype(operand.dtype), right, interpret=True)

    at_keys = add(nothing, operand, chunk["k"].transpose((1, 0)))
    at_queries = add(nothing, operand, chunk["q"].transpose((1, 0)))
    store_last_output()
    wanted = beta * (_values(chunk, here).astype(jnp.float32) - decay_in * at_keys)
    written = add(nothing, wanted, chunk["inverses"])
    after = add(_decay_of(chunk) * state, decay_out * written, chunk["k"])
    return after, after.astype(operand.dtype), add(decay_in * at_queries, written, chunk["scores"])


def _run_overlapped(
    state: Float[Array, "columns dk"],
    operand: Float[Array, "columns dk"],
    chunk: dict[str, Any],
    here: Any,
    store_last_output: Callable[[], None],
) -> tuple[Float[Array, "columns dk"], Float[Array, "columns dk"], Float[Array, "columns places"]]:
    """Return the same, with products under way that nothing waits for yet."""
    dtype, sums = operand.dtype, plgpu.WGMMAAccumulatorRef

    def read(keys: Any, queries: Any) -> tuple[Array, Array, Array, Array]:
        plgpu.wgmma(keys, operand, chunk["k"].transpose((1, 0)))
        plgpu.wgmma(queries, operand, chunk["q"].transpose((1, 0)))
        store_last_output()
        decay_in, values = _gate(chunk, IN), _values(chunk, here)
        wanted = values.astype(jnp.float32) - over_rows(decay_in, _SHAPE) * _when_done(keys, but=1)
        wanted = (over_rows(_gate(chunk, BETA), _SHAPE) * wanted).astype(dtype)

        def write(written: Any) -> tuple[Array, Array, Array, Array]:
            plgpu.wgmma(written, wanted, chunk["inverses"])
            # Barriers, lest what follows be done when the product is, and not beside it.
            decay_out, start = lax.optimization_barrier((_gate(chunk, OUT), _decay_of(chunk) * state))
            at_queries = lax.optimization_barrier(over_rows(decay_in, _SHAPE) * _when_done(queries, but=1))
            written = _when_done(written, but=0)
            kept = (over_rows(decay_out, _SHAPE) * written).astype(dtype)  # first: the next state waits for it
            return kept, written.astype(dtype), at_queries, start

        return pl.run_scoped(write, sums(_SHAPE))

    kept, written, at_queries, start = pl.run_scoped(read, sums(_SHAPE), sums(_SHAPE))

    def add(after: Any, output: Any) -> tuple[Array, Array, Array]:
        after[...], output[...] = start, at_queries
        plgpu.wgmma(after, kept, chunk["k"])
        plgpu.wgmma(output, written, chunk["scores"])
        state = _when_done(after, but=1)
        return state, lax.optimization_barrier(state.astype(dtype)), _when_done(output, but=0)

    return pl.run_scoped(add, sums((COLUMNS, state.shape[1])), sums(_SHAPE))


def _when_done(sums: Any, *, but: int) -> Array:
    """Return an accumulator once all products but the newest ones are done."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(sums, wait_n=but))


def _gate(chunk: dict[str, Any], which: int) -> Float[Array, "places"]:
    """Return IN, OUT or BETA of a chunk."""
    return plgpu.load(chunk["gates"].at[which], layout=_MATRIX.reduce(0), optimized=False)


def _values(chunk: dict[str, Any], here: Any) -> Float[Array, "columns places"]:
    """Return V^T."""
    values = plgpu.load(chunk["v"].at[:, here].transpose((1, 0)), layout=_TRANSPOSED)
    return plgpu.layout_cast(values, _MATRIX)


def _decay_of(chunk: dict[str, Any]) -> Array:
    """Return the decay of a whole chunk."""
    return chunk["gates"][IN, CHUNK - 1]


def _store_output(
    span: Span, index: Array, columns: Columns, output: Float[Array, "columns places"], outputs: Outputs
) -> None:
    """Store a chunk's O from O^T: one copy, or token by token where the chunk is cut."""
    first, end = span.places(index)
    token, out = span.token + index * CHUNK, outputs.out
    cut, there = is_cut(token, first, end), pl.ds(pl.multiple_of(token, ROWS), CHUNK)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored last is to have left the tile
    outputs.swizzled.transpose((1, 0))[...] = plgpu.layout_cast(output, _TRANSPOSED)

    @pl.when(~cut)
    def _() -> None:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(outputs.swizzled, out.at[there, columns.head, columns.there])

    @pl.when(cut)
    def _() -> None:
        # Only a swizzled tile takes O^T as O without conflicts; only a plain one can be copied from any token on.
        for begin in range(0, CHUNK, TOKENS):
            outputs.plain[...] = plgpu.load(outputs.swizzled.at[pl.ds(begin, TOKENS)], layout=_PLAIN)
            plgpu.commit_smem()

            def store_token(place: Array, nothing: None, begin: int = begin) -> None:
                to = out.at[pl.ds(token + place, 1), columns.head, columns.there]
                plgpu.copy_smem_to_gmem(outputs.plain.at[pl.ds(place - begin, 1)], to)
                return nothing

            lax.fori_loop(jnp.maximum(first, begin), jnp.minimum(end, begin + TOKENS), store_token, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next tokens take the same place
