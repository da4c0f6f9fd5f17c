"""A GDN layer between its projections: convolution, gates, delta rule, gated norm, and state.

    u = conv(raw);  [q | k | v] = silu(u);  g = -exp(A_log) softplus(a + dt_bias);  beta = sigmoid(b)
    o = delta_rule(l2norm(q) dk^-0.5, l2norm(k), v, g, beta);  y = gated_norm(o, z)

It is one operation so that it may be few launches: `reference.py` calls the single operations one after the other;
`mosaic_advance.py` and `mosaic_prefill.py` do all that comes before the delta rule in one kernel for Hopper GPUs.
"""

from jaxtyping import Array, Float, Int

from gdn_jax.kernels.agreement import Described, check_agreement, check_groups
from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation, imported_when_called, on_tensor_cores
from gdn_jax.kernels.gdn_mixer import plain, reference
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens, MixerWeights
from gdn_jax.kernels.gdn_mixer.state import RecurrentState, ReplayWindow

__all__ = ["MixerTokens", "MixerWeights", "RecurrentState", "ReplayWindow", "gdn_mixer_advance", "gdn_mixer_prefill"]

_PREFILL = {
    Implementation.REFERENCE: reference.gdn_mixer_prefill,
    Implementation.JAX: plain.gdn_mixer_prefill,
    Implementation.MOSAIC: on_tensor_cores(
        "gdn_jax.kernels.gdn_mixer.mosaic_prefill", "gdn_mixer_prefill", plain.gdn_mixer_prefill
    ),
}
_ADVANCE = {
    Implementation.REFERENCE: reference.gdn_mixer_advance,
    Implementation.JAX: plain.gdn_mixer_advance,
    Implementation.MOSAIC: imported_when_called("gdn_jax.kernels.gdn_mixer.mosaic_advance", "gdn_mixer_advance"),
}


def gdn_mixer_prefill(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: PrefillRows,
    state: RecurrentState,
    *,
    eps: float,
    implementation: Implementation = Implementation.JAX,
) -> tuple[Float[Array, "T Nv dv"], RecurrentState]:
    """Run packed spans from and into state slots, exporting at grid boundaries; replay windows are not touched.

    Args:
        tokens: projections of packed tokens; those of tokens that no row owns are ignored, whatever they hold.
        weights: the layer's small parameters.
        rows: the packing, the anchors and the exports.
        state: slots and replay windows of the layer.
        eps: of the gated norm.
        implementation: which version computes it.

    Returns:
        Outputs in the dtype of the tokens, anything for a token that no row owns; the state.

    Raises:
        ValueError: sizes or dtypes do not agree.
        UnsupportedKernelError: the Mosaic kernels cannot run these sizes or dtypes.
    """
    _check(tokens, weights, state, {"tokens.packed": Described(tokens.packed, "T W")} | rows.described())
    return _PREFILL[implementation](tokens, weights, rows, state, eps=eps)


def gdn_mixer_advance(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: AdvanceRows,
    lane: Int[Array, "rows"],
    state: RecurrentState,
    *,
    eps: float,
    implementation: Implementation = Implementation.JAX,
) -> tuple[Float[Array, "rows T Nv dv"], RecurrentState]:
    """Fold each lane's replay window into its slot, run the new tokens, and keep them as the next replay window.

    Args:
        tokens: projections of the new tokens; those past a row's `num_new` are ignored, whatever they hold.
        weights: the layer's small parameters.
        rows: the anchors and counts.
        lane: of each row; one past the last lane for a padding row, whose window is not kept.
        state: slots and replay windows of the layer.
        eps: of the gated norm.
        implementation: which version computes it.

    Returns:
        Outputs in the dtype of the tokens, anything for a token that is not new; the state.

    Raises:
        ValueError: sizes or dtypes do not agree.
        UnsupportedKernelError: the Mosaic kernels cannot run these sizes or dtypes.
    """
    described = {"tokens.packed": Described(tokens.packed, "rows T W"), "lane": Described(lane, "rows", dtype="int32")}
    _check(tokens, weights, state, described | rows.described())
    return _ADVANCE[implementation](tokens, weights, rows, lane, state, eps=eps)


def _check(tokens: MixerTokens, weights: MixerWeights, state: RecurrentState, described: dict[str, Described]) -> None:
    """Raise ValueError unless sizes and dtypes agree; `described`: arrays beside weights and state."""
    sizes = {"Nv": (tokens.num_heads, "tokens"), "dv": (tokens.width, "tokens")}
    check_agreement(described | weights.described() | state.described(), sizes)
    num_key, key_dim = state.replay.delta.k.shape[2:]
    check_groups("Nv", tokens.num_heads, "Nk", num_key)
    channels = 2 * num_key * key_dim + tokens.num_heads * tokens.width
    for name, count in {"tokens.raw": tokens.num_channels, "weights.taps": weights.taps.shape[1]}.items():
        if count != channels:
            raise ValueError(f"{name} must have 2 Nk dk + Nv dv = {channels} channels; got {count}")
    if tokens.packed.shape[-1] < tokens.first_b + 2 * tokens.num_heads:
        raise ValueError(
            f"tokens.packed must have room for raw, z, b and a, {tokens.first_b + 2 * tokens.num_heads} columns; "
            f"got {tokens.packed.shape[-1]}"
        )
    num_taps, num_kept = weights.taps.shape[0], state.conv.shape[1]
    if num_kept != num_taps - 1:
        raise ValueError(f"state.conv must hold one input less than there are taps, {num_taps - 1}; got {num_kept}")
