"""What a GDN layer remembers: state slots, and the replay windows that go with lanes."""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float

from gdn_jax.kernels.agreement import Described
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

    def described(self) -> dict[str, Described]:
        """Return every array with its dimensions, for `agreement.py`."""
        return self.replay.delta.described("state.replay.delta", "lanes R") | {
            "state.replay.conv": Described(self.replay.conv, "lanes R C"),
            "state.conv": Described(self.conv, "slots K1 C"),
            "state.recurrent": Described(self.recurrent, "slots Nv dv dk"),
        }
