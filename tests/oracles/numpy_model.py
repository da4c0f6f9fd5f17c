"""A whole model in float64 NumPy: the oracle that tests compare the package with.

Token by token where the mathematics is, one request at a time, no batching, no padding, no chunks. Imports nothing of
the package and no array library but NumPy. `OracleModel(folder)` reads any published checkpoint layout.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from oracles.numpy_layers import Memory, attention, feed_forward, gated_delta_net, rms_norm
from oracles.numpy_weights import read_sizes, read_weights

Ids = Sequence[int] | np.ndarray


class OracleModel:
    """The model in a checkpoint folder.

    A cache is a list with one memory per layer and is never changed in place: keep the old one to go back.
    `smallest_router_gap` is the smallest one met since it was last set (see `feed_forward`).
    """

    def __init__(self, folder: str | Path) -> None:
        self.sizes = read_sizes(Path(folder))
        self.weights = read_weights(Path(folder), self.sizes)
        self.head = self.weights["embed_tokens.weight" if self.sizes.tied else "lm_head.weight"]
        self.has_mtp = "mtp.fc.weight" in self.weights
        self._under: dict[str, dict[str, np.ndarray]] = {}
        self.smallest_router_gap = float("inf")

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the weights whose name starts with `prefix`, under the rest of their names."""
        if prefix not in self._under:  # asked for once per layer and token
            self._under[prefix] = {
                name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)
            }
        return self._under[prefix]

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return rms_norm(x, self.weights[name], self.sizes.eps)

    def empty_attention(self) -> Memory:
        """Return the memory of an attention layer, also that of MTP, before any token."""
        shape = (self.sizes.num_kv_heads, 0, self.sizes.head_dim)
        return np.zeros(shape), np.zeros(shape)

    def empty_cache(self) -> list[Memory]:
        """Return the cache of a request without tokens."""
        s = self.sizes
        channels = 2 * s.num_key_heads * s.key_dim + s.num_value_heads * s.value_dim
        zero_state = (
            np.zeros((s.num_value_heads, s.key_dim, s.value_dim)),
            np.zeros((channels, s.conv_kernel - 1)),
        )
        return [zero_state if kind == "linear_attention" else self.empty_attention() for kind in s.layer_types]

    def _layer(
        self, x: np.ndarray, prefix: str, kind: str, memory: Memory
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, Memory]:
        """Run one decoder layer; return mixer output, feed-forward output, residual stream, new memory."""
        mixer, name = (gated_delta_net, "linear_attn.") if kind == "linear_attention" else (attention, "self_attn.")
        normed = self._norm(x, f"{prefix}input_layernorm.weight")
        mixed, memory = mixer(normed, self.under(prefix + name), self.sizes, memory)
        x = x + mixed
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        fed, gap = feed_forward(normed, self.under(f"{prefix}mlp."), self.sizes)
        self.smallest_router_gap = min(self.smallest_router_gap, gap)
        return mixed, fed, x + fed, memory

    def advance(
        self, ids: Ids, cache: list[Memory], *, trace: dict[str, np.ndarray] | None = None
    ) -> tuple[np.ndarray, list[Memory]]:
        """Run `ids` after the tokens in `cache`.

        Args:
            ids: token ids, at least one.
            cache: from `empty_cache` or an earlier call; not changed.
            trace: if given, filled with embed, layer{i}.mixer, .mlp and .out, and final_norm, each [T, H].

        Returns:
            The hidden states after the final norm [T, H], and the new cache.
        """
        trace = {} if trace is None else trace
        x = trace["embed"] = self.weights["embed_tokens.weight"][np.asarray(ids)]
        new = []
        for i, (kind, memory) in enumerate(zip(self.sizes.layer_types, cache, strict=True)):
            mixed, fed, x, memory = self._layer(x, f"layers.{i}.", kind, memory)
            trace |= {f"layer{i}.mixer": mixed, f"layer{i}.mlp": fed, f"layer{i}.out": x}
            new.append(memory)
        trace["final_norm"] = self._norm(x, "norm.weight")
        return trace["final_norm"], new

    def hidden(self, ids: Ids) -> np.ndarray:
        """Return the hidden states after the final norm [T, H] of a prompt."""
        return self.advance(ids, self.empty_cache())[0]

    def logits(self, ids: Ids) -> np.ndarray:
        """Return the logits [T, V] at every position of a prompt."""
        return self.hidden(ids) @ self.head.T

    def states(self, ids: Ids) -> dict[int, dict[str, np.ndarray]]:
        """Return what each GDN layer holds after a prompt: "recurrent" [Nv, dk, dv] and "conv" [C, K-1]."""
        _, cache = self.advance(ids, self.empty_cache())
        return {
            i: dict(zip(("recurrent", "conv"), memory, strict=True))
            for i, (kind, memory) in enumerate(zip(self.sizes.layer_types, cache, strict=True))
            if kind == "linear_attention"
        }

    def greedy_logits(self, ids: Ids, n: int) -> tuple[list[int], np.ndarray]:
        """Return n greedy tokens (end tokens ignored, ties to the lowest id) and the logits [n, V] they come from."""
        tokens: list[int] = []
        rows: list[np.ndarray] = []
        span, cache = np.asarray(ids), self.empty_cache()
        for _ in range(n):
            hidden, cache = self.advance(span, cache)
            rows.append(hidden[-1] @ self.head.T)
            tokens.append(int(rows[-1].argmax()))
            span = np.asarray(tokens[-1:])
        return tokens, np.stack(rows)

    def greedy(self, ids: Ids, n: int) -> list[int]:
        """Return the n tokens of the greedy continuation, end tokens ignored."""
        return self.greedy_logits(ids, n)[0]

    def advance_mtp(self, hidden: np.ndarray, next_ids: Ids, memory: Memory) -> tuple[np.ndarray, Memory]:
        """Run the MTP head after the entries in `memory`.

        Args:
            hidden: final-normed states [T, H] of the target, or the head's own output when it feeds itself.
            next_ids: the token that follows each of them.
            memory: keys and values of the MTP layer; the first entry has rotary position 0.

        Returns:
            The head's states after mtp.norm [T, H], and the new memory.
        """
        if not self.has_mtp:
            raise ValueError("the checkpoint must hold mtp.* tensors to draft; it has none")
        e = self._norm(self.weights["embed_tokens.weight"][np.asarray(next_ids)], "mtp.pre_fc_norm_embedding.weight")
        h = self._norm(hidden, "mtp.pre_fc_norm_hidden.weight")
        x = np.concatenate([e, h], -1) @ self.weights["mtp.fc.weight"].T
        *_, x, memory = self._layer(x, "mtp.layers.0.", "full_attention", memory)
        return self._norm(x, "mtp.norm.weight"), memory

    def mtp(self, hidden: np.ndarray, next_ids: Ids) -> tuple[np.ndarray, np.ndarray]:
        """Return the MTP states [T, H] of a whole prompt and their logits [T, V], which guess the token after next."""
        m, _ = self.advance_mtp(np.asarray(hidden, np.float64), next_ids, self.empty_attention())
        return m, m @ self.head.T

    def draft(self, hidden: np.ndarray, next_ids: Ids, memory: Memory, k: int) -> tuple[list[int], np.ndarray, Memory]:
        """Draft k tokens greedily after new true entries.

        Returns:
            The drafts, the logits [k, V] they come from, and the memory with the true entries only: what the head
            wrote while it fed itself is dropped.
        """
        m, true_memory = self.advance_mtp(hidden, next_ids, memory)
        m, own = m[-1:], true_memory
        rows = [m[0] @ self.head.T]
        while len(rows) < k:
            m, own = self.advance_mtp(m, [int(rows[-1].argmax())], own)
            rows.append(m[0] @ self.head.T)
        return [int(row.argmax()) for row in rows], np.stack(rows), true_memory

    def spec_logits(self, ids: Ids, n: int, k: int) -> tuple[list[int], list[list[int]], list[int], np.ndarray]:
        """Decode speculatively and greedily with k drafts a round; see `spec`. Also return all draft logits [., V]."""
        hidden, cache = self.advance(ids, self.empty_cache())
        tokens = [int((hidden[-1] @ self.head.T).argmax())]
        next_ids = [*np.asarray(ids)[1:].tolist(), tokens[-1]]
        memory = self.empty_attention()
        drafts: list[list[int]] = []
        accepted: list[int] = []
        rows: list[np.ndarray] = []
        while len(tokens) < n:
            guess, guess_logits, memory = self.draft(hidden, next_ids, memory, k)
            verified, _ = self.advance([tokens[-1], *guess], cache)
            wanted = (verified @ self.head.T).argmax(-1).tolist()
            count = next((i for i in range(k) if guess[i] != wanted[i]), k)
            # A rejected draft must leave no trace, so the tokens that stand are run again from the old cache.
            hidden, cache = self.advance([tokens[-1], *guess[:count]], cache)
            next_ids = wanted[: count + 1]  # the accepted drafts and the bonus token
            tokens += next_ids
            drafts.append(guess)
            accepted.append(count)
            rows.append(guess_logits)
        return tokens[:n], drafts, accepted, np.concatenate(rows)

    def spec(self, ids: Ids, n: int, k: int) -> tuple[list[int], list[list[int]], list[int]]:
        """Return n tokens of greedy speculative decoding, the k drafts of each round, and how many were accepted.

        The prompt's forward pass gives the first token. The last round may run past n tokens; the surplus is cut.
        """
        return self.spec_logits(ids, n, k)[:3]
