"""Penalties, biases and bad words: how a request changes its logits, from what its sequence holds so far.

Their meaning is that of vLLM. With `count` how often the output holds a token, the logit x of a token becomes

    x / repetition, or x * repetition where x <= 0      for tokens in the prompt or the output
    - frequency * count - presence * (count > 0)
    + bias, or -inf for the last token of a bad word where the output ends with the tokens before it

The history of each lane stays on the device and holds every token that its request has emitted, the pending one too.
Tokens which are only proposed are not part of it: a place of a window, or a draft in the making, is given those before
it (`after`). So each logit is penalised for the very tokens that plain decode would have emitted by then, each once.

A request that asks for none of this has no history: its lane's rows mean nothing and are never written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gdn_jax.kernels.anchors import AnyArray
from gdn_jax.serving.runner.sampling import SampledRows

MAX_BIASES = 1024  # token ids of one request's logit_bias
MAX_WORDS = 256  # banned token sequences of one request
MAX_WORD_TOKENS = 32  # of one such sequence
MAX_BIAS = 100.0  # a larger one is taken for this, as elsewhere
_TAIL = MAX_WORD_TOKENS - 1  # output tokens that a bad word's end may depend on
_IN_PROMPT = 1 << 30  # the bit of a count that says so; no output is that long
_LEAST_REPETITION, _LARGEST_REPETITION = 1e-30, 1e30  # so that no logit times or over it is NaN


@dataclass(frozen=True, kw_only=True)
class RowAdjustments:
    """One request's adjustments as plain numbers; the default changes nothing.

    Attributes:
        presence: subtracted once from the logit of each token of the output.
        frequency: subtracted for each time the output holds the token.
        repetition: above 0; larger than 1 makes tokens of prompt and output less likely.
        biases: token ids and what is added to their logits; at most MAX_BIASES, no id twice.
        bad_words: token sequences that the output must not hold; at most MAX_WORDS of 1 to MAX_WORD_TOKENS.
    """

    presence: int | float = 0.0
    frequency: int | float = 0.0
    repetition: int | float = 1.0
    biases: tuple[tuple[int, int | float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether any logit is changed."""
        return self != NO_ADJUSTMENTS


NO_ADJUSTMENTS = RowAdjustments()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LaneHistory:
    """What the lanes' sequences hold; one row per lane and one behind them for padding.

    Attributes:
        counts: how often the output holds each token id, and a bit for those that the prompt holds.
        tail: the output's last tokens in order, right-aligned, -1 before its first.
    """

    counts: Int[AnyArray, "*lanes V"]
    tail: Int[AnyArray, "*lanes tail"]


def history_bytes_per_lane(vocab_size: int) -> int:
    """Return the bytes of one lane's history."""
    return 4 * (vocab_size + _TAIL)


def make_history(num_lanes: int, vocab_size: int) -> LaneHistory:
    """Allocate the history of lanes whose sequences are empty, and of the padding lane behind them."""
    return LaneHistory(
        counts=jnp.zeros((num_lanes + 1, vocab_size), jnp.int32),
        tail=jnp.full((num_lanes + 1, _TAIL), -1, jnp.int32),
    )


def pack_history(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> LaneHistory:
    """Return the history of one sequence, on the host and without the axis of lanes."""
    counts: Any = np.bincount(np.asarray(output, np.int64), minlength=vocab_size).astype(np.int32)
    counts[np.asarray(prompt, np.int64)] |= _IN_PROMPT
    tail: Any = np.full((_TAIL,), -1, np.int32)
    last = output[-_TAIL:]
    tail[_TAIL - len(last) :] = last
    return LaneHistory(counts=counts, tail=tail)


def pack_adjustments(request: RowAdjustments) -> dict[str, np.ndarray]:
    """Return the fields of `LaneParameters` that belong to a request's adjustments, each of one lane.

    Raises:
        ValueError: more biases or bad words than there is room for, or an empty or too long one.
    """
    words = [len(word) for word in request.bad_words]
    if len(request.biases) > MAX_BIASES or len(words) > MAX_WORDS or not all(0 < n <= MAX_WORD_TOKENS for n in words):
        raise ValueError(
            f"{len(request.biases)} biases and {len(words)} bad words of {min(words, default=1)} to "
            f"{max(words, default=1)} tokens do not fit {MAX_BIASES} biases and {MAX_WORDS} words of 1 to "
            f"{MAX_WORD_TOKENS}; ask for fewer"
        )
    bias_ids, biases = np.full((MAX_BIASES,), -1, np.int32), np.zeros((MAX_BIASES,), np.float32)
    for place, (token_id, bias) in enumerate(request.biases):
        bias_ids[place], biases[place] = token_id, min(max(bias, -MAX_BIAS), MAX_BIAS)
    starts, ends = np.full((MAX_WORDS, _TAIL), -1, np.int32), np.full((MAX_WORDS,), -1, np.int32)
    for place, (*start, end) in enumerate(request.bad_words):
        starts[place, _TAIL - len(start) :], ends[place] = start, end
    return {
        "adjusts": np.asarray(request.adjusts),
        "presence": np.asarray(request.presence, np.float32),
        "frequency": np.asarray(request.frequency, np.float32),
        "repetition": np.asarray(np.clip(request.repetition, _LEAST_REPETITION, _LARGEST_REPETITION), np.float32),
        "bias_ids": bias_ids,
        "biases": biases,
        "word_starts": starts,
        "word_ends": ends,
    }


def adjust_logits(
    logits: Float[Array, "rows T V"],
    rows: SampledRows,
    history: LaneHistory,
    *,
    after: Int[Array, "rows M"],
    num_after: Int[Array, "T"],
) -> Float[Array, "rows T V"]:
    """Return the logits after penalties, biases and bad words; -inf stays -inf.

    A step none of whose rows adjusts does nothing but ask. Where the logits given are not used again they are changed
    in place.

    Args:
        logits: in float32.
        rows: the step's rows.
        history: of all lanes.
        after: tokens proposed to follow what the history holds, in order; entries beyond those that a place sees may
            be anything.
        num_after: how many of them stand before each place of the window: 0, 1, ..., T - 1 where drafts are verified,
            and [n] where draft n + 1 is made.
    """
    adjusts = rows.lanes.adjusts[rows.lane]

    def adjusted(_: Int[Array, ""], logits: Float[Array, "rows T V"]) -> Float[Array, "rows T V"]:
        """Adjust every row; those that do not ask keep their bits."""
        changed = _penalise(logits, rows, history, after, num_after)
        changed = _add_biases(changed, rows, _ends_of_words(rows, history, after, num_after))
        return jnp.where(adjusts[:, None, None], changed, logits)

    # A loop of one round or none owns its logits, where a branch that returns them as they are copies them on a GPU.
    return jax.lax.fori_loop(0, adjusts.any().astype(jnp.int32), adjusted, logits)


def extend_history(
    history: LaneHistory, rows: SampledRows, tokens: Int[Array, "rows T"], num_tokens: Int[Array, "rows"]
) -> LaneHistory:
    """Return the history with each row's first `num_tokens` tokens added to its lane, in place where it is donated.

    Lanes whose requests do not adjust stay as they are. No two rows that adjust may be on one lane.
    """
    out_of_range, vocab = history.counts.shape
    lane = jnp.where(rows.lanes.adjusts[rows.lane], rows.lane, out_of_range)  # what is there is dropped
    counted = jnp.arange(tokens.shape[1])[None] < num_tokens[:, None]
    column = jnp.where(counted, tokens, vocab)
    last = _last_tokens(history.tail[rows.lane], tokens, num_tokens[:, None])[:, 0]
    return LaneHistory(
        counts=history.counts.at[lane[:, None], column].add(1, mode="drop"),
        tail=history.tail.at[lane].set(last, mode="drop"),
    )


def _penalise(
    logits: Float[Array, "rows T V"],
    rows: SampledRows,
    history: LaneHistory,
    after: Int[Array, "rows M"],
    num_after: Int[Array, "T"],
) -> Float[Array, "rows T V"]:
    """Return the logits after repetition, frequency and presence penalty.

    Proposed tokens are counted by comparing each id with them, which costs a few integer operations per logit and no
    array of counts per place.
    """
    lanes, lane = rows.lanes, rows.lane
    before = history.counts[lane][:, None]
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, None]
    stands = jnp.arange(after.shape[1])[None] < num_after[:, None]
    proposed = (after[:, None, :, None] == ids) & stands[None, :, :, None]
    count = (before & (_IN_PROMPT - 1)) + proposed.sum(axis=2, dtype=jnp.int32)
    in_output = count > 0
    repetition = lanes.repetition[lane][:, None, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_output | (before >= _IN_PROMPT), repeated, logits)
    logits = logits - lanes.frequency[lane][:, None, None] * count.astype(jnp.float32)
    return logits - jnp.where(in_output, lanes.presence[lane][:, None, None], 0.0)


def _add_biases(
    logits: Float[Array, "rows T V"], rows: SampledRows, banned: Int[Array, "rows T words"]
) -> Float[Array, "rows T V"]:
    """Return the logits with biases added; a ban is a bias of -inf. Ids of -1 are none."""
    own_ids, own_biases = rows.lanes.bias_ids[rows.lane][:, None], rows.lanes.biases[rows.lane][:, None]
    ids = jnp.broadcast_to(own_ids, (*logits.shape[:2], own_ids.shape[2]))
    biases = jnp.broadcast_to(own_biases, ids.shape)
    column = jnp.concatenate([ids, banned], axis=2)
    column = jnp.where(column >= 0, column, logits.shape[2])  # out of range, so dropped; -1 would mean the last id
    value = jnp.concatenate([biases, jnp.full(banned.shape, -jnp.inf)], axis=2)
    row, place = (jax.lax.broadcasted_iota(jnp.int32, column.shape, axis) for axis in (0, 1))
    return logits.at[row, place, column].add(value, mode="drop")


def _ends_of_words(
    rows: SampledRows, history: LaneHistory, after: Int[Array, "rows M"], num_after: Int[Array, "T"]
) -> Int[Array, "rows T words"]:
    """Return the last token of each bad word whose other tokens end the output at a place, and -1 for the others."""
    starts, ends = rows.lanes.word_starts[rows.lane], rows.lanes.word_ends[rows.lane]
    last = _last_tokens(history.tail[rows.lane], after, num_after[None])
    matches: Bool[Array, "rows T words"] = ((starts < 0)[:, None] | (starts[:, None] == last[:, :, None])).all(axis=3)
    return jnp.where(matches, ends[:, None], -1)


def _last_tokens(
    tail: Int[Array, "rows tail"], tokens: Int[Array, "rows M"], num_tokens: Int[Array, "#rows T"]
) -> Int[Array, "rows T tail"]:
    """Return the tail of each sequence after its first `num_tokens` tokens of those given.

    With a tail of [5, 6, 7] and tokens [8, 9], the joined row is [5, 6, 7, 8, 9], and after one token [6, 7, 8].
    """
    num_rows, width = tail.shape
    joined = jnp.concatenate([tail, tokens], axis=1)
    index = num_tokens[:, :, None] + jnp.arange(width)[None, None]
    index = jnp.broadcast_to(index, (num_rows, *index.shape[1:]))
    return jax.vmap(lambda row, places: row[places])(joined, index)
