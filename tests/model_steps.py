"""Steps of a whole model for tests: batches from short descriptions of their rows, each step compiled once.

Every call has the same shapes, whatever its rows, so that one model costs one compilation per kind of step. Pools are
full of NaN at first, the null slot and the null page included: whatever a test reads must have been written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from oracles.checkpoints import write_checkpoint

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.model import LanguageModel, load_model
from gdn_jax.state import AdvanceBatch, ModelState, PrefillBatch, make_state

TOKENS = 192  # of a prefill, three chunks
ROWS = 3
BLOCKS = 3  # of a block table
WINDOW = 3  # tokens of an advance: one pending and two drafts
LANES = 3
SLOTS = 12
PAGES = 1 + ROWS * BLOCKS

SMALL = {
    "layer_types": ("linear_attention", "full_attention"),
    "mlp_only_layers": (0,),
    "vocab_size": 97,
    "dtype": "float32",
    "text": False,
}


@dataclass(frozen=True, kw_only=True)
class Span:
    """One row of a prefill: tokens from position `start` on, anchors, and export slots by token count."""

    tokens: Sequence[int]
    pages: Sequence[int]
    start: int = 0
    read: int = 0
    write: int = 0
    exports: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Window:
    """One row of an advance: new tokens after `folded + num_replay` others; `save` is (slot, token count)."""

    tokens: Sequence[int]
    pages: Sequence[int]
    lane: int
    read: int
    write: int
    folded: int
    num_replay: int = 0
    save: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a step says of one row: hidden vectors after the last norm `[T, H]`, and their logits `[T, V]`."""

    hidden: np.ndarray
    logits: np.ndarray


@partial(jax.jit, static_argnums=0)
def _prefill(graph: nnx.GraphDef, params: nnx.State, batch: PrefillBatch, state: ModelState) -> Any:
    decoder = nnx.merge(graph, params).decoder
    hidden, state = decoder.prefill(batch, state)
    return hidden, decoder.logits(hidden), state


@partial(jax.jit, static_argnums=0)
def _advance(graph: nnx.GraphDef, params: nnx.State, batch: AdvanceBatch, state: ModelState) -> Any:
    decoder = nnx.merge(graph, params).decoder
    hidden, state = decoder.advance(batch, state)
    return hidden, decoder.logits(hidden), state


@partial(jax.jit, static_argnums=0)
def _mtp_prefill(graph: nnx.GraphDef, params: nnx.State, batch: PrefillBatch, hidden: Any, state: ModelState) -> Any:
    model = nnx.merge(graph, params)
    m, pages = model.mtp.prefill(model.decoder.embed_tokens(batch.token_ids), hidden, state.mtp, batch)
    return m, model.decoder.logits(m), replace(state, mtp=pages)


@partial(jax.jit, static_argnums=0)
def _mtp_advance(graph: nnx.GraphDef, params: nnx.State, batch: AdvanceBatch, hidden: Any, state: ModelState) -> Any:
    model = nnx.merge(graph, params)
    m, pages = model.mtp.advance(model.decoder.embed_tokens(batch.token_ids), hidden, state.mtp, batch)
    return m, model.decoder.logits(m), replace(state, mtp=pages)


class Steps:
    """The compiled steps of one model. No call changes the state that it is given."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.config = model, model.config
        self._graph, self._params = nnx.split(model)

    def pools(self, content: float = np.nan) -> ModelState:
        """Return pools and replay windows with one value everywhere."""
        state = make_state(
            self.config, num_slots=SLOTS, num_pages=PAGES, num_lanes=LANES, window=WINDOW, dtype=self.model.dtype
        )
        return jax.tree.map(lambda pool: jnp.full_like(pool, content), state)

    def prefill(self, state: ModelState, *spans: Span, filler: int = 0) -> tuple[list[Output], ModelState]:
        """Run packed spans; padding tokens have the id `filler`."""
        batch = prefill_batch(spans, filler)
        hidden, logits, state = _prefill(self._graph, self._params, batch, state)
        return _of_spans(spans, hidden, logits), state

    def advance(self, state: ModelState, *windows: Window, filler: int = 0) -> tuple[list[Output], ModelState]:
        """Run windows; padding tokens, within a window too, have the id `filler`."""
        batch = advance_batch(windows, filler)
        hidden, logits, state = _advance(self._graph, self._params, batch, state)
        return _of_windows(windows, hidden, logits), state

    def mtp_prefill(
        self, state: ModelState, *spans: Span, hidden: Sequence[np.ndarray]
    ) -> tuple[list[Output], ModelState]:
        """Make MTP entries: token p of a span goes with the hidden vector of token p - 1."""
        fed = np.full((TOKENS, self.config.hidden_size), np.nan, np.float32)
        for span, offset, vectors in zip(spans, _offsets(spans), hidden, strict=True):
            fed[offset : offset + len(span.tokens)] = vectors
        m, logits, state = _mtp_prefill(self._graph, self._params, prefill_batch(spans), fed, state)
        return _of_spans(spans, m, logits), state

    def mtp_advance(
        self, state: ModelState, *windows: Window, hidden: Sequence[np.ndarray]
    ) -> tuple[list[Output], ModelState]:
        """Make MTP entries, a window per row."""
        fed = np.full((ROWS, WINDOW, self.config.hidden_size), np.nan, np.float32)
        for row, (window, vectors) in enumerate(zip(windows, hidden, strict=True)):
            fed[row, : len(window.tokens)] = vectors
        m, logits, state = _mtp_advance(self._graph, self._params, advance_batch(windows), fed, state)
        return _of_windows(windows, m, logits), state


def prefill_batch(spans: Sequence[Span], filler: int = 0) -> PrefillBatch:
    """Pack spans one after the other; rows that are left have length 0 and null slots."""
    token_ids = np.full((TOKENS,), filler, np.int32)
    fields = np.zeros((5, ROWS), np.int32)
    exports = np.zeros((ROWS, TOKENS // CHUNK), np.int32)
    tables = np.zeros((ROWS, BLOCKS), np.int32)
    for row, (span, offset) in enumerate(zip(spans, _offsets(spans), strict=True)):
        token_ids[offset : offset + len(span.tokens)] = span.tokens
        fields[:, row] = offset, len(span.tokens), span.start, span.read, span.write
        for count, slot in span.exports.items():
            exports[row, count // CHUNK - span.start // CHUNK - 1] = slot
        tables[row, : len(span.pages)] = span.pages
    fields[0, len(spans) :] = sum(len(span.tokens) for span in spans)
    names = ("offset", "length", "start", "read_slot", "write_slot")
    rows = PrefillRows(**dict(zip(names, fields, strict=True)), export_slot=exports)
    return PrefillBatch(token_ids=token_ids, rows=rows, block_tables=tables)


def advance_batch(windows: Sequence[Window], filler: int = 0) -> AdvanceBatch:
    """Put windows into rows; rows that are left have no lane, null slots and zero counts."""
    token_ids = np.full((ROWS, WINDOW), filler, np.int32)
    lanes = np.full((ROWS,), LANES, np.int32)
    fields = np.zeros((7, ROWS), np.int32)
    tables = np.zeros((ROWS, BLOCKS), np.int32)
    for row, window in enumerate(windows):
        token_ids[row, : len(window.tokens)] = window.tokens
        lanes[row] = window.lane
        counts = (window.folded, window.num_replay, len(window.tokens))
        fields[:, row] = window.read, window.write, *window.save, *counts
        tables[row, : len(window.pages)] = window.pages
    names = ("read_slot", "write_slot", "save_slot", "save_at", "folded", "num_replay", "num_new")
    rows = AdvanceRows(**dict(zip(names, fields, strict=True)))
    return AdvanceBatch(token_ids=token_ids, rows=rows, lane=lanes, block_tables=tables)


def _offsets(spans: Sequence[Span]) -> list[int]:
    lengths = [len(span.tokens) for span in spans]
    return [sum(lengths[:row]) for row in range(len(lengths))]


def _of_spans(spans: Sequence[Span], hidden: Any, logits: Any) -> list[Output]:
    hidden, logits = np.asarray(hidden), np.asarray(logits)
    parts = [slice(offset, offset + len(span.tokens)) for span, offset in zip(spans, _offsets(spans), strict=True)]
    return [Output(hidden=hidden[part], logits=logits[part]) for part in parts]


def _of_windows(windows: Sequence[Window], hidden: Any, logits: Any) -> list[Output]:
    hidden, logits = np.asarray(hidden), np.asarray(logits)
    return [
        Output(hidden=hidden[row, : len(window.tokens)], logits=logits[row, : len(window.tokens)])
        for row, window in enumerate(windows)
    ]


def slot_of(state: ModelState, slot: int) -> list[np.ndarray]:
    """Return everything that a state slot holds: each GDN layer's state and window, and the hidden vector."""
    layers = [layer for layer in state.layers if hasattr(layer, "recurrent")]
    parts = [pool for layer in layers for pool in (layer.recurrent, layer.conv)]
    return [np.asarray(pool)[slot] for pool in (*parts, state.hidden)]


def slot_pools(state: ModelState) -> list[np.ndarray]:
    """Return every state slot's content, all slots of an array at a time."""
    return [np.stack(parts) for parts in zip(*(slot_of(state, slot) for slot in range(SLOTS)), strict=True)]


def small_steps(folder: Path) -> Steps:
    """Return the steps of a float32 model of two layers: GDN with a dense feed-forward, attention with experts; MTP."""
    return Steps(load_model(write_checkpoint(folder, "next-moe", seed=1, **SMALL), dtype="float32"))
