"""What a GDN layer remembers: state slots, and the replay windows that go with lanes."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from gdn_jax.kernels.gated_delta import DeltaInputs


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ReplayWindow:
    """Inputs of the tokens that a lane ran since `folded`, of one GDN layer, rounded exactly as first used."""

    conv: Float[Array, "lanes R C"]
    delta: DeltaInputs  # each field [lanes, R, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """State slots of one GDN layer, with the replay windows that go with them."""

    recurrent: Float[Array, "slots Nv dv dk"]
    conv: Float[Array, "slots K1 C"]
    replay: ReplayWindow
