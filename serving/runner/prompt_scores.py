"""Log probabilities of a prompt's own tokens: the logits at position p score the token at p + 1.

Not part of a step, which would then be compiled with it in every shape: a prefill step hands out the final hidden
vectors of its packed tokens, and where the request of some row wants its prompt scored one more call makes logits of
them. It goes tile by tile, so that the logits of all tokens never exist together, and passes over tiles of which
nothing is wanted. The last prompt token's logits are the step's own: what they score is the first output token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AnyArray
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.serving.core.plan import RowPlan, TokenLogprobs
from gdn_jax.serving.core.request import RequestId
from gdn_jax.serving.runner.outputs import describe_first_tokens, pack_logprobs, unpack_logprobs
from gdn_jax.serving.runner.sampling import token_logprobs
from gdn_jax.serving.runner.steps import Params, StepStatic

_NOTHING = -1  # at a position that is not scored


@dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """A prompt whose tokens are to be scored.

    Attributes:
        token_ids: the whole prompt, since the last token of a span is followed by the first one of the next.
        num_top: alternatives to list per token.
    """

    token_ids: Sequence[int]
    num_top: int


@partial(jax.jit, static_argnames=("static",))
def score_prompts(
    static: StepStatic, params: Params, hidden: Float[Array, "T H"], next_ids: Int[AnyArray, "T"]
) -> Int[Array, "T words"]:
    """Return log probabilities of the token after each packed position, as words of windows of one token.

    The words of a position whose token is not wanted mean nothing.

    Args:
        static: what the prefill step was compiled for.
        params: the model's parameters.
        hidden: the prefill step's final vectors; T is a multiple of the chunk size.
        next_ids: the tokens to score; -1 at a position whose token is not wanted.
    """
    model = static.model(params)

    def score_tile(tile: tuple[Float[Array, "tile H"], Int[Array, "tile"]]) -> Int[Array, "tile words"]:
        """Score one tile's tokens."""
        vectors, ids = tile

        def score() -> Int[Array, "tile words"]:
            """Make the tile's logits and describe them."""
            logits = model.decoder.logits(vectors)
            chosen = jnp.maximum(ids, 0)
            tops = {"num_top": static.num_top, "num_valid_tokens": static.num_valid_tokens}
            return pack_logprobs(token_logprobs(logits, chosen, **tops))

        return jax.lax.cond((ids >= 0).any(), score, lambda: jnp.zeros_like(score()))

    tiles = hidden.reshape(-1, CHUNK, hidden.shape[1]), next_ids.reshape(-1, CHUNK)
    return jax.lax.map(score_tile, tiles).reshape(hidden.shape[0], -1)


def next_prompt_ids(
    rows: Sequence[RowPlan], prompts: Mapping[RequestId, ScoredPrompt], num_tokens: int
) -> np.ndarray | None:
    """Return what is to be scored in a prefill call: `num_tokens` ids for `score_prompts`, or None if nothing.

    Args:
        rows: of the call, packed in order.
        prompts: by request; none where no scores are wanted.
        num_tokens: the call's padded size.
    """
    ids = np.full((num_tokens,), _NOTHING, np.int32)
    for _, first, following in _scored(rows, prompts):
        ids[first : first + len(following)] = following
    return ids if (ids != _NOTHING).any() else None


def prompt_logprobs(
    rows: Sequence[RowPlan], prompts: Mapping[RequestId, ScoredPrompt], words: np.ndarray, num_top: int
) -> Iterator[tuple[RequestId, tuple[TokenLogprobs, ...]]]:
    """Yield the requests with scored tokens in a prefill call, and those tokens' log probabilities in order.

    Args:
        rows: as for `next_prompt_ids`.
        prompts: as for `next_prompt_ids`.
        words: what `score_prompts` returned, on the host.
        num_top: alternatives that it listed.
    """
    for request_id, first, following in _scored(rows, prompts):
        found = unpack_logprobs(words[first : first + len(following)], window=1, num_top=num_top)
        yield request_id, describe_first_tokens(found, prompts[request_id].num_top)


def _scored(
    rows: Sequence[RowPlan], prompts: Mapping[RequestId, ScoredPrompt]
) -> Iterator[tuple[RequestId, int, Sequence[int]]]:
    """Yield each row with tokens to score: its request, where it begins among the packed tokens, and those tokens."""
    first = 0
    for row in rows:
        prompt = prompts.get(row.request_id)
        if prompt is not None:
            # A span that computes output tokens again, after a preemption, goes on beyond the prompt.
            following = prompt.token_ids[row.start + 1 : row.start + 1 + len(row.tokens)]
            if following:
                yield row.request_id, first, following
        first += len(row.tokens)
