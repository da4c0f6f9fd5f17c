"""The jitted step functions: one per phase. `(params, state, inputs) -> (outputs, state)`, the state donated.

    prefill_step   packed spans; a row whose known tokens are all computed emits the next one
    advance_step   decode, verify and closing rows: fold the replay window, run the pending token and the drafts at
                   hand, emit the drafts that stand and one token more
    place_history  put what a sequence holds on the lane that its request got

Where the engine drafts, both steps end with the MTP head: entries for all tokens that now stand, and drafts for the
next step, which stay on the device.

A step traces once per bucket: everything static is in `StepStatic` and the shapes. Outputs are the words of
`outputs.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.anchors import NULL_SLOT, AnyArray, load_slots
from gdn_jax.kernels.lanes import gather_lanes, scatter_lanes
from gdn_jax.model import LanguageModel
from gdn_jax.serving.core.plan import NEWEST
from gdn_jax.serving.runner.accept import count_standing
from gdn_jax.serving.runner.adjust import LaneHistory, adjust_logits, extend_history
from gdn_jax.serving.runner.draft import Pending, make_drafts, prefill_entries, verified_entries
from gdn_jax.serving.runner.outputs import StepOutputs, pack
from gdn_jax.serving.runner.packed import StepInputs
from gdn_jax.serving.runner.pools import DeviceState
from gdn_jax.serving.runner.sampling import (
    Adjust,
    Demand,
    LogprobArrays,
    SampledRows,
    samplable,
    sample_tokens,
    token_logprobs,
)
from gdn_jax.state import ModelState, RecurrentState

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
    static: StepStatic, params: Params, state: DeviceState, inputs: StepInputs
) -> tuple[Int[Array, "rows words"], Float[Array, "T H"], DeviceState]:
    """Run packed spans, choose the token after each row's last one, and draft what may follow it.

    The final vectors of all tokens are returned too, for `prompt_scores.py`.
    """
    batch, sampling = inputs.unpack()
    model, rows = static.model(params), batch.rows
    before = load_slots(state.model.hidden, rows.read_slot)  # read here: after the spans the pool would be copied
    hidden, after = model.decoder.prefill(batch, state.model)
    if after.mtp is not None:
        after = replace(after, mtp=prefill_entries(model, after.mtp, batch, before, hidden))
    row, owned = rows.row_of(hidden.shape[0])
    broken = jnp.zeros(rows.length.shape, jnp.bool).at[row].max(owned & ~_is_finite(hidden))
    _, exports = rows.boundaries()
    last, end = hidden[rows.last_token()], rows.start + rows.length
    proposed = jnp.zeros((end.shape[0], 0), jnp.int32)
    drawn = _draw(static, model, last[:, None], end[:, None], sampling, _adjuster(sampling, state, proposed))
    emitted = _Emitted(
        drawn=drawn,
        num_tokens=sampling.emits.astype(jnp.int32),
        finite=~broken & (drawn.sound[:, 0] | (rows.length == 0)),
        state_slots=jnp.concatenate([rows.write_slot[:, None], exports], axis=1),
        stored=exports != NULL_SLOT,
    )
    pending = Pending(
        token=drawn.tokens[:, 0],
        position=end,
        hidden=last,
        num_new=emitted.num_tokens,
        lane=sampling.lane,
        block_tables=batch.block_tables,
    )
    # No rounds where all rows are in the midst of their prompts; a loop that may not run costs no copy of the pages.
    rounds = jnp.where(sampling.emits.any(), state.drafts.shape[1], 0)
    state = replace(_kept(state, pending), model=after, history=_extended(state, sampling, emitted))
    state = _draft(static, model, state, pending, sampling, rounds)
    return _pack(after, emitted), hidden, state


@partial(jax.jit, static_argnames=("static",), donate_argnames=("state",))
def advance_step(
    static: StepStatic, params: Params, state: DeviceState, inputs: StepInputs
) -> tuple[Int[Array, "rows words"], DeviceState]:
    """Fold replay windows, run each row's pending token and its drafts, emit what stands, and draft what may follow."""
    batch, sampling = inputs.unpack()
    model, rows = static.model(params), batch.rows
    is_new = rows.is_new(batch.token_ids.shape[1])
    known = batch.token_ids[:, :1]
    first = jnp.where(known == NEWEST, gather_lanes(state.newest, batch.lane), known)
    window = jnp.concatenate([first, gather_lanes(state.drafts, batch.lane)], axis=1)
    batch = replace(batch, token_ids=jnp.where(is_new, window, 0))
    hidden, after = model.decoder.advance(batch, state.model)
    position, adjust = rows.positions(hidden.shape[1]) + 1, _adjuster(sampling, state, batch.token_ids[:, 1:])
    drawn = _draw(static, model, hidden, position, sampling, adjust)
    sound = drawn.sound & _is_finite(hidden)
    count = count_standing(batch.token_ids, drawn.tokens, sound, rows.num_new)
    if after.mtp is not None:
        after = replace(after, mtp=verified_entries(model, after.mtp, batch, hidden, drawn.tokens, count))
    saves = jnp.where(rows.saves(), rows.save_slot, NULL_SLOT)
    emitted = _Emitted(
        drawn=drawn,
        num_tokens=count,
        finite=sound[:, 0] | (rows.num_new != 1),
        state_slots=jnp.stack([rows.write_slot, saves], axis=1),
        stored=(saves != NULL_SLOT)[:, None],
    )
    row, last = jnp.arange(count.shape[0]), jnp.maximum(count - 1, 0)
    pending = Pending(
        token=drawn.tokens[row, last],
        position=rows.start() + count,
        hidden=hidden[row, last],
        num_new=jnp.minimum(count, 1),
        lane=batch.lane,
        block_tables=batch.block_tables,
    )
    rounds = state.drafts.shape[1]
    state = replace(_kept(state, pending), model=after, history=_extended(state, sampling, emitted))
    state = _draft(static, model, state, pending, sampling, rounds)
    return _pack(after, emitted), state


@partial(jax.jit, donate_argnames=("history",))
def place_history(history: LaneHistory, lane: Int[AnyArray, ""], new: LaneHistory) -> LaneHistory:
    """Put the history of one request, without an axis of lanes, on a lane."""
    return jax.tree.map(lambda lanes, row: lanes.at[lane].set(row), history, new)


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """Tokens drawn after each token of a window, what is said of them, and where one could be drawn."""

    tokens: Int[Array, "rows T"]
    logprobs: LogprobArrays
    sound: Bool[Array, "rows T"]


@dataclass(frozen=True, kw_only=True)
class _Emitted:
    """What a step of either phase knows of its rows: tokens, how many of them stand, and what became of the states."""

    drawn: _Drawn
    num_tokens: Int[Array, "rows"]
    finite: Bool[Array, "rows"]
    state_slots: Int[Array, "rows slots"]  # written in this step
    stored: Bool[Array, "rows boundaries"]


def _adjuster(
    sampling: SampledRows, state: DeviceState, proposed: Int[Array, "rows M"], num_before: Int[Array, "T"] | None = None
) -> Adjust | None:
    """Return what adjusts the logits of a window, if anything does.

    Its places follow `num_before` of the proposed tokens: 0, 1, 2, ... if not told otherwise.
    """
    if sampling.demand is not Demand.ANYTHING:
        return None
    places = jnp.arange(1 + proposed.shape[1]) if num_before is None else num_before
    return partial(adjust_logits, rows=sampling, history=state.history, after=proposed, num_after=places)


def _kept(state: DeviceState, pending: Pending) -> DeviceState:
    """Return the state with the newest token of each row that emits, for a step that the host plans without it."""
    num_lanes = state.newest.shape[0]
    lane = jnp.where(pending.num_new > 0, pending.lane, num_lanes)  # past the end nothing is stored
    return replace(state, newest=scatter_lanes(state.newest, lane, pending.token[:, None]))


def _extended(state: DeviceState, sampling: SampledRows, emitted: _Emitted) -> LaneHistory:
    """Return the history with what the rows emit; drafts that did not stand never become part of it."""
    if sampling.demand is not Demand.ANYTHING:  # then no row has a history
        return state.history
    return extend_history(state.history, sampling, emitted.drawn.tokens, emitted.num_tokens)


def _draw(
    static: StepStatic,
    model: LanguageModel,
    hidden: Float[Array, "rows T H"],
    position: Int[Array, "rows T"],
    sampling: SampledRows,
    adjust: Adjust | None,
) -> _Drawn:
    """Draw the token at each position from the hidden vector before it."""
    valid = static.num_valid_tokens
    logits = model.decoder.logits(hidden)
    sound = samplable(logits, num_valid_tokens=valid)
    tokens = sample_tokens(
        logits,
        sampling.parameters(),
        position,
        num_valid_tokens=valid,
        adjust=adjust,
        demand=sampling.demand,
    )
    describe = partial(token_logprobs, logits, tokens, num_top=static.num_top, num_valid_tokens=valid)

    def nothing() -> LogprobArrays:
        """Return zeros in the shapes of a description, which the compiler does not compute for that."""
        return jax.tree.map(jnp.zeros_like, describe())

    if sampling.demand is not Demand.ANYTHING:
        return _Drawn(tokens=tokens, logprobs=nothing(), sound=sound)
    return _Drawn(tokens=tokens, logprobs=jax.lax.cond(sampling.want_logprobs(), describe, nothing), sound=sound)


def _draft(
    static: StepStatic,
    model: LanguageModel,
    state: DeviceState,
    pending: Pending,
    sampling: SampledRows,
    num_rounds: int | Int[Array, ""],
) -> DeviceState:
    """Draft for the next step, with the noise that the target will draw with; nothing where the engine never drafts."""
    num_drafts = state.drafts.shape[1]
    if state.model.mtp is None or num_drafts == 0:
        return state
    parameters = sampling.parameters()

    def draw(
        logits: Float[Array, "rows V"],
        position: Int[Array, "rows"],
        drafts: Int[Array, "rows k"],
        num_before: Int[Array, ""],
    ) -> Int[Array, "rows"]:
        """Choose as the target will, which by then has the drafts before this one in its window."""
        return sample_tokens(
            logits,
            parameters,
            position,
            num_valid_tokens=static.num_valid_tokens,
            adjust=_adjuster(sampling, state, drafts, num_before[None]),
            demand=sampling.demand,
        )

    drafts, pages = make_drafts(
        model,
        state.model.mtp,
        pending,
        num_drafts=num_drafts,
        num_rounds=num_rounds,
        draw=draw,
    )
    return replace(
        state, model=replace(state.model, mtp=pages), drafts=scatter_lanes(state.drafts, sampling.lane, drafts)
    )


def _pack(after: ModelState, emitted: _Emitted) -> Int[Array, "rows words"]:
    return pack(
        StepOutputs(
            tokens=emitted.drawn.tokens,
            num_tokens=emitted.num_tokens,
            finite=emitted.finite & ~_overflowed(after, emitted.state_slots),
            stored=emitted.stored,
            logprobs=emitted.drawn.logprobs,
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
