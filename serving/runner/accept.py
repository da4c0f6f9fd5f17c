"""Which drafts stand: those that the target itself draws.

The token at a position is a function of its logits, the request's parameters, seed and position (see `sampling.py`). So
a draft stands iff it equals the token drawn at its position, and all before it stand: what is emitted is what plain
decoding emits, token for token, however the drafts came about.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def count_standing(
    window: Int[Array, "rows T"],
    choices: Int[Array, "rows T"],
    sound: Bool[Array, "rows T"],
    num_new: Int[Array, "rows"],
) -> Int[Array, "rows"]:
    """Return how many leading tokens of each window stand, which is how many tokens the row emits.

    Numbers that are not finite may spread to the tokens before them in a window, since 0 times NaN is NaN. So where a
    window with drafts is not sound from its first token on, none stands: the step is worth nothing, and the next one
    runs the pending token alone, which tells.

        window   [p, d1, d2, d3]    the pending token and three drafts
        choices  [x1, x2, x3, x4]   what the target draws after each of them
        d1 = x1, d2 = x2, d3 != x3: three stand, and x1, x2, x3 are emitted

    Args:
        window: the tokens run; the first is the pending one.
        choices: what is drawn after each of them.
        sound: where a token's numbers are finite and a token could be drawn. A draft that is not sound does not stand:
            as the pending token of the next step it ends its request, which plain decoding would end there too.
        num_new: tokens of the window that are real; 0 for a closing row.
    """
    place = jnp.arange(window.shape[1], dtype=jnp.int32)
    agrees = (window[:, 1:] == choices[:, :-1]) & sound[:, 1:]
    first = sound[:, :1] | (num_new[:, None] == 1)
    stands = jnp.concatenate([first, agrees], axis=1)
    stands &= place[None] < num_new[:, None]
    return jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(axis=1)
