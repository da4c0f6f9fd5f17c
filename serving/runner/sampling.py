"""Token choice on the device: filters, Gumbel-max draws, log probabilities. Pure functions for use inside jitted steps.

The token at a position is a function of its logits, the request's parameters, its seed and the position, and of nothing
else: neither of the row, nor of the batch, nor of who asks (target or drafter). The order of operations is: padding
and banned ids masked, penalties and biases (`adjust.py`), temperature, top-k, top-p (over what top-k kept, made to sum
to 1), min-p, draw. Equal logits are ranked by token id, lowest first, so that top-k keeps exactly k tokens and greedy
choice equals top_k=1.

Gumbel-max: argmax(x + G), G standard Gumbel per token, is distributed as softmax(x) (Gumbel 1954; Maddison et al.
2014).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from gdn_jax.kernels.anchors import AnyArray

_LARGEST_BELOW_ONE = 1 - 2**-24  # in float32
_BANNED_SLAB = 64  # banned ids masked at once, as often as the row with most of them needs
_FEW = 64  # tokens found without a sort, where no row keeps more
_GREEDY_BELOW = 1e-5  # as SamplingParams.greedy
_LARGEST_TEMPERATURE = 1e30  # so that a masked logit of -inf stays -inf when divided


Adjust = Callable[[Float[Array, "rows T V"]], Float[Array, "rows T V"]]


class Demand(IntEnum):
    """What the choice of a token takes; a step may be compiled for one of these.

    A step for the first two has no branch, loop or sort that depends on the device's numbers, so that a GPU's host need
    not wait for any of them.
    """

    GREEDY = 0  # the largest logit, and nothing else
    DRAW = 1  # temperature and min-p too
    ANYTHING = 2  # ranking, banned ids, penalties, biases, log probabilities


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """Sampling parameters, one row per request; constant over a request's life.

    Attributes:
        temperature: 0 takes the largest logit; else the logits' divisor.
        top_k: tokens to keep, 0 for all.
        top_p: probability to keep, in (0, 1].
        min_p: smallest share of the likeliest token's probability, in [0, 1].
        seed: the request's 64-bit seed, high word first.
        banned: end tokens that may not be chosen yet, padded with -1.
        banned_until: `banned` holds for tokens at lower positions: prompt length + min_tokens.
    """

    temperature: Float[AnyArray, "rows"]
    top_k: Int[AnyArray, "rows"]
    top_p: Float[AnyArray, "rows"]
    min_p: Float[AnyArray, "rows"]
    seed: UInt32[AnyArray, "rows 2"]
    banned: Int[AnyArray, "rows banned"]
    banned_until: Int[AnyArray, "rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LaneParameters(SamplingInputs):
    """Sampling parameters, one row per lane and a greedy one behind them for padding.

    Attributes:
        wants_logprobs: whether the lane's request wants log probabilities.
        adjusts: whether any of what follows asks for something; see `adjust.py` for what it means.
        presence: penalty of a token that the output holds, subtracted from its logit.
        frequency: penalty for each time that the output holds a token.
        repetition: divides the positive and multiplies the other logits of tokens in prompt or output; above 0.
        bias_ids: tokens whose logits are biased, padded with -1.
        biases: what is added to them.
        word_starts: all but the last token of each banned sequence, right-aligned and padded with -1.
        word_ends: the last token of each banned sequence, padded with -1.
    """

    wants_logprobs: Bool[AnyArray, "rows"]
    adjusts: Bool[AnyArray, "rows"]
    presence: Float[AnyArray, "rows"]
    frequency: Float[AnyArray, "rows"]
    repetition: Float[AnyArray, "rows"]
    bias_ids: Int[AnyArray, "rows biases"]
    biases: Float[AnyArray, "rows biases"]
    word_starts: Int[AnyArray, "rows words tail"]
    word_ends: Int[AnyArray, "rows words"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SampledRows:
    """Which lane each row of a step is on, and what the lanes' requests ask for.

    Attributes:
        lanes: parameters of all lanes.
        lane: of each row.
        emits: whether the row's last token is its newest, so that the token after it is wanted.
        demand: static: the most that any of the rows asks for.
    """

    lanes: LaneParameters
    lane: Int[AnyArray, "rows"]
    emits: Bool[AnyArray, "rows"]
    demand: Demand = field(default=Demand.ANYTHING, metadata={"static": True})

    def parameters(self) -> SamplingInputs:
        """Return the rows' sampling parameters."""
        taken = {field.name: getattr(self.lanes, field.name)[self.lane] for field in fields(SamplingInputs)}
        return SamplingInputs(**taken)

    def want_logprobs(self) -> Bool[Array, ""]:
        """Return whether any row wants log probabilities."""
        return self.lanes.wants_logprobs[self.lane].any()


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """One request's sampling parameters as plain numbers, in the ranges of SamplingParams; the default is greedy."""

    temperature: int | float = 0.0
    top_k: int = 0
    top_p: int | float = 1.0
    min_p: int | float = 0.0
    seed: int = 0
    banned: tuple[int, ...] = ()
    banned_until: int = 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LogprobArrays:
    """Log probabilities before temperature and filters: of the chosen tokens, and of the likeliest ones in order."""

    logprob: Float[AnyArray, "*lead"]
    rank: Int[AnyArray, "*lead"]
    top_ids: Int[AnyArray, "*lead top"]
    top_logprobs: Float[AnyArray, "*lead top"]


def derive_seed(engine_seed: int, request_index: int) -> int:
    """Return the 64-bit seed of an engine's request that brought none; `request_index` counts them from 0."""
    return _hashed("request", engine_seed, request_index)


def sibling_seed(seed: int, sibling: int) -> int:
    """Return the seed of one of a request's `n` completions; the first has the request's own seed."""
    return seed if sibling == 0 else _hashed("sibling", seed, sibling)


def _hashed(kind: str, seed: int, index: int) -> int:
    # The kind keeps sibling 3 of request 0 apart from request 3.
    return int.from_bytes(sha256(f"{kind}/{seed}/{index}".encode()).digest()[:8], "little")


def pack_rows(requests: Sequence[RowSampling], *, num_rows: int, num_banned: int) -> SamplingInputs:
    """Pad requests to `num_rows` rows and `num_banned` banned ids each, as NumPy arrays; padding rows are greedy.

    Raises:
        ValueError: more requests, or more banned ids, than there is room for.
    """
    widest = max((len(request.banned) for request in requests), default=0)
    if len(requests) > num_rows or widest > num_banned:
        raise ValueError(
            f"{len(requests)} requests with up to {widest} banned ids do not fit {num_rows} rows of {num_banned}; "
            "choose a larger bucket"
        )
    rows = [*requests, *[RowSampling()] * (num_rows - len(requests))]
    words = [divmod(row.seed % 2**64, 2**32) for row in rows]
    banned = [[*row.banned, *[-1] * (num_banned - len(row.banned))] for row in rows]
    most = np.iinfo(np.int32).max
    arrays: dict[str, Any] = {
        "temperature": np.asarray([_divisor(row.temperature) for row in rows], np.float32),
        "top_k": np.asarray([min(max(row.top_k, 0), most) for row in rows], np.int32),
        "top_p": np.asarray([row.top_p for row in rows], np.float32),
        "min_p": np.asarray([row.min_p for row in rows], np.float32),
        "seed": np.asarray(words, np.uint32).reshape(num_rows, 2),
        "banned": np.asarray(banned, np.int32).reshape(num_rows, num_banned),
        "banned_until": np.asarray([row.banned_until for row in rows], np.int32),
    }
    return SamplingInputs(**arrays)


def _divisor(temperature: int | float) -> float:
    return 0.0 if temperature < _GREEDY_BELOW else float(min(temperature, _LARGEST_TEMPERATURE))


def demand_of(row: RowSampling) -> Demand:
    """Return what a request's parameters take, penalties and log probabilities aside."""
    if row.banned:
        return Demand.ANYTHING
    if _divisor(row.temperature) == 0:
        return Demand.GREEDY
    return Demand.DRAW if row.top_k == 0 and row.top_p >= 1 else Demand.ANYTHING


def gumbel_noise(seed: UInt32[Array, "2"], position: Int[Array, ""], num_tokens: int) -> Float[Array, "V"]:
    """Return standard Gumbel noise for each token id at one position of one request.

    -log(-log(1 - u)) with u of 32 random bits. Small u, which make the winners, keep all their bits in float32; the
    common 23-bit form would tie the two best of 250,000 equal tokens in 3 % of draws. The generator is named: under
    the process's default one, noise may depend on the batch it is drawn in.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    bits = jax.random.bits(key, (num_tokens,), jnp.uint32)
    u = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, _LARGEST_BELOW_ONE)
    return -jnp.log(-jnp.log1p(-u))


def sample_tokens(
    logits: Float[Array, "rows *window V"],
    inputs: SamplingInputs,
    position: Int[Array, "rows *window"],
    *,
    num_valid_tokens: int | Int[Array, ""],
    adjust: Adjust | None = None,
    demand: Demand = Demand.ANYTHING,
) -> Int[Array, "rows *window"]:
    """Choose one token per row, or per row and place in its window.

    Args:
        logits: the model's, in float32.
        inputs: one row of parameters per row of logits.
        position: index in its sequence (prompt and output) of the token to choose.
        num_valid_tokens: ids from here on have no text and are never chosen (the head may be wider than the tokenizer).
        adjust: changes the logits of all places once ids are masked, which have -inf and must keep it. It gets a copy
            that is the sampler's own, so that it may change it in place.
        demand: static; the most that any row asks for. Tokens do not depend on it: what none needs is left out.

    Returns:
        int32 ids below `num_valid_tokens`. Where no logit is finite the id means nothing: see `samplable`.
    """
    vocab, window = logits.shape[-1], position.size // position.shape[0]
    flat = jax.tree.map(lambda array: jnp.repeat(array, window, axis=0), inputs)
    places = position.reshape(-1)
    allowed = _mask_padding(logits.reshape(-1, vocab).astype(jnp.float32), num_valid_tokens)
    if demand is Demand.ANYTHING:
        allowed = _mask_banned(allowed, flat, places)
    if adjust is not None:
        allowed = adjust(allowed.reshape(-1, window, vocab)).reshape(-1, vocab)
    greedy = jnp.argmax(allowed, axis=-1).astype(jnp.int32)
    if demand is Demand.GREEDY:
        return greedy.reshape(position.shape)
    draws, draw = flat.temperature > 0, partial(_draw, allowed, flat, places, demand)
    drawn = draw() if demand is Demand.DRAW else jax.lax.cond(jnp.any(draws), draw, lambda: greedy)
    return jnp.where(draws, drawn, greedy).reshape(position.shape)


def filter_logits(
    logits: Float[Array, "N V"], inputs: SamplingInputs, demand: Demand = Demand.ANYTHING
) -> Float[Array, "N V"]:
    """Return the logits by temperature, their maximum moved to 0, with -inf where top-k, top-p or min-p drop a token.

    The softmax of a row is the distribution its token is drawn from. Rows of temperature 0 are as with temperature 1.
    """
    scaled = _scale(logits, _finite_max(logits), inputs)
    passes_min_p = scaled >= jnp.log(inputs.min_p)[:, None]
    if demand is not Demand.ANYTHING:
        return jnp.where(passes_min_p, scaled, -jnp.inf)
    ranked = (inputs.temperature > 0) & ((inputs.top_k > 0) | (inputs.top_p < 1))
    # Ranking the vocabulary costs more than the rest together, so it is done only in steps where a row needs it.
    kept = jax.lax.cond(
        jnp.any(ranked),
        lambda: _is_leading(logits, inputs, ranked=ranked),
        lambda: jnp.ones_like(logits, jnp.bool),
    )
    return jnp.where(kept & passes_min_p, scaled, -jnp.inf)


def samplable(logits: Float[Array, "*lead V"], *, num_valid_tokens: int) -> Bool[Array, "*lead"]:
    """Return which rows a token can be chosen from: no NaN among the valid ids, and the largest logit finite."""
    return jnp.isfinite(jnp.max(logits[..., :num_valid_tokens], axis=-1))


def token_logprobs(
    logits: Float[Array, "*lead V"], token_ids: Int[Array, "*lead"], *, num_top: int, num_valid_tokens: int
) -> LogprobArrays:
    """Return the log-softmax of the logits as the model gave them, at `token_ids` and at the likeliest tokens.

    Probabilities are over all V ids, as in the published models; only valid ids are ranked and listed.

    Args:
        logits: the model's, in float32.
        token_ids: the chosen tokens.
        num_top: alternatives to list, static; at most `num_valid_tokens` are.
        num_valid_tokens: ids from here on have no text.
    """
    logits = _one_zero(logits.astype(jnp.float32))
    top = _finite_max(logits)
    # The sum is at least 1 wherever a logit is finite; the maximum turns the NaN of a row of -inf into -inf.
    log_sum = jnp.log(jnp.maximum(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True), 1.0))
    ids = token_ids[..., None]
    chosen = jnp.take_along_axis(logits, ids, axis=-1)
    valid = logits[..., :num_valid_tokens]
    every_id = jax.lax.broadcasted_iota(jnp.int32, valid.shape, valid.ndim - 1)
    ahead = (valid > chosen) | ((valid == chosen) & (every_id < ids))
    top_logits, top_ids = jax.lax.top_k(valid, min(num_top, num_valid_tokens))
    return LogprobArrays(
        logprob=((chosen - top) - log_sum)[..., 0],
        rank=1 + jnp.sum(ahead, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=(top_logits - top) - log_sum,
    )


def _mask_padding(logits: Float[Array, "N V"], num_valid_tokens: int | Int[Array, ""]) -> Float[Array, "N V"]:
    """Return the logits with -inf at ids without text."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.where(ids < num_valid_tokens, _one_zero(logits), -jnp.inf)


def _mask_banned(logits: Float[Array, "N V"], inputs: SamplingInputs, position: Int[Array, "N"]) -> Float[Array, "N V"]:
    """Return the logits with -inf at ids that are banned at this position."""
    rows, vocab = logits.shape
    holds = (position < inputs.banned_until)[:, None] & (inputs.banned >= 0)
    column = jnp.where(holds, inputs.banned, vocab)  # out of range, so dropped; -1 would mean the last id
    if column.shape[1] == 0:
        return logits
    slab = min(_BANNED_SLAB, column.shape[1])
    column = jnp.pad(column, ((0, 0), (0, -column.shape[1] % slab)), constant_values=vocab)

    def mask_slab(index: Int[Array, ""], logits: Float[Array, "N V"]) -> Float[Array, "N V"]:
        """Mask the ids of one slab."""
        found = jax.lax.dynamic_slice_in_dim(column, index * slab, slab, axis=1)
        return logits.at[jnp.arange(rows)[:, None], found].set(-jnp.inf, mode="drop")

    most = holds.sum(axis=1, dtype=jnp.int32).max()
    return jax.lax.fori_loop(0, -(-most // slab), mask_slab, logits)


def _one_zero(logits: Float[Array, "*lead V"]) -> Float[Array, "*lead V"]:
    """Return the logits with -0.0 as 0.0: comparisons call the two equal, some sorts do not."""
    return jnp.where(logits == 0, 0.0, logits)


def _finite_max(logits: Float[Array, "*lead V"]) -> Float[Array, "*lead 1"]:
    """Return the largest logit, or 0 where it is not finite, so that subtracting it never makes a NaN of its own."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.isfinite(top), top, 0.0)


def _draw(
    allowed: Float[Array, "N V"], inputs: SamplingInputs, position: Int[Array, "N"], demand: Demand
) -> Int[Array, "N"]:
    """Draw a token per row by Gumbel-max; greedy rows get some id, which the caller drops."""
    kept = filter_logits(allowed, inputs, demand)
    noise = jax.vmap(gumbel_noise, in_axes=(0, 0, None))(inputs.seed, position, allowed.shape[-1])
    return jnp.argmax(kept + noise, axis=-1).astype(jnp.int32)


def _scale(logits: Float[Array, "N V"], top: Float[Array, "N 1"], inputs: SamplingInputs) -> Float[Array, "N V"]:
    # Subtracting before dividing keeps the likeliest token finite at any temperature.
    return (logits - top) / jnp.where(inputs.temperature > 0, inputs.temperature, 1.0)[:, None]


def _is_leading(logits: Float[Array, "N V"], inputs: SamplingInputs, *, ranked: Bool[Array, "N"]) -> Bool[Array, "N V"]:
    """Return which tokens top-k and top-p keep: a leading run in the order (logit descending, id ascending).

    The run is found among the sorted tokens and carried back as its last member, with which each token is compared.
    Rows that are not `ranked` keep everything.
    """
    vocab = logits.shape[-1]
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    width = min(_FEW, vocab)
    few = jnp.all(~ranked | ((inputs.top_k > 0) & (inputs.top_k <= width)))

    def by_sorting() -> tuple[Float[Array, "N 1"], Int[Array, "N 1"]]:
        """Rank the whole vocabulary."""
        negated, sorted_ids = jax.lax.sort((-logits, ids), dimension=1, num_keys=1, is_stable=True)
        return _last_kept(-negated, sorted_ids, inputs)

    # The published models ask for top_k=20; to find the first 64 takes a small part of the time of a sort.
    last_logit, last_id = jax.lax.cond(few, lambda: _last_kept(*jax.lax.top_k(logits, width), inputs), by_sorting)
    leads = (logits > last_logit) | ((logits == last_logit) & (ids <= last_id))
    return leads | ~ranked[:, None]


def _last_kept(
    logits: Float[Array, "N few"], ids: Int[Array, "N few"], inputs: SamplingInputs
) -> tuple[Float[Array, "N 1"], Int[Array, "N 1"]]:
    """Return logit and id of the last token that top-k and top-p keep, of tokens in descending order.

    The result is the same bits however many tokens past the k-th are given.
    """
    num_given = logits.shape[1]
    place = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    most = jnp.where(inputs.top_k > 0, jnp.minimum(inputs.top_k, num_given), num_given)[:, None]
    weight = jnp.where(place < most, jnp.exp(_scale(logits, _finite_max(logits), inputs)), 0.0)
    mass = _running_sum(weight)
    reached = mass >= inputs.top_p[:, None] * jnp.take_along_axis(mass, most - 1, axis=1)
    nucleus = 1 + jnp.argmax(reached, axis=1, keepdims=True).astype(jnp.int32)  # place of the first true one, from 1
    last = jnp.where(inputs.top_p[:, None] < 1, jnp.minimum(nucleus, most), most) - 1
    return jnp.take_along_axis(logits, last, axis=1), jnp.take_along_axis(ids, last, axis=1)


def _running_sum(x: Float[Array, "N few"]) -> Float[Array, "N few"]:
    """Return the inclusive sums along a row by doubling: 1, 2, 4... places at a time (Hillis and Steele, 1986).

    `jnp.cumsum` leaves the order of additions to the compiler, which may choose by the shape of the batch; here each
    sum depends on the entries up to it alone. A loop, since the unrolled form takes ten times as long to compile.
    """
    width = x.shape[1]

    def add_shifted(step: Int[Array, ""], sums: Float[Array, "N few"]) -> Float[Array, "N few"]:
        """Add to each sum the one that ends 2^step places before."""
        padded = jnp.pad(sums, ((0, 0), (width, 0)))
        return sums + jax.lax.dynamic_slice_in_dim(padded, width - (1 << step), width, axis=1)

    return jax.lax.fori_loop(0, (width - 1).bit_length(), add_shifted, x)
