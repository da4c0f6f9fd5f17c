"""The mixer in plain JAX: the sequence of `reference.py` with the plain version of each operation."""

from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.dispatch import Implementation
from gdn_jax.kernels.gdn_mixer import reference
from gdn_jax.kernels.gdn_mixer.inputs import MixerTokens, MixerWeights
from gdn_jax.kernels.gdn_mixer.state import RecurrentState


def gdn_mixer_prefill(
    tokens: MixerTokens, weights: MixerWeights, rows: PrefillRows, state: RecurrentState, *, eps: float
) -> tuple[Float[Array, "T Nv dv"], RecurrentState]:
    """Run packed spans; as `gdn_mixer.gdn_mixer_prefill`, which says what the arguments mean."""
    return reference.gdn_mixer_prefill(tokens, weights, rows, state, eps=eps, implementation=Implementation.JAX)


def gdn_mixer_advance(
    tokens: MixerTokens,
    weights: MixerWeights,
    rows: AdvanceRows,
    lane: Int[Array, "rows"],
    state: RecurrentState,
    *,
    eps: float,
) -> tuple[Float[Array, "rows T Nv dv"], RecurrentState]:
    """Fold replay windows and run new tokens; as `gdn_mixer.gdn_mixer_advance`, which says what the arguments mean."""
    return reference.gdn_mixer_advance(tokens, weights, rows, lane, state, eps=eps, implementation=Implementation.JAX)
