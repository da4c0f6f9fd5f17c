"""Where rows of a step read and write state: read anchor, write anchor, saves and exports.

A *slot* is one index into a pool `[slots, ...]`. Slot 0 is the null slot: loading it gives zeros,
storing to it is skipped. A step reads a row's state at `read_slot` and writes it at `write_slot`, so
that restoring or forking a state needs no copy. No row may write a slot that another row of the same
call reads or writes, nor one slot twice: kernels write by copies that overtake each other.

Two row shapes exist. `PrefillRows` packs spans of any length along one token axis; `AdvanceRows` has a
fixed window of tokens per row and first folds the replay window of the previous step.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from gdn_jax.kernels.agreement import Described
from gdn_jax.kernels.numerics import CHUNK

NULL_SLOT = 0
# Rows are built as NumPy arrays and become device arrays at the jit boundary; kernels see only the latter.
if TYPE_CHECKING:
    AnyArray = Array
else:
    AnyArray = Array | np.ndarray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PrefillRows:
    """Rows packed along a token axis: row r owns tokens `offset[r] : offset[r] + length[r]`.

    Rows stand in ascending, non-overlapping order; a padding row has length 0 and null slots. A row of
    length 0 with real slots moves its state from `read_slot` to `write_slot` unchanged.

    Attributes:
        offset: first token of the row on the packed axis.
        length: tokens of the row.
        start: position in its sequence of the row's first token; places the row on the absolute chunk grid.
        read_slot: state before the first token; the null slot means zeros.
        write_slot: state after the last token goes there.
        export_slot: entry (r, j) receives the state after exactly `boundary(r, j)` tokens of the sequence,
            where `boundary(r, j) = (start[r] // CHUNK + 1 + j) * CHUNK`; the null slot means no export. A boundary
            beyond the row's end is not exported, whatever its entry says. It must not be the row's own `read_slot`,
            which programs of the mixer may yet have to read when others export.
    """

    offset: Int[AnyArray, "rows"]
    length: Int[AnyArray, "rows"]
    start: Int[AnyArray, "rows"]
    read_slot: Int[AnyArray, "rows"]
    write_slot: Int[AnyArray, "rows"]
    export_slot: Int[AnyArray, "rows boundaries"]

    def described(self) -> dict[str, Described]:
        """Return every field with its dimensions, for `agreement.py`."""
        dimensions = dict.fromkeys(vars(self), "rows") | {"export_slot": "rows boundaries"}
        return {f"rows.{name}": Described(vars(self)[name], of, dtype="int32") for name, of in dimensions.items()}

    def row_of(self, num_tokens: int) -> tuple[Int[Array, "T"], Bool[Array, "T"]]:
        """Return each packed token's row, and whether any row owns it (the row of an unowned token is in range)."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        owns = (token >= self.offset[None]) & (token < (self.offset + self.length)[None])
        return jnp.argmax(owns, axis=1).astype(jnp.int32), owns.any(axis=1)

    def positions(self, num_tokens: int) -> Int[Array, "T"]:
        """Return each packed token's position in its own sequence; 0 for an unowned token."""
        row, owned = self.row_of(num_tokens)
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        return jnp.where(owned, self.start[row] + token - self.offset[row], 0)

    def last_token(self) -> Int[Array, "rows"]:
        """Return the packed index of each row's last token, clipped to 0 for an empty row."""
        return jnp.maximum(self.offset + self.length - 1, 0)

    def boundaries(self) -> tuple[Int[Array, "rows boundaries"], Int[Array, "rows boundaries"]]:
        """Return the absolute token count of each export entry, and its slot (null where the row ends before it)."""
        index = jnp.arange(self.export_slot.shape[1], dtype=jnp.int32)
        count = (self.start[:, None] // CHUNK + 1 + index[None]) * CHUNK
        inside = count <= (self.start + self.length)[:, None]
        return count, jnp.where(inside, self.export_slot, NULL_SLOT)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AdvanceRows:
    """Rows of a decode or verify step: fold the replay window, then run up to T new tokens.

    The state at `read_slot` holds `folded` tokens. Folding `num_replay` tokens gives the state that is
    written to `write_slot`; new tokens run on a copy that never reaches the pool. A padding row has null
    slots and zero counts.

    Attributes:
        read_slot: the state after `folded` tokens.
        write_slot: receives the state after `folded + num_replay` tokens.
        save_slot: receives the state after `save_at` tokens iff `folded < save_at <= folded + num_replay`; never the
            row's own write slot.
        save_at: an absolute token count.
        folded: tokens that the state at `read_slot` holds.
        num_replay: tokens of the replay window to fold, 0..R.
        num_new: new tokens to run, 0..T; 0 is a closing row.
    """

    read_slot: Int[AnyArray, "rows"]
    write_slot: Int[AnyArray, "rows"]
    save_slot: Int[AnyArray, "rows"]
    save_at: Int[AnyArray, "rows"]
    folded: Int[AnyArray, "rows"]
    num_replay: Int[AnyArray, "rows"]
    num_new: Int[AnyArray, "rows"]

    def described(self) -> dict[str, Described]:
        """Return every field with its dimensions, for `agreement.py`."""
        return {f"rows.{name}": Described(array, "rows", dtype="int32") for name, array in vars(self).items()}

    def saves(self) -> Bool[Array, "rows"]:
        """Return which rows store a state at `save_slot` in this call."""
        reached = (self.folded < self.save_at) & (self.save_at <= self.folded + self.num_replay)
        return reached & (self.save_slot != NULL_SLOT)

    def start(self) -> Int[Array, "rows"]:
        """Return the position of each row's first new token."""
        return self.folded + self.num_replay

    def positions(self, window: int) -> Int[Array, "rows T"]:
        """Return the position of every token of the window, real or padding."""
        return self.start()[:, None] + jnp.arange(window, dtype=jnp.int32)[None]

    def is_new(self, window: int) -> Bool[Array, "rows T"]:
        """Return which tokens of the window are real."""
        return jnp.arange(window, dtype=jnp.int32)[None] < self.num_new[:, None]


def load_slots(pool: Shaped[Array, "slots ..."], slot: Int[Array, "*rows"]) -> Shaped[Array, "..."]:
    """Return the pool's entries at `slot`, `[*rows, ...]`; zeros for the null slot whatever it holds."""
    index = slot.reshape(slot.shape + (1,) * (pool.ndim - 1))
    return jnp.where(index == NULL_SLOT, jnp.zeros((), pool.dtype), pool[slot])


def store_slots(
    pool: Shaped[Array, "slots ..."], slot: Int[Array, "*rows"], value: Float[Array, "..."]
) -> Shaped[Array, "slots ..."]:
    """Return the pool with `value` `[*rows, ...]` cast and stored at `slot`; entries for the null slot are dropped."""
    index = jnp.where(slot == NULL_SLOT, pool.shape[0], slot)  # out of range, so that mode="drop" skips it
    return pool.at[index].set(value.astype(pool.dtype), mode="drop")


def carry_last_prefill(
    vectors: Float[Array, "T H"], rows: PrefillRows, pool: Float[Array, "slots H"]
) -> Float[Array, "slots H"]:
    """Move "the vector of the newest token" along a prefill's anchors: write slot and exports.

    Used for the target's final hidden vector, from which MTP starts at a hit. The entry of a state after m
    tokens is the vector of token m - 1.
    """
    before = load_slots(pool, rows.read_slot)
    last = jnp.where((rows.length > 0)[:, None], vectors[rows.last_token()], before.astype(vectors.dtype))
    count, slot = rows.boundaries()
    token = jnp.clip(rows.offset[:, None] + count - rows.start[:, None] - 1, 0, vectors.shape[0] - 1)
    pool = store_slots(pool, slot, vectors[token])
    return store_slots(pool, rows.write_slot, last)


def carry_last_advance(
    replay: Float[Array, "rows R H"], rows: AdvanceRows, pool: Float[Array, "slots H"]
) -> Float[Array, "slots H"]:
    """Move "the vector of the newest token" along an advance's anchors: write slot and save slot."""
    before = load_slots(pool, rows.read_slot).astype(replay.dtype)[:, None]
    after = jnp.concatenate([before, replay], axis=1)  # entry i is the vector after folding i tokens
    row = jnp.arange(after.shape[0])
    save_index = jnp.clip(rows.save_at - rows.folded, 0, replay.shape[1])
    pool = store_slots(pool, jnp.where(rows.saves(), rows.save_slot, NULL_SLOT), after[row, save_index])
    return store_slots(pool, rows.write_slot, after[row, rows.num_replay])
