"""Depthwise causal convolution with SiLU, with the same anchors as the recurrent state.

    y_t = silu( sum_{j=0..K-1} w[c, j] u_{t-K+1+j} )

u is the raw input; before a sequence's start it is zero. A *window* is the last K - 1 raw inputs, oldest first.
"""

from functools import partial

import jax
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.causal_conv1d import plain, reference
from gdn_jax.kernels.dispatch import Implementation

__all__ = ["causal_conv1d_advance", "causal_conv1d_forward", "causal_conv1d_prefill"]

_PREFILL = {
    Implementation.REFERENCE: reference.causal_conv1d_prefill,
    Implementation.JAX: plain.causal_conv1d_prefill,
    Implementation.MOSAIC: plain.causal_conv1d_prefill,
}
_ADVANCE = {
    Implementation.REFERENCE: reference.causal_conv1d_advance,
    Implementation.JAX: plain.causal_conv1d_advance,
    Implementation.MOSAIC: plain.causal_conv1d_advance,
}
_FORWARD = {
    Implementation.REFERENCE: reference.causal_conv1d_forward,
    Implementation.JAX: plain.causal_conv1d_forward,
    Implementation.MOSAIC: plain.causal_conv1d_forward,
}


@partial(jax.jit, static_argnames="implementation")
def causal_conv1d_prefill(
    x: Float[Array, "T C"],
    weight: Float[Array, "C K"],
    rows: PrefillRows,
    pool: Float[Array, "slots K1 C"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> tuple[Float[Array, "T C"], Float[Array, "slots K1 C"]]:
    """Convolve packed spans; windows come from `read_slot` and go to `write_slot` and to the exports.

    Right also when a span is shorter than the window, or a boundary lies closer than the window to the span's start.

    Args:
        x: raw inputs, activation dtype.
        weight: taps; `weight[:, K - 1]` multiplies the current token.
        rows: the packing, the anchors and the exports.
        pool: windows of K - 1 raw inputs.
        implementation: which version computes it.

    Returns:
        Outputs after SiLU in x's dtype (summed in float32), zeros for tokens that no row owns; the pool.
    """
    return _PREFILL[implementation](x, weight, rows, pool)


@partial(jax.jit, static_argnames="implementation")
def causal_conv1d_advance(
    x: Float[Array, "rows T C"],
    replay: Float[Array, "rows R C"],
    weight: Float[Array, "C K"],
    rows: AdvanceRows,
    pool: Float[Array, "slots K1 C"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> tuple[Float[Array, "rows T C"], Float[Array, "slots K1 C"]]:
    """Fold `num_replay` raw inputs into each row's window (stored at the write and save slots), then convolve new ones.

    Args:
        x: raw inputs of the new tokens.
        replay: raw inputs of the tokens run since `folded`.
        weight: taps, as for `causal_conv1d_prefill`.
        rows: the anchors and counts.
        pool: windows of K - 1 raw inputs.
        implementation: which version computes it.

    Returns:
        Outputs after SiLU in x's dtype, zeros past `num_new`; the pool.
    """
    return _ADVANCE[implementation](x, replay, weight, rows, pool)


def causal_conv1d_forward(
    x: Float[Array, "rows T C"],
    weight: Float[Array, "C K"],
    document: Int[Array, "rows T"],
    *,
    implementation: Implementation = Implementation.JAX,
) -> Float[Array, "rows T C"]:
    """Convolve rows of whole documents, without windows or pools: what training differentiates.

    Args:
        x: raw inputs, activation dtype.
        weight: taps, as for `causal_conv1d_prefill`.
        document: at least 0; which document of its row a token belongs to. Inputs of another one count as zeros.
        implementation: which version computes it.

    Returns:
        Outputs after SiLU in x's dtype.
    """
    return _FORWARD[implementation](x, weight, document)
