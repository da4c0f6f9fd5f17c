"""What a step brings to the host: made on the device, packed into one array of words, taken apart on the host.

One array per call, since each array costs a transfer of its own. A word is 32 bits: integers and flags as they are,
floats bit by bit. A row's words, for T tokens at most and A alternatives to each, are

    finite | number of tokens | T tokens | T ranks | T log probabilities | T x A ids of the likeliest
    | T x A log probabilities of those | stored boundaries
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from gdn_jax.kernels.anchors import AnyArray
from gdn_jax.serving.core.plan import TokenLogprobs
from gdn_jax.serving.runner.sampling import LogprobArrays

_HEAD = 2  # words before the tokens


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What a step says of its rows; on the device arrays, and the same on the host.

    Attributes:
        tokens: what each row emits; means nothing past `num_tokens`.
        num_tokens: accepted drafts and one more; 0 for rows that emit nothing.
        finite: false where a number of the row's first new token (in prefill: of any) is not finite, or no token could
            be chosen: what the row wrote must not be published. True for a row without new tokens, whose state an
            earlier step vouched for.
        stored: which exports (prefill) or saves (advance) the kernels stored.
        logprobs: of `tokens`; zeros unless some row wants them.
    """

    tokens: Int[AnyArray, "rows T"]
    num_tokens: Int[AnyArray, "rows"]
    finite: Bool[AnyArray, "rows"]
    stored: Bool[AnyArray, "rows boundaries"]
    logprobs: LogprobArrays


def pack(outputs: StepOutputs) -> Int[Array, "rows words"]:
    """Return the outputs as int32 words; see the module docstring."""
    head = [_words(column) for column in (outputs.finite, outputs.num_tokens, outputs.tokens)]
    return jnp.concatenate([*head, pack_logprobs(outputs.logprobs), _words(outputs.stored)], axis=1)


def pack_logprobs(found: LogprobArrays) -> Int[Array, "rows words"]:
    """Return the words of log probabilities alone."""
    columns = found.rank, found.logprob, found.top_ids, found.top_logprobs
    return jnp.concatenate([_words(column) for column in columns], axis=1)


def _words(column: Array) -> Int[Array, "rows width"]:
    flat = column.reshape(column.shape[0], -1)
    if jnp.issubdtype(flat.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(flat.astype(jnp.float32), jnp.int32)
    return flat.astype(jnp.int32)


def unpack(packed: np.ndarray, *, window: int, num_top: int) -> StepOutputs:
    """Take packed words apart on the host: those of `window` tokens with `num_top` alternatives each."""
    ends = np.cumsum([_HEAD, window, window * (2 + 2 * num_top)]).tolist()
    _, tokens, found, stored = np.split(packed, ends, axis=1)
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "num_tokens": packed[:, 1],
        "finite": packed[:, 0] != 0,
        "stored": stored != 0,
    }
    return StepOutputs(**arrays, logprobs=unpack_logprobs(found, window=window, num_top=num_top))


def unpack_logprobs(packed: np.ndarray, *, window: int, num_top: int) -> LogprobArrays:
    """Take the words of log probabilities apart."""
    ends = np.cumsum([window, window, window * num_top]).tolist()
    ranks, chosen, ids, top = np.split(packed, ends, axis=1)
    lead = (packed.shape[0], window, num_top)
    arrays: dict[str, Any] = {
        "rank": ranks,
        "logprob": chosen.view(np.float32),
        "top_ids": ids.reshape(lead),
        "top_logprobs": top.reshape(lead).view(np.float32),
    }
    return LogprobArrays(**arrays)


def describe_token(outputs: StepOutputs, row: int, place: int, num_top: int) -> TokenLogprobs:
    """Return the log probabilities of one of a row's tokens, with its `num_top` likeliest alternatives."""
    found = outputs.logprobs
    return TokenLogprobs(
        chosen=float(found.logprob[row, place]),
        rank=int(found.rank[row, place]),
        top_ids=tuple(found.top_ids[row, place, :num_top].tolist()),
        top=tuple(found.top_logprobs[row, place, :num_top].tolist()),
    )


def describe_first_tokens(found: LogprobArrays, num_top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of every row's first token at once, as `describe_token` would one by one."""
    columns = (found.logprob, found.rank, found.top_ids[..., :num_top], found.top_logprobs[..., :num_top])
    return tuple(
        TokenLogprobs(chosen=chosen, rank=rank, top_ids=tuple(top_ids), top=tuple(top))
        for chosen, rank, top_ids, top in zip(*(column[:, 0].tolist() for column in columns), strict=True)
    )
