"""The mixer in prefill for Hopper GPUs: one kernel before the delta rule, the delta rule's two, and one for the norm.

Between the first and the last, tokens stand on the grid axis of `gated_delta/chunk_grid.py`.
"""

from functools import partial

import jax
from jaxtyping import Array, Float

from gdn_jax.kernels.anchors import PrefillRows
from gdn_jax.kernels.gated_delta.chunk_grid import place_of_tokens
from gdn_jax.kernels.gated_delta.mosaic_prefill import gdn_prefill_on_grid
from gdn_jax.kernels.gated_delta.tiles import PrefillTiles, check_mixer, check_operands
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens, MixerWeights
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_inputs import prefill_inputs
from gdn_jax.kernels.gdn_mixer.mosaic_prefill_norm import norm_from_grid
from gdn_jax.kernels.gdn_mixer.state import RecurrentState
from gdn_jax.kernels.gdn_mixer.tiles import MixerTiles, check_taps, check_tiles, check_value_heads, mixer_tiles


@partial(jax.jit, static_argnames=("eps", "tiles", "delta_tiles", "interpret"))
def gdn_mixer_prefill(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: PrefillRows,
    state: RecurrentState,
    *,
    eps: float,
    tiles: MixerTiles | None = None,
    delta_tiles: PrefillTiles | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "T Nv dv"], RecurrentState]:
    """Run packed spans; as `gdn_mixer.gdn_mixer_prefill`, which says what the arguments mean.

    Args:
        tokens: projections, bfloat16 or float16.
        weights: the layer's small parameters.
        rows: the packing, the anchors and the exports.
        state: slots, updated in place where the caller's jit donates them; replay windows stay as they are.
        eps: of the gated norm.
        tiles: how the kernel before the delta rule is cut up; by default as `mixer_tiles` chooses.
        delta_tiles: how the delta rule is; by default as `prefill_tiles` chooses.
        interpret: whether this is traced for the interpreter, which also takes float32.

    Raises:
        UnsupportedKernelError: for what `check_mixer`, `check_operands`, `check_taps` and `check_value_heads` refuse.
        ValueError: for what `check_tiles` refuses, or delta tiles that own more value columns than a head has.
    """
    num_tokens, dtype = tokens.packed.shape[0], tokens.packed.dtype
    num_key, key_dim = state.replay.delta.k.shape[2:]
    num_value, value_dim = state.recurrent.shape[1:3]
    check_mixer(num_key, num_value, key_dim, value_dim, state.recurrent.dtype)
    if not interpret:  # which runs float32 too
        check_operands(dtype)
    check_taps(weights.taps.shape[0])
    check_value_heads(num_value)
    tiles = tiles or mixer_tiles(num_tokens, num_key, num_value)
    check_tiles(tiles, num_key, num_value)
    laid, conv = prefill_inputs(tokens, weights, rows, state.conv, num_key=num_key, tiles=tiles)
    on_grid, pool = laid.pop("tokens"), state.recurrent
    out, recurrent = gdn_prefill_on_grid(
        on_grid, laid, rows, pool, num_key=num_key, tiles=delta_tiles, interpret=interpret
    )
    mixed = norm_from_grid(out, tokens, place_of_tokens(rows, num_tokens), weights.norm, eps=eps)
    return mixed, RecurrentState(recurrent=recurrent, conv=conv, replay=state.replay)
