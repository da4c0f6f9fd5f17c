"""What one training step reads: rows of tokens, and where documents begin in them."""

from dataclasses import dataclass

import jax
from jaxtyping import Int

from gdn_jax.kernels.anchors import AnyArray


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Packed rows of documents, all tokens real.

    Attributes:
        token_ids: int32.
        document: int32; which document of its row a token belongs to, 0, 1, 2, ... and never decreasing. Nothing
            crosses a border: no state, no attention, no target.
    """

    token_ids: Int[AnyArray, "rows T"]
    document: Int[AnyArray, "rows T"]
