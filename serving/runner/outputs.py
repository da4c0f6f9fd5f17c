"""What a step brings to the host: made on the device, packed into one array of words, taken apart on the host.

One array per call, since each array costs a transfer of its own. A word is 32 bits: integers and flags as they are,
floats bit by bit. A row's words are

    token | finite | rank | log probability | ids of the likeliest | their log probabilities | stored boundaries
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

_HEAD = 4  # words before the alternatives


@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What a step says of its rows; on the device arrays, and the same on the host.

    Attributes:
        tokens: the token each row emits; means nothing for rows that do not.
        finite: false where a number of the row's new tokens is not finite, or no token could be chosen: what the row
            wrote must not be published. True for a row without new tokens, whose state an earlier step vouched for.
        stored: which exports (prefill) or saves (advance) the kernels stored.
        logprobs: of `tokens`; zeros unless some row wants them.
    """

    tokens: Int[AnyArray, "rows"]
    finite: Bool[AnyArray, "rows"]
    stored: Bool[AnyArray, "rows boundaries"]
    logprobs: LogprobArrays


def pack(outputs: StepOutputs) -> Int[Array, "rows words"]:
    """Return the outputs as int32 words; see the module docstring."""
    found = outputs.logprobs
    columns = (
        outputs.tokens[:, None],
        outputs.finite[:, None],
        found.rank[:, None],
        found.logprob[:, None],
        found.top_ids,
        found.top_logprobs,
        outputs.stored,
    )
    return jnp.concatenate([_words(column) for column in columns], axis=1)


def _words(column: Array) -> Int[Array, "rows width"]:
    if jnp.issubdtype(column.dtype, jnp.floating):
        return jax.lax.bitcast_convert_type(column.astype(jnp.float32), jnp.int32)
    return column.astype(jnp.int32)


def unpack(packed: np.ndarray, num_top: int) -> StepOutputs:
    """Take packed words apart on the host; `num_top` alternatives were listed."""
    ids, top, end = _HEAD, _HEAD + num_top, _HEAD + 2 * num_top
    words: Any = packed
    floats: Any = packed.view(np.float32)
    return StepOutputs(
        tokens=words[:, 0],
        finite=words[:, 1] != 0,
        stored=words[:, end:] != 0,
        logprobs=LogprobArrays(
            rank=words[:, 2], logprob=floats[:, 3], top_ids=words[:, ids:top], top_logprobs=floats[:, top:end]
        ),
    )


def describe_token(outputs: StepOutputs, index: int, num_top: int) -> TokenLogprobs:
    """Return the log probabilities of one row's token, with its `num_top` likeliest alternatives."""
    found = outputs.logprobs
    return TokenLogprobs(
        chosen=float(found.logprob[index]),
        rank=int(found.rank[index]),
        top_ids=tuple(found.top_ids[index, :num_top].tolist()),
        top=tuple(found.top_logprobs[index, :num_top].tolist()),
    )
