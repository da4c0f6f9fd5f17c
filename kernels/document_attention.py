"""Attention of whole documents packed into rows, without pages: what training differentiates.

    o_i = softmax_j(q_i k_j / sqrt(D)) v_j over the keys j that i may see, which are those of its own document

Scores of a row are held at once, so this is for rows of a few thousand tokens. They are computed again in the backward
pass and not kept. Scores and softmax are float32; operands of both products keep their dtype.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.numerics import einsum

_MASKED = -1e30  # finite, so that a query without any key meets no inf - inf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KeyValues:
    """Keys and values of tokens; rows of them where documents are attended to."""

    k: Float[Array, "*tokens Hkv D"]
    v: Float[Array, "*tokens Hkv D"]

    def shifted(self, tokens: int) -> "KeyValues":
        """Return them moved to later tokens, zeros in front."""

        def shift(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (tokens, 0), (0, 0), (0, 0)))[:, : x.shape[1]]

        return KeyValues(k=shift(self.k), v=shift(self.v))


def visible_keys(
    document: Int[Array, "rows T"], has_key: Bool[Array, "rows T"] | None = None, *, lag: int = 0
) -> Bool[Array, "rows T T"]:
    """Return which keys each query sees: of its own document, and at least `lag` tokens before it.

    Args:
        document: which document of its row a token belongs to.
        has_key: tokens that have a key; all, if left out.
        lag: 0: a query sees its own key.
    """
    token = jnp.arange(document.shape[1], dtype=jnp.int32)
    visible = (document[:, :, None] == document[:, None, :]) & (token[:, None] - lag >= token[None])[None]
    return visible if has_key is None else visible & has_key[:, None, :]


@jax.checkpoint
def document_attention(
    q: Float[Array, "rows T Hq D"],
    keys: KeyValues,
    visible: Bool[Array, "rows T T"],
    own: tuple[KeyValues, ...] = (),
) -> Float[Array, "rows T Hq D"]:
    """Attend to the visible keys, and to keys that each query has for itself.

    Args:
        q: queries; head j reads key head j // (Hq / Hkv).
        keys: of all tokens.
        visible: from `visible_keys`. A query that sees none gives a mean without meaning, but finite.
        own: further keys, each seen by the query at its own place alone.
    """
    heads, width = keys.k.shape[2:]
    q = q.reshape(*q.shape[:2], heads, -1, width)
    scores = einsum("rthgd,rshd->rhgts", q, keys.k) * width**-0.5
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    extra = [einsum("rthgd,rthd->rhgt", q, one.k)[..., None] * width**-0.5 for one in own]
    weights = jax.nn.softmax(jnp.concatenate([scores, *extra], axis=-1), axis=-1).astype(keys.v.dtype)
    out = einsum("rhgts,rshd->rthgd", weights[..., : visible.shape[2]], keys.v)
    for index, one in enumerate(own):
        out = out + einsum("rhgt,rthd->rthgd", weights[..., visible.shape[2] + index], one.v)
    return out.reshape(*out.shape[:2], -1, width).astype(keys.v.dtype)
