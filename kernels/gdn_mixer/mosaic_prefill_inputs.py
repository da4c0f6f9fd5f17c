"""What comes before the delta rule in prefill, in one pass over the packed projections (Pallas, Mosaic GPU).

    u = conv(raw);  [q | k | v] = silu(u);  q, k normalised, q scaled;  g = -exp(A_log) softplus(a + dt_bias)
    beta = sigmoid(b);  convolution windows from the read slots to the write slots and the exports

Results go to the grid axis of `gated_delta/chunk_grid.py`, where the delta rule's kernels read them as they lie. A
program does one or two heads of q, of k or of v for a tile: some places of one chunk (`mosaic_prefill_tiles.py`).
Programs of one part more than there are of heads make the gates (`mosaic_prefill_gates.py`).

A slot may be read and written in one call, by one row. All reads of a row's initial window are therefore made by one
program for each part, which writes the final window when it is done: the one that has the row's first token. It does
the next tile too, should that begin so soon after this token that its window reaches back before the row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import NULL_SLOT, PrefillRows
from gdn_jax.kernels.gated_delta.chunk_grid import NOBODY, num_places, row_of_chunks
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens, MixerWeights
from gdn_jax.kernels.gdn_mixer.mosaic_arithmetic import normalized
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_channels import Channels, Groups
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_gates import gates_room, run_gates
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_tiles import Row, row_at
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_windows import Windows
from gdn_jax.kernels.gdn_mixer.tiles import MixerTiles
from gdn_jax.kernels.mosaic import HeadsOverWarps
from gdn_jax.kernels.numerics import CHUNK

Laid = dict[str, Float[Array, "..."]]  # tokens [places, heads, width]; g and beta [chunks, CHUNK, Nv]


def prefill_inputs(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: PrefillRows,
    conv: Float[Array, "slots K1 C"],
    *,
    num_key: int,
    tiles: MixerTiles,
) -> tuple[Laid, Float[Array, "slots K1 C"]]:
    """Make the arguments of `gdn_prefill_on_grid`, and move windows on.

    Args:
        tokens: packed projections; those of tokens that no row owns may be anything.
        weights: the layer's small parameters.
        rows: the packing, the anchors and the exports.
        conv: convolution windows; updated in place where the caller's jit donates it.
        num_key: key heads.
        tiles: how the work is cut up.

    Returns:
        `tokens` on the grid axis, heads of q, of k and of v side by side, zeros where no token stands, anything in
        chunks that no row uses; `g` and `beta` of the same tokens, float32, by chunk of that axis; the windows.
    """
    num_tokens, num_rows = tokens.packed.shape[0], rows.offset.shape[0]
    num_value, width = tokens.num_heads, tokens.width
    places, num_heads = num_places(num_tokens, num_rows), 2 * num_key + num_value
    groups = Groups(tiles.places, width)

    def by_head(array: Float[Array, "*lead C"]) -> Float[Array, "*lead heads width"]:
        return array.reshape(*array.shape[:-1], -1, width)

    packed = by_head(tokens.packed)
    laid = jax.ShapeDtypeStruct((places // groups.length, groups.length, num_heads, width), packed.dtype)
    gate = jax.ShapeDtypeStruct((places // CHUNK, CHUNK, num_value), jnp.float32)
    barriers = groups.room(tiles.heads, packed.dtype)
    inputs = barriers.pop("inputs")
    windows = jax.new_ref(by_head(conv))
    laid_out, g, beta = plgpu.kernel(
        _make_body(tiles, groups, num_key // tiles.heads),
        kernel_name="gdn_prefill_inputs",
        out_type=(laid, gate, gate),
        scratch_types={
            "room": plgpu.RefUnion(inputs, gates_room(tiles.places, num_value, width, packed.dtype)),
            "gates_loaded": plgpu.Barrier(),
            **barriers,
        },
        grid=(places // tiles.places, num_heads // tiles.heads + 1),
        grid_names=("tile", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(
        packed,
        {"taps": by_head(weights.taps), "a_log": weights.a_log, "dt_bias": weights.dt_bias},
        vars(rows),
        row_of_chunks(rows, num_tokens),
        windows,
    )
    on_grid = laid_out.reshape(places, num_heads, width)
    return {"tokens": on_grid, "g": g, "beta": beta}, jax.freeze(windows).reshape(conv.shape)


def _make_body(tiles: MixerTiles, groups: Groups, key_parts: int) -> Callable[..., None]:
    """Return the program; q and k have `key_parts` parts each."""
    per_chunk = CHUNK // tiles.places

    def gdn_prefill_inputs_body(
        tokens: Any,
        weights: dict[str, Any],
        rows: dict[str, Any],
        row_of: Any,
        slots: Any,
        laid: Any,
        g: Any,
        beta: Any,
        *,
        room: Any,
        loaded: Any,
        loaded_apart: Any,
        gates_loaded: Any,
    ) -> None:
        tile, part = lax.axis_index("tile"), lax.axis_index("part")
        first_gates = laid.shape[2] // tiles.heads
        index = row_of[lax.div(tile, jnp.int32(per_chunk))]

        def finish(x: Array) -> Array:
            """Normalise heads of q and of k, and scale those of q: all that parts them from heads of v."""
            scale = jnp.where(part < key_parts, groups.width**-0.5, 1.0)
            return lax.cond(part < 2 * key_parts, lambda: normalized(x, scale).astype(x.dtype), lambda: x)

        def run_heads(row: Row) -> None:
            """Do this program's heads of q, of k or of v."""
            first_head = part * tiles.heads
            heads = pl.ds(first_head, tiles.heads)
            layout = HeadsOverWarps(tiles.heads, groups.width)
            windows = Windows(tokens=tokens, slots=slots, heads=heads, layout=layout)
            channels = Channels(
                groups=groups,
                windows=windows,
                taps=weights["taps"],
                first_head=first_head,
                inputs=room[0],
                loaded=loaded,
                loaded_apart=loaded_apart,
                out=laid.at[:, :, heads],
                finish=finish,
            )

            def run(number: Array, nothing: None) -> None:
                channels.run(row, row.tile(number))
                return nothing

            own = row.own_tile(tile)
            numbers = row.tiles_of_program(own, windows.reach)
            lax.fori_loop(*numbers, run, None)
            final = jnp.where(own == row.entry, row.write_slot, NULL_SLOT)
            windows.put_into_slots(row, numbers, final, rows["export_slot"])

        def run_tile_gates(row: Row) -> None:
            own = row.own_tile(tile)
            chunk = row.span.number + lax.div(own, jnp.int32(per_chunk))
            to = {"g": g.at[chunk], "beta": beta.at[chunk]}
            has_places = own < row.span.count * per_chunk
            pl.when(has_places)(lambda: run_gates(tokens, row, row.tile(own), weights, to, room[1], gates_loaded))

        @pl.when(index != NOBODY)
        def _() -> None:
            row = row_at(rows, index, tiles.places)
            pl.when(part < first_gates)(lambda: run_heads(row))
            pl.when(part == first_gates)(lambda: run_tile_gates(row))

    return gdn_prefill_inputs_body
