"""The prefill of the gated delta rule on Hopper GPUs (Pallas, Mosaic GPU), its pool updated in place.

Three kernels: `mosaic_cuts.py` lays out the few chunks that cannot be read where they lie, `mosaic_chunks.py` makes
what each chunk contributes whatever the state, for all chunks side by side, and `mosaic_states.py` carries the states
through each row. A chunk's numbers follow from the row's own tokens alone, never from where the row lies or from its
neighbours.
"""

from functools import partial

import jax
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta.chunk_slots import chunk_slots, gates_by_chunk
from gdn_jax.kernels.gated_delta.inputs import DeltaInputs
from gdn_jax.kernels.gated_delta.mosaic_chunks import chunk_factors
from gdn_jax.kernels.gated_delta.mosaic_cuts import lay_out_cuts
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

    Args:
        q: queries, bfloat16 or float16 like keys and values.
        inputs: keys, values and gates.
        rows: the packing, the anchors and the exports.
        pool: recurrent states; updated in place where the caller's jit donates it.
        tiles: how the work is cut up; by default as `prefill_tiles` chooses.
        interpret: whether this is traced for the interpreter, which also takes float32.

    Raises:
        UnsupportedKernelError: for what `check_prefill` and `check_operands` refuse.
    """
    num_tokens, num_key, key_dim = q.shape
    num_heads, value_dim = inputs.v.shape[1:]
    check_prefill(num_key, num_heads, key_dim, value_dim, pool.dtype)
    if not interpret:  # which runs float32 too
        check_operands(q.dtype, inputs.k.dtype, inputs.v.dtype)
    slots = chunk_slots(rows, num_tokens)
    gates = gates_by_chunk(slots, inputs)
    k, v = inputs.k, inputs.v
    cuts = lay_out_cuts(q, k, v, slots)
    first_heads = FirstHeads(num_key=num_key)
    factors = chunk_factors(q, k, cuts, gates, slots, first_heads=first_heads)
    tiles = tiles or prefill_tiles()
    tokens = {"q": q, "k": k, "v": v}
    return run_rows(tokens, cuts, factors, rows, pool, first_heads=first_heads, tiles=tiles, interpret=interpret)


def gdn_prefill_on_grid(
    tokens: Float[Array, "T heads width"],
    gates: dict[str, Float[Array, "chunks places Nv"]],
    rows: PrefillRows,
    pool: Float[Array, "slots Nv dv dk"],
    *,
    num_key: int,
    tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Nv dv"], Float[Array, "slots Nv dv dk"]]:
    """Run rows of whole chunks, for a caller who lays tokens out so: no chunk is cut, and none is copied.

    Args:
        tokens: heads of q, of k and of v side by side, all of one width, for the rest as for `gdn_prefill`.
        gates: `g` and `beta` by chunk, as `chunk_slots` numbers them.
        rows: as for `gdn_prefill`; `offset`, `start` and `length` are multiples of CHUNK.
        pool: as for `gdn_prefill`.
        num_key: key heads.
        tiles: as for `gdn_prefill`.
        interpret: as for `gdn_prefill`.
    """
    slots, tiles = chunk_slots(rows, tokens.shape[0]), tiles or prefill_tiles()
    whole = {"q": tokens, "k": tokens, "v": tokens}
    cuts = {name: x.reshape(-1, CHUNK, *x.shape[1:]) for name, x in whole.items()}  # in whose place none is read
    first_heads = FirstHeads.side_by_side(num_key)
    factors = chunk_factors(tokens, tokens, cuts, gates, slots, first_heads=first_heads)
    return run_rows(whole, cuts, factors, rows, pool, first_heads=first_heads, tiles=tiles, interpret=interpret)
