"""The chain of products that carries a state from chunk to chunk: what a warpgroup of the serial kernel does.

    V' = T W        S <- exp(G_n) S + K^T diag(exp(G_n - G)) V'        W = diag(beta) (V - diag(exp G) K S) of the next
    O = diag(exp G) Q S + P V'

It holds S^T `[64, dk]` of its value columns in float32 registers, from the read slot to the write slot. All it
multiplies is transposed: each left operand is the result before it, rounded in registers, and each right operand lies
in shared memory as it was copied there. So nothing on the way from one state to the next passes through shared memory,
and a warpgroup waits for nothing but copies and its own products.

What is not on that way runs beside it: the product of the queries while V' is rounded, that of the scores while the new
state is. Whatever a warp asks of shared memory waits behind the products that it has under way, since both take one
queue. So gates and values are loaded before the first product of a chunk, or behind the very product that they are used
with, and outputs are stored before the first product of the next chunk. A turn of the loop therefore begins with W
known, when no product is under way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT
from gdn_jax.kernels.gated_delta.mosaic_chunks import BETA, IN, OUT
from gdn_jax.kernels.gated_delta.mosaic_ring import Ring, Span
from gdn_jax.kernels.gated_delta.tiles import COLUMNS
from gdn_jax.kernels.mosaic import add_product, everywhere, over_rows
from gdn_jax.kernels.numerics import CHUNK

_MATRIX = plgpu.Layout.WGMMA
_SHAPE = (COLUMNS, CHUNK)
_Columns = Float[Array, "columns places"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Carried:
    """What a warpgroup holds at the beginning of a chunk."""

    state: Float[Array, "columns dk"]  # S^T
    operand: Float[Array, "columns dk"]  # the same, rounded: once, for the products of the keys and of the queries
    wanted: _Columns  # W^T, rounded
    output: _Columns  # O^T of the chunk before, rounded
    slot: Array  # that the state is exported to, or the null slot


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What a chunk brings to W but for its product."""

    values: _Columns  # (beta V)^T
    decays: _Columns  # beta exp G, in every row

    def wanted(self, at_keys: _Columns) -> _Columns:
        """Return W^T from S^T K^T."""
        return self.values - self.decays * at_keys


@dataclass(frozen=True, kw_only=True)
class _Following:
    """What a turn reads of the next chunk, in shared memory: keys, values, and IN and BETA."""

    k: Any
    v: Any
    gates: Any

    def given(self) -> _Given:
        """Load what it brings to W."""
        values = plgpu.load(self.v.transpose((1, 0)), layout=_MATRIX).astype(jnp.float32)
        decay_in, beta = (_gate(self.gates, which - IN) for which in (IN, BETA))
        return _Given(values=over_rows(beta, _SHAPE) * values, decays=over_rows(beta * decay_in, _SHAPE))


@dataclass(frozen=True, kw_only=True)
class _Aside:
    """What is done for a chunk beside its products, each where there is time.

    Attributes:
        store_output: brings O^T of the chunk before to shared memory.
        send: has it copied from there, and the state that was exported, if one was.
        export_slot: loads the slot that the chunk's end is exported to.
        following: the next chunk, once it has arrived.
    """

    store_output: Callable[[], None]
    send: Callable[[], None]
    export_slot: Callable[[], Array]
    following: Callable[[], _Following]


@dataclass(frozen=True, kw_only=True)
class Room:
    """Shared memory of a warpgroup, through which its results leave: they are copied from there while it goes on.

    Attributes:
        output: of a chunk, `[CHUNK, columns]`.
        state: `[columns, dk]`, of the pool's dtype.
    """

    output: Any
    state: Any


def run_chunks(
    span: Span,
    here: Any,
    keys: Ring,
    turns: Ring,
    rows: dict[str, Any],
    pool: Callable[[Array], Any],
    out: Any,
    room: Room,
    *,
    interpret: bool,
) -> None:
    """Carry a row's state from its read slot over all chunks to its write slot, for some value columns.

    Args:
        span: the row's chunks.
        here: the columns, of those of a stage.
        keys: where those of each chunk arrive.
        turns: where the rest arrives by turns: `q`, `inverses`, `scores` and `gates` (OUT and IN) of a chunk, `next_v`
            and `next_gates` (IN and BETA) of the one after it. The first turn has but the latter, of the first chunk.
        rows: fields of `PrefillRows`, in global memory.
        pool: the recurrent state of these columns in a slot, `[columns, dk]` in global memory.
        out: receives outputs of these columns on the grid axis, `[places, columns]` in global memory.
        room: through which results leave.
        interpret: whether this is traced for the interpreter.
    """
    row, num_boundaries = span.row, rows["export_slot"].shape[1]
    # Both now: until the end a slot takes fewer registers than its address.
    read_slot, write_slot = rows["read_slot"][row], rows["write_slot"][row]

    def clear() -> None:
        """Wait until all that was sent has left shared memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store_state(slot: Array, state: Array) -> None:
        @pl.when(slot != NULL_SLOT)
        def _() -> None:
            clear()
            room.state[...] = state.astype(room.state.dtype)

    def send_state(slot: Array) -> None:
        pl.when(slot != NULL_SLOT)(lambda: plgpu.copy_smem_to_gmem(room.state, pool(slot)))

    def export_slot(index: Array) -> Array:
        if num_boundaries == 0:
            return jnp.int32(NULL_SLOT)
        is_boundary = (index < num_boundaries) & ((index + 1) * CHUNK <= span.end)
        slot = rows["export_slot"][row, jnp.minimum(index, num_boundaries - 1)]
        return jnp.where(is_boundary, slot, NULL_SLOT)

    def store_output(output: Array) -> None:
        clear()
        room.output.transpose((1, 0))[...] = output

    def send(index: Array, slot: Array) -> None:
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room.output, out.at[span.places(index)])
        send_state(slot)

    def following(index: Array) -> _Following:
        """Return a chunk to the turn before, once its keys have come; past the end is anything that nobody reads."""
        pl.when(index < span.count)(lambda: keys.wait(index))
        here_too = turns.arrays(index)
        k = keys.arrays(jnp.minimum(index, span.count - 1))["k"]
        return _Following(k=k, v=here_too["next_v"].at[:, here], gates=here_too["next_gates"])

    def run_chunk(index: Array, carry: _Carried) -> _Carried:
        turn = index + 1
        aside = _Aside(
            store_output=lambda: store_output(carry.output),
            send=lambda: pl.when(index > 0)(lambda: send(index - 1, carry.slot)),
            export_slot=lambda: export_slot(index),
            following=lambda: following(index + 1),
        )
        run = _run_interpreted if interpret else _run_overlapped
        turns.wait(turn)
        carry = run(carry, {**turns.arrays(turn), **keys.arrays(index)}, aside)
        keys.release(index)
        turns.release(turn)
        store_state(carry.slot, carry.state)
        return carry

    def run_all(state: Array) -> Array:
        operand, first = state.astype(out.dtype), jnp.int32(0)
        turns.wait(first)
        chunk = following(first)
        given = chunk.given()
        nothing = jnp.zeros(_SHAPE, jnp.float32)
        at_keys = add_product(nothing, operand, chunk.k.transpose((1, 0)), interpret=interpret)
        turns.release(first)
        wanted = given.wanted(at_keys).astype(out.dtype)
        output, slot = nothing.astype(out.dtype), jnp.int32(NULL_SLOT)  # of no chunk: not sent
        carry = _Carried(state=state, operand=operand, wanted=wanted, output=output, slot=slot)
        carry = lax.fori_loop(0, span.count, run_chunk, carry)
        store_output(carry.output)
        send(span.count - 1, carry.slot)
        return carry.state

    state = plgpu.load(pool(read_slot), layout=_MATRIX, optimized=False)
    # A choice, not a product: the null slot may hold NaN.
    state = jnp.where(everywhere(read_slot == NULL_SLOT, state.shape), jnp.zeros_like(state), state).astype(jnp.float32)
    state = lax.cond(span.count > 0, run_all, lambda state: state, state)
    store_state(write_slot, state)
    plgpu.commit_smem()
    send_state(write_slot)
    clear()  # before the program ends, and its shared memory with it


def _run_interpreted(carry: _Carried, chunk: dict[str, Any], aside: _Aside) -> _Carried:
    """Return what is held after a chunk; one product after the other."""
    dtype, nothing = carry.operand.dtype, jnp.zeros(_SHAPE, jnp.float32)

    def add(sums: Array, left: Array, right: Any) -> Array:
        return add_product(sums, left.astype(dtype), right, interpret=True)

    aside.store_output()
    aside.send()
    written = add(nothing, carry.wanted, chunk["inverses"])
    at_queries = add(nothing, carry.operand, chunk["q"].transpose((1, 0)))
    kept = over_rows(_gate(chunk["gates"], OUT), _SHAPE) * written
    state = add(_decay_of(chunk) * carry.state, kept, chunk["k"])
    output = add(over_rows(_gate(chunk["gates"], IN), _SHAPE) * at_queries, written, chunk["scores"])
    following = aside.following()
    wanted = following.given().wanted(add(nothing, state, following.k.transpose((1, 0))))
    return _Carried(
        state=state,
        operand=state.astype(dtype),
        wanted=wanted.astype(dtype),
        output=output.astype(dtype),
        slot=aside.export_slot(),
    )


def _run_overlapped(carry: _Carried, chunk: dict[str, Any], aside: _Aside) -> _Carried:
    """Return the same, with products under way that nothing waits for yet."""
    dtype, sums = carry.operand.dtype, plgpu.WGMMAAccumulatorRef
    aside.store_output()
    decay, decay_out = lax.optimization_barrier((_decay_of(chunk), _gate(chunk["gates"], OUT)))

    def write(written: Any, queries: Any) -> _Carried:
        plgpu.wgmma(written, carry.wanted, chunk["inverses"])
        plgpu.wgmma(queries, carry.operand, chunk["q"].transpose((1, 0)))
        aside.send()
        start = lax.optimization_barrier(decay * carry.state)  # lest it be done when the product is, and not beside it
        total = _when_done(written, but=1)
        kept = (over_rows(decay_out, _SHAPE) * total).astype(dtype)
        decay_in = _gate(chunk["gates"], IN)  # waits for the queries' product, as its use does

        def add(after: Any, output: Any) -> _Carried:
            after[...] = start
            plgpu.wgmma(after, kept, chunk["k"])
            rounded = total.astype(dtype)
            output[...] = over_rows(decay_in, _SHAPE) * _when_done(queries, but=1)
            plgpu.wgmma(output, rounded, chunk["scores"])
            slot, following = aside.export_slot(), aside.following()
            state = _when_done(after, but=1)
            operand = state.astype(dtype)
            done = _when_done(output, but=0).astype(dtype)  # now: registers do not last for it and the keys' product

            def read(keys: Any) -> _Carried:
                plgpu.wgmma(keys, operand, following.k.transpose((1, 0)))
                given = following.given()  # waits for this product, as its use does
                wanted = given.wanted(_when_done(keys, but=0)).astype(dtype)
                return _Carried(state=state, operand=operand, wanted=wanted, output=done, slot=slot)

            return pl.run_scoped(read, sums(_SHAPE))

        return pl.run_scoped(add, sums((COLUMNS, carry.state.shape[1])), sums(_SHAPE))

    return pl.run_scoped(write, sums(_SHAPE), sums(_SHAPE))


def _when_done(sums: Any, *, but: int) -> Array:
    """Return an accumulator once all products but the newest ones are done."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(sums, wait_n=but))


def _gate(gates: Any, which: int) -> Float[Array, "places"]:
    return plgpu.load(gates.at[which], layout=_MATRIX.reduce(0), optimized=False)


def _decay_of(chunk: dict[str, Any]) -> Array:
    """Return the decay of a whole chunk."""
    return chunk["gates"][IN, CHUNK - 1]
