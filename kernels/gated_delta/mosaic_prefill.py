"""The prefill of the gated delta rule on Hopper GPUs (Pallas, Mosaic GPU), its pool updated in place.

Two kernels: `mosaic_chunks.py` makes what each chunk contributes whatever the state, for all chunks side by side, and
`mosaic_states.py` carries the states through each row. Both read tokens on the grid axis of `chunk_grid.py`. A chunk's
numbers follow from the row's own tokens alone, never from where the row lies or from its neighbours.
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta.chunk_grid import num_places, place_of_tokens, take, token_of_places, used_chunks
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.mosaic_chunks import chunk_factors
from gdn_jax.kernels.gated_delta.mosaic_heads import FirstHeads
from gdn_jax.kernels.gated_delta.mosaic_states import run_rows
from gdn_jax.kernels.gated_delta.tiles import PrefillTiles, check_operands, check_prefill, prefill_tiles
from gdn_jax.kernels.numerics import CHUNK


@partial(jax.jit, static_argnames=("tiles", "interpret"))
def gdn_prefill(
    q: Float[Array, "T Nk dk"],
    inputs: DeltaInputs,
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run packed spans; as `gated_delta.gdn_prefill`, which says what the arguments mean.

    Tokens are laid out on the grid axis first, and outputs brought back. A caller who writes tokens there himself, as
    the mixer does, calls `gdn_prefill_on_grid`.

    Args:
        q: queries, bfloat16 or float16 like keys and values.
        inputs: keys, values and gates.
        rows: the packing, the anchors and the exports.
        pool: recurrent states; updated in place where the caller's jit donates it.
        tiles: how the work is cut up; by default as `prefill_tiles` chooses.
        interpret: whether this is traced for the interpreter, which also takes float32.

    Raises:
        UnsupportedKernelError: for what `check_prefill` and `check_operands` refuse.
        ValueError: tiles were asked for that own more value columns than a head has.
    """
    num_tokens, num_key, key_dim = q.shape
    num_heads, value_dim = inputs.v.shape[1:]
    check_prefill(num_key, num_heads, key_dim, value_dim, pool.dtype)
    if not interpret:  # which runs float32 too
        check_operands(q.dtype, inputs.k.dtype, inputs.v.dtype)
    place = place_of_tokens(rows, num_tokens)
    token = token_of_places(place, num_places(num_tokens, rows.offset.shape[0]))
    tokens = {name: take(x, token) for name, x in {"q": q, "k": inputs.k, "v": inputs.v}.items()}
    gates = gates_on_grid(inputs, token)
    out, pool = _run(tokens, gates, rows, pool, FirstHeads(num_key=num_key), tiles, interpret=interpret)
    return take(out, place), pool


def gates_on_grid(inputs: DeltaInputs, token: Int[Array, "places"]) -> dict[str, Float[Array, "chunks CHUNK Nv"]]:
    """Lay packed gates out by chunk of the grid axis, as `gdn_prefill_on_grid` takes them; `token` of each place."""
    packed = {"g": inputs.g, "beta": inputs.beta}
    return {name: take(x, token).reshape(-1, CHUNK, x.shape[1]) for name, x in packed.items()}


def gdn_prefill_on_grid(
    tokens: Float[Array, "places heads width"],
    gates: dict[str, Float[Array, "chunks CHUNK Nv"]],
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    num_key: int,
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "places Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run rows whose tokens stand on the grid axis already; sizes and dtypes are for the caller to check.

    Args:
        tokens: heads of q, of k and of v side by side, all of one width, for the rest as for `gdn_prefill`; zeros at
            places of a row's chunks that hold no token.
        gates: `g` and `beta` by chunk of the grid axis, float32, zeros where no token stands.
        rows: the packing, the anchors and the exports, as for `gdn_prefill`.
        pool: as for `gdn_prefill`.
        num_key: key heads.
        tiles: as for `gdn_prefill`.
        interpret: as for `gdn_prefill`.

    Returns:
        Outputs, anything in chunks that no row uses; the pool.
    """
    whole = {"q": tokens, "k": tokens, "v": tokens}
    return _run(whole, gates, rows, pool, FirstHeads.side_by_side(num_key), tiles, interpret=interpret)


def _run(
    tokens: dict[str, Float[Array, "places heads width"]],
    gates: dict[str, Float[Array, "chunks CHUNK Nv"]],
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    first_heads: FirstHeads,
    tiles: PrefillTiles | None,
    *,
    interpret: bool,
) -> tuple[Float[Array, "places Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run both kernels."""
    is_used = used_chunks(rows, gates["g"].shape[0])
    factors = chunk_factors(tokens["q"], tokens["k"], gates, is_used, first_heads=first_heads, interpret=interpret)
    num_heads, value_dim = pool.shape[1:3]
    tiles = tiles or prefill_tiles(rows.offset.shape[0] * num_heads, value_dim)
    return run_rows(tokens, factors, rows, pool, first_heads=first_heads, tiles=tiles, interpret=interpret)
