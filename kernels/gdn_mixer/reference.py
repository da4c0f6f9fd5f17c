"""The mixer as one operation after the other: with the reference of each, the definition."""

from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.causal_conv1d import causal_conv1d_advance, causal_conv1d_prefill
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gated_delta import delta_inputs, gdn_advance, gdn_prefill
from gdn_jax.kernels.gated_rms_norm import gated_rms_norm
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens, MixerWeights
from gdn_jax.kernels.gdn_mixer.state import RecurrentState, ReplayWindow
from gdn_jax.kernels.lanes import gather_lanes, scatter_lanes


def gdn_mixer_prefill(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: PrefillRows,
    state: RecurrentState,
    *,
    eps: float,
    implementation: Implementation = Implementation.REFERENCE,
) -> tuple[Float[Array, "T Nv dv"], RecurrentState]:
    """Run packed spans; as `gdn_mixer.gdn_mixer_prefill`, which says what the arguments mean."""
    mixed, conv = causal_conv1d_prefill(tokens.raw, weights.taps.T, rows, state.conv, implementation=implementation)
    num_key_heads, key_dim = state.replay.delta.k.shape[2:]
    q, inputs = delta_inputs(
        mixed, tokens.a, tokens.b, weights.a_log, weights.dt_bias, num_key_heads=num_key_heads, key_dim=key_dim
    )
    out, recurrent = gdn_prefill(q, inputs, rows, state.recurrent, implementation=implementation)
    return gated_rms_norm(out, tokens.z, weights.norm, eps=eps), RecurrentState(
        recurrent=recurrent, conv=conv, replay=state.replay
    )


def gdn_mixer_advance(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: AdvanceRows,
    lane: Int[Array, "rows"],
    state: RecurrentState,
    *,
    eps: float,
    implementation: Implementation = Implementation.REFERENCE,
) -> tuple[Float[Array, "rows T Nv dv"], RecurrentState]:
    """Fold replay windows and run new tokens; as `gdn_mixer.gdn_mixer_advance`, which says what the arguments mean."""
    replay: ReplayWindow = gather_lanes(state.replay, lane)
    mixed, conv = causal_conv1d_advance(
        tokens.raw, replay.conv, weights.taps.T, rows, state.conv, implementation=implementation
    )
    num_key_heads, key_dim = state.replay.delta.k.shape[2:]
    q, new = delta_inputs(
        mixed, tokens.a, tokens.b, weights.a_log, weights.dt_bias, num_key_heads=num_key_heads, key_dim=key_dim
    )
    out, recurrent = gdn_advance(q, new, replay.delta, rows, state.recurrent, implementation=implementation)
    kept = scatter_lanes(state.replay, lane, ReplayWindow(conv=tokens.raw, delta=new))
    return gated_rms_norm(out, tokens.z, weights.norm, eps=eps), RecurrentState(
        recurrent=recurrent, conv=conv, replay=kept
    )
