"""The jitted step functions: one per phase. `(params, state, inputs) -> (outputs, state)`, the state donated.

    prefill_step   packed spans; a row whose known tokens are all computed emits the next one
    advance_step   decode, verify and closing rows: fold the replay window, run the new tokens, emit

Each traces once per bucket: everything static is in `StepStatic` and the shapes. Outputs are the words of `outputs.py`.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.anchors import NULL_SLOT, load_slots
from gdn_jax.model import LanguageModel
from gdn_jax.serving.runner.outputs import StepOutputs, pack
from gdn_jax.serving.runner.sampling import LogprobArrays, SampledRows, samplable, sample_tokens, token_logprobs
from gdn_jax.state import AdvanceBatch, ModelState, PrefillBatch, RecurrentState

Params = tuple[Array, ...]  # leaves alone: a call takes a tree of modules apart leaf by leaf, in milliseconds


@dataclass(frozen=True, kw_only=True)
class StepStatic:
    """What a step is compiled for beside its shapes.

    Attributes:
        graph: the model without its parameters.
        tree: how its parameters are put together from leaves.
        num_valid_tokens: token ids from here on have no text and are never chosen.
        num_top: alternatives listed with log probabilities.
    """

    graph: nnx.GraphDef[Any]
    tree: Any  # a PyTreeDef, which jax names by a variable
    num_valid_tokens: int
    num_top: int

    @cached_property
    def _hash(self) -> int:
        return hash((self.graph, self.tree, self.num_valid_tokens, self.num_top))

    def __hash__(self) -> int:  # kept, since a call asks for it and a graph takes longer to hash than to launch
        return self._hash

    def model(self, params: Params) -> LanguageModel:
        """Return the model on its parameters."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params))


def split_model(model: LanguageModel, *, num_valid_tokens: int, num_top: int) -> tuple[StepStatic, Params]:
    """Part a model into what steps are compiled for and what they are called with."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    static = StepStatic(graph=graph, tree=tree, num_valid_tokens=num_valid_tokens, num_top=num_top)
    return static, tuple(leaves)


@partial(jax.jit, static_argnames=("static",), donate_argnames=("state",))
def prefill_step(
    static: StepStatic, params: Params, state: ModelState, batch: PrefillBatch, sampling: SampledRows
) -> tuple[Int[Array, "rows words"], ModelState]:
    """Run packed spans and choose the token after each row's last one."""
    model, rows = static.model(params), batch.rows
    hidden, state = model.decoder.prefill(batch, state)
    row, owned = rows.row_of(hidden.shape[0])
    broken = jnp.zeros(rows.length.shape, jnp.bool).at[row].max(owned & ~_is_finite(hidden))
    _, exports = rows.boundaries()
    ran = _Ran(
        last=hidden[rows.last_token()],
        position=rows.start + rows.length,
        any_new=rows.length > 0,
        broken=broken | _overflowed(state, jnp.concatenate([rows.write_slot[:, None], exports], axis=1)),
        stored=exports != NULL_SLOT,
    )
    return _emit(static, model, ran, sampling), state


@partial(jax.jit, static_argnames=("static",), donate_argnames=("state",))
def advance_step(
    static: StepStatic, params: Params, state: ModelState, batch: AdvanceBatch, sampling: SampledRows
) -> tuple[Int[Array, "rows words"], ModelState]:
    """Fold replay windows, run each row's pending token, and choose the one after it."""
    model, rows = static.model(params), batch.rows
    hidden, state = model.decoder.advance(batch, state)
    broken = (rows.is_new(hidden.shape[1]) & ~_is_finite(hidden)).any(axis=1)
    saves = jnp.where(rows.saves(), rows.save_slot, NULL_SLOT)
    ran = _Ran(
        last=hidden[:, 0],
        position=rows.start() + 1,
        any_new=rows.num_new > 0,
        broken=broken | _overflowed(state, jnp.stack([rows.write_slot, saves], axis=1)),
        stored=(saves != NULL_SLOT)[:, None],
    )
    return _emit(static, model, ran, sampling), state


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """What a step of either phase knows of its rows: the vector whose logits are wanted, and what became of them."""

    last: Float[Array, "rows H"]
    position: Int[Array, "rows"]  # of the token to choose
    any_new: Bool[Array, "rows"]
    broken: Bool[Array, "rows"]
    stored: Bool[Array, "rows boundaries"]


def _emit(static: StepStatic, model: LanguageModel, ran: _Ran, sampling: SampledRows) -> Int[Array, "rows words"]:
    valid = static.num_valid_tokens
    logits = model.decoder.logits(ran.last)
    tokens = sample_tokens(logits, sampling.parameters(), ran.position, num_valid_tokens=valid)
    describe = partial(token_logprobs, logits, tokens, num_top=static.num_top, num_valid_tokens=valid)

    def nothing() -> LogprobArrays:
        """Return zeros in the shapes of a description, which the compiler does not compute for that."""
        return jax.tree.map(jnp.zeros_like, describe())

    return pack(
        StepOutputs(
            tokens=tokens,
            finite=~ran.broken & (samplable(logits, num_valid_tokens=valid) | ~ran.any_new),
            stored=ran.stored,
            logprobs=jax.lax.cond(sampling.want_logprobs(), describe, nothing),
        )
    )


def _is_finite(hidden: Float[Array, "*tokens H"]) -> Bool[Array, "*tokens"]:
    """Return which tokens' final vectors are finite.

    That vouches for what the token wrote too: it attends to its own key and value, its state is read by its own query,
    and neither sums nor decays turn NaN or infinity into a number again. Reading the states would cost as much as a
    decode step.
    """
    return jnp.isfinite(hidden).all(axis=-1)


def _overflowed(state: ModelState, slots: Int[Array, "rows slots"]) -> Bool[Array, "rows"]:
    """Return which rows stored a state that is not finite though its computation was: float16 ends at 65504."""
    pools = [layer.recurrent for layer in state.layers if isinstance(layer, RecurrentState)]
    narrow = [pool for pool in pools if jnp.finfo(pool.dtype).max < jnp.finfo(jnp.bfloat16).max]
    broken = jnp.zeros(slots.shape[:1], jnp.bool)
    for pool in narrow:
        # A column at a time: the states of all exports of a long prefill would be as many again as the pool's.
        columns = jax.lax.map(lambda slot, pool=pool: ~_all_finite(load_slots(pool, slot)), slots.T)
        broken |= columns.any(axis=0)
    return broken


def _all_finite(states: Float[Array, "rows Nv dv dk"]) -> Bool[Array, "rows"]:
    return jnp.isfinite(states).all(axis=(1, 2, 3))
