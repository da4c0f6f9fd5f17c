"""MTP in a step: the head's entries for tokens that stand, and drafts for the next step.

The entry of token p is made from (the target's final hidden vector of p - 1, token p) and stands at token slot p. After
every step a row has entries up to its pending token, all from true hidden vectors: those that drafting wrote further on
are made again when tokens come to stand there. `Entries` are keys and values alone, since the compiler drops the rest
of a head whose output nobody reads.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn_jax.kernels.anchors import AdvanceRows
from gdn_jax.model import LanguageModel
from gdn_jax.mtp import MTPHead
from gdn_jax.state import AdvanceBatch, KVPages, PrefillBatch

Drafts = Int[Array, "rows k"]
# (logits after the newest token, position of the token to draw, drafts so far, how many those are) -> tokens
Draw = Callable[[Float[Array, "rows V"], Int[Array, "rows"], Drafts, Int[Array, ""]], Int[Array, "rows"]]


@dataclass(frozen=True, kw_only=True)
class Pending:
    """Each row's newest token, drawn in this step and not yet run.

    Attributes:
        token: its id.
        position: its place in the sequence.
        hidden: the target's final hidden vector of the token before it.
        num_new: 1, and 0 where a row has no such token: nothing is written for it then.
        lane: of the row.
        block_tables: of the row.
    """

    token: Int[Array, "rows"]
    position: Int[Array, "rows"]
    hidden: Float[Array, "rows H"]
    num_new: Int[Array, "rows"]
    lane: Int[Array, "rows"]
    block_tables: Int[Array, "rows blocks"]


def prefill_entries(
    model: LanguageModel,
    pages: KVPages,
    batch: PrefillBatch,
    before: Float[Array, "rows H"],
    hidden: Float[Array, "T H"],
) -> KVPages:
    """Make the entries of packed spans.

    Args:
        model: with a head.
        pages: the head's.
        batch: the spans.
        before: the target's final hidden vector of the token before each span, from the slot that its row reads.
        hidden: those of the spans' tokens.
    """
    rows = batch.rows
    row, _ = rows.row_of(hidden.shape[0])
    is_first = jnp.arange(hidden.shape[0], dtype=jnp.int32) == rows.offset[row]
    shifted = jnp.where(is_first[:, None], before[row].astype(hidden.dtype), jnp.roll(hidden, 1, axis=0))
    _, pages = _head(model).prefill(model.decoder.embed_tokens(batch.token_ids), shifted, pages, batch)
    return pages


def verified_entries(
    model: LanguageModel,
    pages: KVPages,
    batch: AdvanceBatch,
    hidden: Float[Array, "rows T H"],
    choices: Int[Array, "rows T"],
    num_standing: Int[Array, "rows"],
) -> KVPages:
    """Make the entries of the tokens that verify rows emit, the last of which is the new pending one.

    `make_drafts` makes that one again, where it needs the head's output and not only its key and value.

    Args:
        model: with a head.
        pages: the head's.
        batch: the windows that ran.
        hidden: the target's final hidden vectors of the windows' tokens.
        choices: what was drawn after each of them.
        num_standing: how many of those are emitted.
    """
    entries = _window(choices, batch.rows.start() + 1, num_standing, batch.lane, batch.block_tables)
    _, pages = _head(model).advance(model.decoder.embed_tokens(choices), hidden, pages, entries)
    return pages


def make_drafts(
    model: LanguageModel,
    pages: KVPages,
    pending: Pending,
    *,
    num_drafts: int,
    num_rounds: int | Int[Array, ""],
    draw: Draw,
) -> tuple[Drafts, KVPages]:
    """Let the head guess the tokens after the pending one, each guess feeding the next.

    What it writes past a row's table goes nowhere, and is not attended to: the guesses there may be worse.

    Args:
        model: with a head.
        pages: the head's.
        pending: where to begin.
        num_drafts: guesses per row, static.
        num_rounds: `num_drafts`, or 0 where no row has a pending token.
        draw: chooses a token from logits as the target does.

    Returns:
        The drafts, and the pages.
    """
    head = _head(model)

    def guess(
        index: Int[Array, ""], carry: tuple[Int[Array, "rows"], Float[Array, "rows H"], Drafts, KVPages]
    ) -> tuple[Int[Array, "rows"], Float[Array, "rows H"], Drafts, KVPages]:
        """Make the entry of one token, and guess the token after it."""
        token, hidden, drafts, pages = carry
        position = pending.position + index
        one = _window(token[:, None], position, pending.num_new, pending.lane, pending.block_tables)
        out, pages = head.advance(model.decoder.embed_tokens(one.token_ids), hidden[:, None], pages, one)
        token = draw(model.decoder.logits(out[:, 0]), position + 1, drafts, index)
        return token, out[:, 0], drafts.at[:, index].set(token), pages

    drafts = jnp.zeros((pending.token.shape[0], num_drafts), jnp.int32)
    start = pending.token, pending.hidden, drafts, pages
    _, _, drafts, pages = jax.lax.fori_loop(0, num_rounds, guess, start)
    return drafts, pages


def _head(model: LanguageModel) -> MTPHead:
    if model.mtp is None:
        raise ValueError("drafting needs a model with an MTP head; got one without; load it with its MTP layer")
    return model.mtp


def _window(
    tokens: Int[Array, "rows T"],
    start: Int[Array, "rows"],
    num_new: Int[Array, "rows"],
    lane: Int[Array, "rows"],
    block_tables: Int[Array, "rows blocks"],
) -> AdvanceBatch:
    """Describe entries of one window per row; the head has pages and no state, so no slot is named."""
    none = jnp.zeros_like(start)
    rows = AdvanceRows(
        read_slot=none,
        write_slot=none,
        save_slot=none,
        save_at=none,
        folded=start,
        num_replay=none,
        num_new=num_new,
    )
    return AdvanceBatch(token_ids=tokens, rows=rows, lane=lane, block_tables=block_tables)
