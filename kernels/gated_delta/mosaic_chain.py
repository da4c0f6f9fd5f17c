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
from functools import partial
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


@dataclass(frozen=True, kw_only=True)
class Chain:
    """What a warpgroup carries over a row: the state of some value columns of one head.

    Attributes:
        span: the row's chunks.
        here: the columns, of those of a stage.
        keys: where those of each chunk arrive.
        turns: where the rest arrives by turns: `q`, `inverses`, `scores` and `gates` (OUT and IN) of a chunk, `next_v`
            and `next_gates` (IN and BETA) of the one after it. The first turn has but the latter, of the first chunk.
        rows: fields of `PrefillRows`, in global memory.
        pool: the recurrent state of these columns in a slot, `[columns, dk]` in global memory.
        out: receives outputs of these columns on the grid axis, `[places, columns]` in global memory.
        room: through which results leave.
    """

    span: Span
    here: Any
    keys: Ring
    turns: Ring
    rows: dict[str, Any]
    pool: Callable[[Array], Any]
    out: Any
    room: Room

    def run(self, *, interpret: bool) -> None:
        """Carry the state from its read slot over all chunks to its write slot; `interpret`: for the interpreter."""
        # Both now: until the end a slot takes fewer registers than its address.
        read_slot, write_slot = (self.rows[name][self.span.row] for name in ("read_slot", "write_slot"))
        state = plgpu.load(self.pool(read_slot), layout=_MATRIX, optimized=False)
        # A choice, not a product: the null slot may hold NaN.
        is_null = everywhere(read_slot == NULL_SLOT, state.shape)
        state = jnp.where(is_null, jnp.zeros_like(state), state).astype(jnp.float32)
        over_all = partial(self._over_all, interpret=interpret)
        state = lax.cond(self.span.count > 0, over_all, lambda state: state, state)
        self._store_state(write_slot, state)
        plgpu.commit_smem()
        self._send_state(write_slot)
        _clear()  # before the program ends, and its shared memory with it

    def _over_all(self, state: Array, *, interpret: bool) -> Array:
        """Return the state after all chunks."""
        dtype, first, nothing = self.out.dtype, jnp.int32(0), jnp.zeros(_SHAPE, jnp.float32)
        operand = state.astype(dtype)
        self.turns.wait(first)
        chunk = self._following(first)
        given = chunk.given()
        at_keys = add_product(nothing, operand, chunk.k.transpose((1, 0)), interpret=interpret)
        self.turns.release(first)
        wanted = given.wanted(at_keys).astype(dtype)
        output, slot = nothing.astype(dtype), jnp.int32(NULL_SLOT)  # of no chunk: not sent
        carry = _Carried(state=state, operand=operand, wanted=wanted, output=output, slot=slot)
        carry = lax.fori_loop(0, self.span.count, partial(self._over_one, interpret=interpret), carry)
        self._store_output(carry.output)
        self._send(self.span.count - 1, carry.slot)
        return carry.state

    def _over_one(self, index: Array, carry: _Carried, *, interpret: bool) -> _Carried:
        """Return what is held after a chunk."""
        turn = index + 1
        aside = _Aside(
            store_output=lambda: self._store_output(carry.output),
            send=lambda: pl.when(index > 0)(lambda: self._send(index - 1, carry.slot)),
            export_slot=lambda: self._export_slot(index),
            following=lambda: self._following(index + 1),
        )
        run = _run_interpreted if interpret else _run_overlapped
        self.turns.wait(turn)
        carry = run(carry, {**self.turns.arrays(turn), **self.keys.arrays(index)}, aside)
        self.keys.release(index)
        self.turns.release(turn)
        self._store_state(carry.slot, carry.state)
        return carry

    def _following(self, index: Array) -> _Following:
        """Return a chunk to the turn before, once its keys have come; past the end is anything that nobody reads."""
        pl.when(index < self.span.count)(lambda: self.keys.wait(index))
        arrays = self.turns.arrays(index)
        k = self.keys.arrays(jnp.minimum(index, self.span.count - 1))["k"]
        return _Following(k=k, v=arrays["next_v"].at[:, self.here], gates=arrays["next_gates"])

    def _export_slot(self, index: Array) -> Array:
        """Return the slot that a chunk's end is exported to, or the null slot."""
        slots = self.rows["export_slot"]
        num_boundaries = slots.shape[1]
        if num_boundaries == 0:
            return jnp.int32(NULL_SLOT)
        is_boundary = (index < num_boundaries) & ((index + 1) * CHUNK <= self.span.end)
        slot = slots[self.span.row, jnp.minimum(index, num_boundaries - 1)]
        return jnp.where(is_boundary, slot, NULL_SLOT)

    def _store_output(self, output: Array) -> None:
        _clear()
        self.room.output.transpose((1, 0))[...] = output

    def _store_state(self, slot: Array, state: Array) -> None:
        @pl.when(slot != NULL_SLOT)
        def _() -> None:
            _clear()
            self.room.state[...] = state.astype(self.room.state.dtype)

    def _send(self, index: Array, slot: Array) -> None:
        """Have a chunk's output copied from where it was stored, and the state that was exported, if one was."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.room.output, self.out.at[self.span.places(index)])
        self._send_state(slot)

    def _send_state(self, slot: Array) -> None:
        pl.when(slot != NULL_SLOT)(lambda: plgpu.copy_smem_to_gmem(self.room.state, self.pool(slot)))


def _clear() -> None:
    """Wait until all that was sent has left shared memory."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


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
