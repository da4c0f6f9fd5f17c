"""Attention of whole documents packed into rows, without pages: what training differentiates.

    o_i = softmax_j(q_i k_j / sqrt(D)) v_j over the keys j that i may see, which are those of its own document

Scores of a row are held at once, so this is for rows of a few thousand tokens. They are computed again in the backward
pass and not kept. Scores and softmax are float32; operands of both products keep their dtype.
"""

import functools
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
    # h before t and g behind it: the order in which the product comes, so that no scores are moved.
    scores = einsum("rthgd,rshd->rhtgs", q, keys.k) * width**-0.5
    scores = jnp.where(visible[:, None, :, None], scores, _MASKED)
    own_scores = [einsum("rthgd,rthd->rhtg", q, one.k) * width**-0.5 for one in own]
    # The result does not depend on the shift, so no gradient flows through it.
    highest = jax.lax.stop_gradient(functools.reduce(jnp.maximum, own_scores, scores.max(axis=-1)))
    weights = jnp.exp(scores - highest[..., None])
    own_weights = [jnp.exp(score - highest) for score in own_scores]
    total = sum(own_weights, weights.sum(axis=-1))
    out = einsum("rhtgs,rshd->rhtgd", weights.astype(keys.v.dtype), keys.v)
    for weight, one in zip(own_weights, own, strict=True):
        out = out + einsum("rhtg,rthd->rhtgd", weight.astype(one.v.dtype), one.v)
    out = (out / total[..., None]).astype(keys.v.dtype)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape[0], q.shape[1], -1, width)
