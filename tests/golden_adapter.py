"""Wraps the project for the golden conformance script: `check_golden.py --adapter tests/golden_adapter.py:Adapter`.

Everything runs in float32 through the project's own paths: whole prompts through `LanguageModel.logits`, packed prompts
and states through `Decoder.prefill`, cached decode and speculative rounds through `Decoder.advance` with replay
windows.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdn_jax.kernels.anchors import AdvanceRows, PrefillRows
from gdn_jax.kernels.causal_conv1d import causal_conv1d_prefill
from gdn_jax.kernels.gated_delta import DeltaInputs, gdn_prefill
from gdn_jax.kernels.gated_delta.inputs import l2_normalize
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.model import LanguageModel, load_model
from gdn_jax.serving.text.chat_template import ChatTemplate
from gdn_jax.serving.text.tokenizer import Tokenizer
from gdn_jax.state import AdvanceBatch, ModelState, PrefillBatch, RecurrentState, make_state

_OWN_SLOT = 1  # each adapter call runs one sequence, or packed ones in slots 1, 2, ...
# One shape each for prefill, advance and MTP, whatever the call: compiling is most of what this takes.
_TOKENS, _ROWS, _WIDTH, _WINDOW = 256, 4, 8, 4
_PAGES = _ROWS * _WIDTH + 1


@partial(jax.jit, static_argnums=0)
def _prefill(graph: nnx.GraphDef, params: nnx.State, batch: PrefillBatch, state: ModelState) -> Any:
    model = nnx.merge(graph, params)
    hidden, state = model.decoder.prefill(batch, state)
    return hidden, model.decoder.logits(hidden), state


@partial(jax.jit, static_argnums=0)
def _advance(graph: nnx.GraphDef, params: nnx.State, batch: AdvanceBatch, state: ModelState) -> Any:
    model = nnx.merge(graph, params)
    hidden, state = model.decoder.advance(batch, state)
    return hidden, model.decoder.logits(hidden), state


@partial(jax.jit, static_argnums=0)
def _mtp_prefill(graph: nnx.GraphDef, params: nnx.State, batch: PrefillBatch, hidden: Any, pages: Any) -> Any:
    model = nnx.merge(graph, params)
    m, pages = model.mtp.prefill(model.decoder.embed_tokens(batch.token_ids), hidden, pages, batch)
    return m, model.decoder.logits(m), pages


@partial(jax.jit, static_argnums=0)
def _mtp_advance(graph: nnx.GraphDef, params: nnx.State, batch: AdvanceBatch, hidden: Any, pages: Any) -> Any:
    model = nnx.merge(graph, params)
    m, pages = model.mtp.advance(model.decoder.embed_tokens(batch.token_ids), hidden, pages, batch)
    return m, model.decoder.logits(m), pages


def _spans(starts: Sequence[int], lengths: Sequence[int], ids: np.ndarray) -> PrefillBatch:
    """Pack rows that read nothing; row r owns slot r + 1 and pages from r * _WIDTH + 1 on."""
    spare = _ROWS - len(lengths)
    padded, index = np.pad(lengths, (0, spare)), np.arange(1, _ROWS + 1)
    return PrefillBatch(
        token_ids=jnp.asarray(np.pad(ids, (0, _TOKENS - len(ids))), jnp.int32),
        rows=PrefillRows(
            offset=jnp.asarray(np.cumsum(padded) - padded, jnp.int32),
            length=jnp.asarray(padded, jnp.int32),
            start=jnp.asarray(np.pad(starts, (0, spare)), jnp.int32),
            read_slot=jnp.zeros((_ROWS,), jnp.int32),
            write_slot=jnp.asarray(np.where(index <= len(lengths), index, 0), jnp.int32),
            export_slot=jnp.zeros((_ROWS, _TOKENS // CHUNK), jnp.int32),
        ),
        block_tables=jnp.arange(1, _PAGES, dtype=jnp.int32).reshape(_ROWS, _WIDTH),
    )


def _window(tokens: Sequence[int], *, folded: int, num_replay: int) -> AdvanceBatch:
    """One row in slot 1, lane 0, and the pages of row 0."""

    def one(value: int) -> jax.Array:
        return jnp.full((1,), value, jnp.int32)

    padded = np.zeros((1, _WINDOW), np.int32)
    padded[0, : len(tokens)] = tokens
    return AdvanceBatch(
        token_ids=jnp.asarray(padded),
        rows=AdvanceRows(
            read_slot=one(_OWN_SLOT),
            write_slot=one(_OWN_SLOT),
            save_slot=one(0),
            save_at=one(0),
            folded=one(folded),
            num_replay=one(num_replay),
            num_new=one(len(tokens)),
        ),
        lane=one(0),
        block_tables=jnp.arange(1, _WIDTH + 1, dtype=jnp.int32)[None],
    )


class _Sequence:
    """One prompt in slot 1, continued by windows of new tokens: prefill, then verify with replay."""

    def __init__(self, adapter: "Adapter", ids: np.ndarray) -> None:
        self._adapter = adapter
        hidden, logits, self._state = _prefill(
            adapter.graph, adapter.params, _spans([0], [len(ids)], ids), adapter.state()
        )
        self.hidden, self.logits = np.asarray(hidden)[: len(ids)], np.asarray(logits)[: len(ids)]
        self._folded, self._replay = len(ids), 0

    def verify(self, tokens: Sequence[int]) -> np.ndarray:
        """Run tokens after the committed ones; `accept` says how many of them stand."""
        batch = _window(tokens, folded=self._folded, num_replay=self._replay)
        hidden, logits, self._state = _advance(self._adapter.graph, self._adapter.params, batch, self._state)
        self._folded += self._replay
        self._new_hidden = np.asarray(hidden)[0, : len(tokens)]
        return np.asarray(logits)[0, : len(tokens)]

    def accept(self, count: int) -> None:
        """Commit the first `count` of the tokens run last."""
        self._replay = count
        self.hidden = np.concatenate([self.hidden, self._new_hidden[:count]])


class Adapter:
    """One checkpoint in float32."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self.model: LanguageModel = load_model(folder, dtype="float32")
        self.graph, self.params = nnx.split(self.model)

    def state(self) -> ModelState:
        """Empty pools."""
        return make_state(
            self.model.config,
            num_slots=_ROWS + 1,
            num_pages=_PAGES,
            num_lanes=1,
            window=_WINDOW,
            dtype=jnp.dtype(jnp.float32),
        )

    def logits(self, ids: np.ndarray) -> np.ndarray:
        return np.asarray(self.model.logits(ids))

    def packed(self, ids: np.ndarray, cu: np.ndarray) -> np.ndarray:
        lengths = np.diff(cu)
        batch = _spans(np.zeros_like(lengths), lengths, ids)
        _, logits, _ = _prefill(self.graph, self.params, batch, self.state())
        return np.asarray(logits)[: len(ids)]

    def greedy(self, ids: np.ndarray, n: int) -> list[int]:
        sequence = _Sequence(self, ids)
        tokens = [int(sequence.logits[-1].argmax())]
        while len(tokens) < n:
            logits = sequence.verify(tokens[-1:])
            sequence.accept(1)
            tokens.append(int(logits[0].argmax()))
        return tokens

    def states(self, ids: np.ndarray) -> dict[int, dict[str, np.ndarray]]:
        _, _, state = _prefill(self.graph, self.params, _spans([0], [len(ids)], ids), self.state())
        return {
            index: {
                "recurrent": np.asarray(layer.recurrent[_OWN_SLOT]).swapaxes(-1, -2),
                "conv": np.asarray(layer.conv[_OWN_SLOT]).T,
            }
            for index, layer in enumerate(state.layers)
            if isinstance(layer, RecurrentState)
        }

    def mtp(self, hidden: np.ndarray, next_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        m, logits, _ = self._mtp(hidden, next_ids)
        return m, logits

    def _mtp(self, hidden: np.ndarray, next_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
        """Make entries 1..T from (hidden 0..T-1, tokens 1..T)."""
        length = len(next_ids)
        padded = np.pad(hidden, ((0, _TOKENS - length), (0, 0)))
        m, logits, pages = _mtp_prefill(
            self.graph, self.params, _spans([1], [length], next_ids), jnp.asarray(padded), self.state().mtp
        )
        return np.asarray(m)[:length], np.asarray(logits)[:length], pages

    def _draft(self, hidden: np.ndarray, tokens: Sequence[int], k: int) -> list[int]:
        """Draft k tokens after `tokens` (the last one pending), each draft feeding the next."""
        m, logits, pages = self._mtp(hidden, np.asarray(tokens[1:]))
        last, drafts = m[-1], [int(logits[-1].argmax())]
        while len(drafts) < k:
            batch = _window(drafts[-1:], folded=len(tokens) + len(drafts) - 1, num_replay=0)
            fed = np.zeros((1, _WINDOW, last.shape[0]), np.float32)
            fed[0, 0] = last
            out, out_logits, pages = _mtp_advance(self.graph, self.params, batch, jnp.asarray(fed), pages)
            last = np.asarray(out)[0, 0]
            drafts.append(int(np.asarray(out_logits)[0, 0].argmax()))
        return drafts

    def spec(self, ids: np.ndarray, n: int, k: int) -> tuple[list[int], list[list[int]], list[int]]:
        sequence = _Sequence(self, ids)
        tokens = [*map(int, ids), int(sequence.logits[-1].argmax())]
        rounds: list[list[int]] = []
        accepted: list[int] = []
        while len(tokens) < len(ids) + n:
            drafts = self._draft(sequence.hidden, tokens, k)
            choices = sequence.verify([tokens[-1], *drafts]).argmax(-1)
            stand = 0
            while stand < k and drafts[stand] == choices[stand]:
                stand += 1
            sequence.accept(1 + stand)
            tokens += [*drafts[:stand], int(choices[stand])]
            rounds.append(drafts)
            accepted.append(stand)
        return tokens[len(ids) : len(ids) + n], rounds, accepted

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._folder, self.model.config.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def chat(self, messages: Any, tools: Any, add_generation_prompt: bool, **kwargs: Any) -> str:
        template = ChatTemplate.from_folder(self._folder)
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt, variables=kwargs)

    @staticmethod
    def gdr(q: Any, k: Any, v: Any, g: Any, beta: Any, h0: Any, l2norm: bool) -> tuple[np.ndarray, np.ndarray]:
        batch, length, _, dk = q.shape
        q, k = jnp.asarray(q), jnp.asarray(k)
        q = l2_normalize(q, dk**-0.5) if l2norm else q * dk**-0.5
        k = l2_normalize(k) if l2norm else k
        values, heads = v.shape[-1], v.shape[-2]
        pool = np.zeros((2 * batch + 1, heads, values, dk), np.float32)
        if h0 is not None:
            pool[1 : batch + 1] = np.swapaxes(h0, -1, -2)
        index = np.arange(batch)
        rows = PrefillRows(
            offset=jnp.asarray(index * length, jnp.int32),
            length=jnp.full((batch,), length, jnp.int32),
            start=jnp.zeros((batch,), jnp.int32),
            read_slot=jnp.asarray(index + 1, jnp.int32),
            write_slot=jnp.asarray(index + 1 + batch, jnp.int32),
            export_slot=jnp.zeros((batch, -(-length // CHUNK)), jnp.int32),
        )

        def pack(x: Any) -> jax.Array:
            return jnp.asarray(x).reshape(batch * length, *x.shape[2:])

        inputs = DeltaInputs(k=pack(k), v=pack(v), g=pack(g), beta=pack(beta))
        out, pool = gdn_prefill(pack(q), inputs, rows, jnp.asarray(pool))
        final = np.asarray(pool)[batch + 1 :].swapaxes(-1, -2)
        return np.asarray(out).reshape(batch, length, heads, values), final

    @staticmethod
    def conv(x: np.ndarray, w: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        batch, length, channels = x.shape
        index = np.arange(batch)
        rows = PrefillRows(
            offset=jnp.asarray(index * length, jnp.int32),
            length=jnp.full((batch,), length, jnp.int32),
            start=jnp.zeros((batch,), jnp.int32),
            read_slot=jnp.asarray(index + 1, jnp.int32),
            write_slot=jnp.asarray(index + 1 + batch, jnp.int32),
            export_slot=jnp.zeros((batch, 1), jnp.int32),
        )
        pool = np.zeros((2 * batch + 1, state.shape[2], channels), np.float32)
        pool[1 : batch + 1] = state.swapaxes(-1, -2)
        y, pool = causal_conv1d_prefill(
            jnp.asarray(x).reshape(batch * length, channels), jnp.asarray(w), rows, jnp.asarray(pool)
        )
        return np.asarray(y).reshape(x.shape), np.asarray(pool)[batch + 1 :].swapaxes(-1, -2)
