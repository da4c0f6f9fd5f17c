"""The mixer for Hopper GPUs: one kernel for all that comes before the delta rule, the delta rule's own, and the norm.

`advance_inputs` moves convolution windows along the anchors, convolves, normalises, forms the gates of the new tokens,
hands out what each row replays, and keeps the new tokens as the next replay window. One program owns a few heads of q,
of k or of v for one row of the batch, from slots and windows to outputs, so that nobody else reads what it overwrites.
All it loads is asked for before any of it is stored.
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
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import NULL_SLOT, AdvanceRows
from gdn_jax.kernels.gated_delta import DeltaInputs
from gdn_jax.kernels.gated_delta.mosaic_advance import gdn_advance
from gdn_jax.kernels.gated_delta.tiles import check_mixer
from gdn_jax.kernels.gated_rms_norm import gated_rms_norm
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens, MixerWeights
from gdn_jax.kernels.gdn_mixer.mosaic_arithmetic import convolve, normalized, sigmoid, softplus
from gdn_jax.kernels.gdn_mixer.state import RecurrentState, ReplayWindow
from gdn_jax.kernels.mosaic import HeadsOverWarps, all_arrive, everywhere


@partial(jax.jit, static_argnames=("eps",))
def gdn_mixer_advance(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: AdvanceRows,
    lane: Int[Array, "rows"],
    state: RecurrentState,
    *,
    eps: float,
) -> tuple[Float[Array, "rows T Nv dv"], RecurrentState]:
    """Fold replay windows and run new tokens; as `gdn_mixer.gdn_mixer_advance`, which says what the arguments mean.

    Raises:
        UnsupportedKernelError: for what `check_mixer` refuses.
        ValueError: there are more new tokens than a replay window holds.
    """
    num_key, key_dim = state.replay.delta.k.shape[2:]
    num_value, value_dim = state.recurrent.shape[1:3]
    check_mixer(num_key, num_value, key_dim, value_dim, state.recurrent.dtype)
    num_new, num_replay = tokens.packed.shape[1], state.replay.conv.shape[1]
    if num_new > num_replay:
        raise ValueError(f"a replay window must hold all new tokens; got {num_new} for one of {num_replay}")
    q, new, replay, conv, kept = advance_inputs(tokens, weights, rows, lane, state)
    out, recurrent = gdn_advance(q, new, replay, rows, state.recurrent)
    mixed = gated_rms_norm(out, tokens.z, weights.norm, eps=eps)
    return mixed, RecurrentState(recurrent=recurrent, conv=conv, replay=kept)


def advance_inputs(
    tokens: MixerTokens, weights: MixerWeights, rows: AdvanceRows, lane: Int[Array, "rows"], state: RecurrentState
) -> tuple[Float[Array, "rows T Nk dk"], DeltaInputs, DeltaInputs, Float[Array, "slots K1 C"], ReplayWindow]:
    """Make the arguments of `gdn_advance`, and move windows on.

    Past a row's counts, and for a row whose lane is past the last one, outputs hold anything.

    Returns:
        Queries and inputs of the new tokens; inputs of the replay windows; convolution windows of the slots; the
        replay windows of the lanes.
    """
    num_rows, num_new = tokens.packed.shape[:2]
    num_value = tokens.num_heads
    num_replay, num_key, width = state.replay.delta.k.shape[1:]
    heads = 2 * num_key + num_value
    at_once = 4 if num_key % 4 == 0 and num_value % 4 == 0 else 1

    def by_head(array: Float[Array, "*lead C"]) -> Float[Array, "*lead heads width"]:
        return array.reshape(*array.shape[:-1], -1, width)

    def inputs_of(window: int) -> dict[str, jax.ShapeDtypeStruct]:
        lead, dtype = (num_rows, window), tokens.raw.dtype
        gate = jax.ShapeDtypeStruct((*lead, num_value), jnp.float32)
        keys, values = (jax.ShapeDtypeStruct((*lead, count, width), dtype) for count in (num_key, num_value))
        return {"k": keys, "v": values, "g": gate, "beta": gate}

    kept = {"slots": by_head(state.conv), "raw": by_head(state.replay.conv), **vars(state.replay.delta)}
    refs = {name: jax.new_ref(array) for name, array in kept.items()}
    q, new, replay = plgpu.kernel(
        _make_body(HeadsOverWarps(at_once, width), num_key // at_once, tokens.first_b),
        kernel_name="gdn_advance_inputs",
        out_type=(inputs_of(num_new)["k"], inputs_of(num_new), inputs_of(num_replay)),
        grid=(num_rows, heads // at_once),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(
        by_head(tokens.packed),
        {"taps": by_head(weights.taps), "a_log": weights.a_log, "dt_bias": weights.dt_bias},
        vars(rows),
        lane,
        refs,
    )
    kept = {name: jax.freeze(ref) for name, ref in refs.items()}
    slots, raw = kept.pop("slots").reshape(state.conv.shape), kept.pop("raw").reshape(state.replay.conv.shape)
    return q, DeltaInputs(**new), DeltaInputs(**replay), slots, ReplayWindow(conv=raw, delta=DeltaInputs(**kept))


@dataclass(frozen=True, kw_only=True)
class _Gates:
    """(g, beta) of one head: of the tokens that the row replays, and of its new ones."""

    replayed: list[tuple[Array, Array]]
    new: list[tuple[Array, Array]]


def _make_body(layout: HeadsOverWarps, key_parts: int, first_b: int) -> Callable[..., None]:
    """Return the program for parts of `layout.num_heads` heads, of which q and k have `key_parts` each.

    `first_b` is the column of the packed projections in which b begins.
    """
    at_once, shape = layout.num_heads, layout.shape

    def gdn_advance_inputs_body(
        tokens: Any,
        weights: dict[str, Any],
        rows: dict[str, Any],
        lanes: Any,
        kept: dict[str, Any],
        q: Any,
        new: dict[str, Any],
        replay: dict[str, Any],
    ) -> None:
        row, part = lax.axis_index("row"), lax.axis_index("part")
        num_new, num_replay, num_taps = q.shape[1], replay["k"].shape[1], weights["taps"].shape[0]
        num_value = new["g"].shape[2]
        heads, lane = pl.ds(part * at_once, at_once), lanes[row]
        read_slot, write_slot, save_slot = rows["read_slot"][row], rows["write_slot"][row], rows["save_slot"][row]
        folded = jnp.clip(rows["num_replay"][row], 0, num_replay)
        save_after = rows["save_at"][row] - rows["folded"][row]

        def history(index: Array) -> Array:
            """Return the raw input `index` places after the first one of the slot's window."""
            in_slot = layout.load(kept["slots"].at[read_slot, jnp.minimum(index, num_taps - 2), heads])
            in_slot = jnp.where(everywhere(read_slot == NULL_SLOT, shape), jnp.zeros_like(in_slot), in_slot)
            in_lane = jnp.clip(index - (num_taps - 1), 0, num_replay - 1)
            replayed = layout.load(kept["raw"].at[lane, in_lane, heads])
            return jnp.where(everywhere(index < num_taps - 1, shape), in_slot, replayed)

        def move_window(slot: Array, window: list[Array]) -> None:
            for place, entry in enumerate(window):
                kept["slots"][slot, place, heads] = entry.astype(kept["slots"].dtype)

        def hand_over(name: str, owned: Any, replayed: list[Array], values: list[Array]) -> None:
            """Hand out what a row replays of k or v, and keep the new tokens in its place."""
            for j, old in enumerate(replayed):
                replay[name][row, j, owned] = old.astype(replay[name].dtype)
            for t, value in enumerate(values):
                new[name][row, t, owned] = value.astype(new[name].dtype)
                kept[name][lane, t, owned] = value.astype(kept[name].dtype)

        def hand_over_gates(head: Array, gates: _Gates) -> None:
            for j, (g, beta) in enumerate(gates.replayed):
                replay["g"][row, j, head], replay["beta"][row, j, head] = g, beta
            for t, (g, beta) in enumerate(gates.new):
                new["g"][row, t, head], new["beta"][row, t, head] = g, beta
                kept["g"][lane, t, head], kept["beta"][lane, t, head] = g, beta

        def column_of(t: int, column: Array) -> Array:
            return tokens[row, t, column // layout.width, column % layout.width].astype(jnp.float32)

        def gates_of(head: Array) -> _Gates:
            rate, bias = -jnp.exp(weights["a_log"][head]), weights["dt_bias"][head]
            columns = first_b + num_value + head, first_b + head
            a, b = ([column_of(t, column) for t in range(num_new)] for column in columns)
            return _Gates(
                replayed=[(kept["g"][lane, j, head], kept["beta"][lane, j, head]) for j in range(num_replay)],
                new=[(rate * softplus(a[t] + bias), sigmoid(b[t])) for t in range(num_new)],
            )

        def run(name: str, first_part: int) -> None:
            first_head = (part - first_part) * at_once  # among the heads of its kind
            owned = pl.ds(first_head, at_once)
            # All loads come before the first store, and a barrier between them: warps that hold vectors alike, and all
            # threads in the case of gates, load what others store, and one that lags would read what is new.
            own = [first_head + head for head in range(at_once)] if name == "v" else []
            gates = [gates_of(head) for head in own]
            taps = [layout.load(weights["taps"].at[j, heads]) for j in range(num_taps)]
            raw = [layout.load(tokens.at[row, t, heads]) for t in range(num_new)]
            window = [history(folded + place) for place in range(num_taps - 1)]
            saved = [history(jnp.clip(save_after, 0, num_replay) + place) for place in range(num_taps - 1)]
            replayed = [layout.load(kept[name].at[lane, j, owned]) for j in range(num_replay if name != "q" else 0)]
            all_arrive()

            is_saved = (save_slot != NULL_SLOT) & (save_after > 0) & (save_after <= folded)
            pl.when(is_saved)(lambda: move_window(save_slot, saved))
            pl.when(write_slot != NULL_SLOT)(lambda: move_window(write_slot, window))
            for t, entry in enumerate(raw):
                kept["raw"][lane, t, heads] = entry.astype(kept["raw"].dtype)

            inputs = [*window, *raw]
            mixed = [convolve(inputs[t : t + num_taps], taps).astype(q.dtype) for t in range(num_new)]
            if name == "q":
                for t, query in enumerate(mixed):
                    q[row, t, owned] = normalized(query, layout.width**-0.5).astype(q.dtype)
                return
            hand_over(name, owned, replayed, mixed if name == "v" else [normalized(key, 1.0) for key in mixed])
            for head, of_head in zip(own, gates, strict=True):
                hand_over_gates(head, of_head)

        @pl.when(lane < kept["raw"].shape[0])
        def _() -> None:
            pl.when(part < key_parts)(lambda: run("q", 0))
            pl.when((part >= key_parts) & (part < 2 * key_parts))(lambda: run("k", key_parts))
            pl.when(part >= 2 * key_parts)(lambda: run("v", 2 * key_parts))

    return gdn_advance_inputs_body
