"""The gated norm of a prefill (Pallas, Mosaic GPU): outputs back from the grid axis, the gate from packed projections.

    y = o rsqrt(mean(o^2) + eps) w silu(z)

A program does some heads of a few tokens, and asks for all of them before it computes any. XLA would gather the outputs
in a pass of its own before it normed them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.gated_delta.chunk_grid import NOBODY
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens
from gdn_jax.kernels.gdn_mixer.mosaic_arithmetic import silu
from gdn_jax.kernels.mosaic import HeadsOverWarps, everywhere, over_columns, over_rows

_CHANNELS = 1024  # of a token at most: 128 threads with 16 bytes of 16-bit numbers each
_TOKENS = 4  # of a program


def norm_from_grid(
    out: Float[Array, "places Nv dv"],
    tokens: MixerTokens,
    place: Int[Array, "T"],
    weight: Float[Array, "dv"],
    *,
    eps: float,
) -> Float[Array, "T Nv dv"]:
    """Return the gated norm of each packed token's output, zeros where no row owns the token.

    Args:
        out: the delta rule's outputs on the grid axis.
        tokens: packed projections, of which z is the gate.
        place: of each token, as `place_of_tokens` says.
        weight: one weight per channel, shared by all heads.
        eps: added to the mean of squares.
    """
    num_tokens, (_, num_heads, width) = place.shape[0], out.shape
    at_once = min(num_heads & -num_heads, _CHANNELS // width)
    return plgpu.kernel(
        _make_body(HeadsOverWarps(at_once, width), tokens.num_channels // width, eps),
        kernel_name="gdn_prefill_norm",
        out_type=jax.ShapeDtypeStruct((num_tokens, num_heads, width), out.dtype),
        grid=(pl.cdiv(num_tokens, _TOKENS), num_heads // at_once),
        grid_names=("some", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True),
    )(out, tokens.packed.reshape(num_tokens, -1, width), place, weight)


def _make_body(layout: HeadsOverWarps, first_z: int, eps: float) -> Any:
    """Return the program; `first_z` counts the heads of the packed projections before z."""

    def gdn_prefill_norm_body(out: Any, tokens: Any, place_of: Any, weight: Any, normed: Any) -> None:
        some, part = lax.axis_index("some"), lax.axis_index("part")
        first_head = part * layout.num_heads
        heads, gates = (pl.ds(first + first_head, layout.num_heads) for first in (0, first_z))
        own = [jnp.minimum(some * _TOKENS + index, normed.shape[0] - 1) for index in range(_TOKENS)]
        places = [place_of[token] for token in own]
        values = [layout.load_as_stored(out.at[jnp.maximum(place, 0), heads]) for place in places]
        z = [layout.load_as_stored(tokens.at[token, gates]) for token in own]
        gain = plgpu.load(weight, layout=layout.matrix.reduce(0), optimized=False).astype(jnp.float32)
        for token, place, value, gate in zip(own, places, values, z, strict=True):
            x = value.astype(jnp.float32)
            scale = lax.rsqrt(jnp.sum(x * x, axis=1) / layout.width + eps)
            x = x * over_columns(scale, layout.shape) * over_rows(gain, layout.shape) * silu(gate.astype(jnp.float32))
            # A choice, not a product: what stands at a place that is not the token's may be anything.
            x = jnp.where(everywhere(place == NOBODY, layout.shape), jnp.zeros_like(x), x)
            normed[token, heads] = x.astype(normed.dtype)

    return gdn_prefill_norm_body
