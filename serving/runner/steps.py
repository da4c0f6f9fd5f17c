"""The jitted step functions: one per phase. `(params, state, inputs) -> (outputs, state)`, the state donated.

    prefill_step   packed spans; a row whose known tokens are all computed emits the next one
    advance_step   decode, verify and closing rows: fold the replay window, run the new tokens, emit

Each traces once per bucket: everything static is in the model's graph, `StepStatic` and the shapes.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.anchors import NULL_SLOT, AnyArray
from gdn_jax.serving.runner.sampling import (
    SamplingInputs,
    TokenLogprobs,
    samplable,
    sample_tokens,
    token_logprobs,
)
from gdn_jax.state import AdvanceBatch, ModelState, PrefillBatch


@dataclass(frozen=True, kw_only=True)
class StepStatic:
    """What a step is compiled for beside its shapes.

    Attributes:
        graph: the model without its parameters.
        num_valid_tokens: token ids from here on have no text and are never chosen.
        num_top: alternatives listed with log probabilities.
    """

    graph: nnx.GraphDef[Any]
    num_valid_tokens: int
    num_top: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.graph, self.num_valid_tokens, self.num_top))

    def __hash__(self) -> int:  # kept, since a call asks for it and a graph takes longer to hash than to launch
        return self._hash


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepOutputs:
    """What goes to the host, in one transfer.

    Attributes:
        tokens: the token each row emits; means nothing for rows that do not.
        finite: whether a token could be chosen at all.
        stored: which exports (prefill) or saves (advance) the kernels stored.
        logprobs: of `tokens`; zeros unless some row wants them.
    """

    tokens: Int[AnyArray, "rows"]
    finite: Bool[AnyArray, "rows"]
    stored: Bool[AnyArray, "rows boundaries"]
    logprobs: TokenLogprobs


@partial(jax.jit, static_argnames=("static",), donate_argnames=("state",))
def prefill_step(
    static: StepStatic,
    params: nnx.State[Any, Any],
    state: ModelState,
    batch: PrefillBatch,
    sampling: SamplingInputs,
    wants_logprobs: Bool[Array, ""],
) -> tuple[StepOutputs, ModelState]:
    """Run packed spans and choose the token after each row's last one."""
    model = nnx.merge(static.graph, params)
    hidden, state = model.decoder.prefill(batch, state)
    logits = model.decoder.logits(hidden[batch.rows.last_token()])
    position = batch.rows.start + batch.rows.length
    _, slots = batch.rows.boundaries()
    return _emit(static, logits, position, sampling, wants_logprobs, slots != NULL_SLOT), state


@partial(jax.jit, static_argnames=("static",), donate_argnames=("state",))
def advance_step(
    static: StepStatic,
    params: nnx.State[Any, Any],
    state: ModelState,
    batch: AdvanceBatch,
    sampling: SamplingInputs,
    wants_logprobs: Bool[Array, ""],
) -> tuple[StepOutputs, ModelState]:
    """Fold replay windows, run each row's pending token, and choose the one after it."""
    model = nnx.merge(static.graph, params)
    hidden, state = model.decoder.advance(batch, state)
    logits = model.decoder.logits(hidden[:, 0])
    position = batch.rows.start() + 1
    return _emit(static, logits, position, sampling, wants_logprobs, batch.rows.saves()[:, None]), state


def _emit(
    static: StepStatic,
    logits: Float[Array, "rows V"],
    position: Int[Array, "rows"],
    sampling: SamplingInputs,
    wants_logprobs: Bool[Array, ""],
    stored: Bool[Array, "rows boundaries"],
) -> StepOutputs:
    tokens = sample_tokens(logits, sampling, position, num_valid_tokens=static.num_valid_tokens)
    describe = partial(token_logprobs, logits, tokens, num_top=static.num_top, num_valid_tokens=static.num_valid_tokens)

    def nothing() -> TokenLogprobs:
        """Return zeros in the shapes of a description, which the compiler does not compute for that."""
        return jax.tree.map(jnp.zeros_like, describe())

    return StepOutputs(
        tokens=tokens,
        finite=samplable(logits, num_valid_tokens=static.num_valid_tokens),
        stored=stored,
        logprobs=jax.lax.cond(wants_logprobs, describe, nothing),
    )
