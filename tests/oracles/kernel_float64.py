"""The gated delta rule and the causal convolution in float64 NumPy: one token, one row, one slot at a time.

Pools are read as dictionaries: each function returns the outputs and the slots it stored, by slot; any other slot must
stay as it was.
"""

from types import SimpleNamespace

import numpy as np

CHUNK = 64


def as_numpy(tree_part: object) -> SimpleNamespace:
    """Return the array fields of a dataclass as NumPy arrays, floating ones in float64."""
    fields = {name: np.asarray(value) for name, value in vars(tree_part).items()}
    return SimpleNamespace(**{name: x if x.dtype.kind == "i" else x.astype(np.float64) for name, x in fields.items()})


def delta_step(state: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Return S [Nv, dk, dv] after one token."""
    after = np.empty_like(state)
    per_key = state.shape[0] // k.shape[0]
    for h in range(state.shape[0]):
        key = k[h // per_key]
        decayed = np.exp(g[h]) * state[h]
        error = v[h] - decayed.T @ key
        after[h] = decayed + np.outer(key, beta[h] * error)
    return after


def delta_read(state: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return S^T q of each value head."""
    per_key = state.shape[0] // q.shape[0]
    return np.stack([state[h].T @ q[h // per_key] for h in range(state.shape[0])])


def load(pool: np.ndarray, slot: int) -> np.ndarray:
    """Return the float64 content of a slot; zeros for the null slot."""
    content = np.asarray(pool[slot]).astype(np.float64)
    return np.zeros_like(content) if slot == 0 else content


def delta_prefill(q: object, inputs: object, rows: object, pool: object) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return outputs (zero where no row owns the token) and stored states [Nv, dv, dk]."""
    q, x, r, pool = np.asarray(q).astype(np.float64), as_numpy(inputs), as_numpy(rows), np.asarray(pool)
    outputs, stored = np.zeros(x.v.shape), {}
    for row in range(len(r.offset)):
        state = load(pool, r.read_slot[row]).swapaxes(-1, -2)
        for i in range(r.length[row]):
            t = r.offset[row] + i
            state = delta_step(state, x.k[t], x.v[t], x.g[t], x.beta[t])
            outputs[t] = delta_read(state, q[t])
            store_export(stored, r, row, i, state.swapaxes(-1, -2))
        stored[r.write_slot[row]] = state.swapaxes(-1, -2)
    stored.pop(0, None)
    return outputs, stored


def delta_advance(
    q: object, new: object, replay: object, rows: object, pool: object
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return outputs (zero past `num_new`) and stored states [Nv, dv, dk]."""
    q, x, y, r = np.asarray(q).astype(np.float64), as_numpy(new), as_numpy(replay), as_numpy(rows)
    pool = np.asarray(pool)
    outputs, stored = np.zeros(x.v.shape), {}
    for row in range(len(r.read_slot)):
        state = load(pool, r.read_slot[row]).swapaxes(-1, -2)
        for j in range(r.num_replay[row]):
            state = delta_step(state, y.k[row, j], y.v[row, j], y.g[row, j], y.beta[row, j])
            if r.folded[row] + j + 1 == r.save_at[row]:
                stored[r.save_slot[row]] = state.swapaxes(-1, -2)
        stored[r.write_slot[row]] = state.swapaxes(-1, -2)
        for t in range(r.num_new[row]):
            state = delta_step(state, x.k[row, t], x.v[row, t], x.g[row, t], x.beta[row, t])
            outputs[row, t] = delta_read(state, q[row, t])
    stored.pop(0, None)
    return outputs, stored


def convolve(history: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return silu of the weighted sum of the last K inputs `[K, C]`."""
    total = np.einsum("kc,ck->c", history, weight)
    return total / (1.0 + np.exp(-total))


def conv_prefill(x: object, weight: object, rows: object, pool: object) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return outputs (zero where no row owns the token) and stored windows [K - 1, C]."""
    x, weight, r = np.asarray(x).astype(np.float64), np.asarray(weight).astype(np.float64), as_numpy(rows)
    pool = np.asarray(pool)
    outputs, stored = np.zeros(x.shape), {}
    for row in range(len(r.offset)):
        window = load(pool, r.read_slot[row])
        for i in range(r.length[row]):
            history = np.concatenate([window, x[r.offset[row] + i][None]])
            outputs[r.offset[row] + i] = convolve(history, weight)
            window = history[1:]
            store_export(stored, r, row, i, window)
        stored[r.write_slot[row]] = window
    stored.pop(0, None)
    return outputs, stored


def conv_advance(
    x: object, replay: object, weight: object, rows: object, pool: object
) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return outputs (zero past `num_new`) and stored windows [K - 1, C]."""
    x, replay, weight = (np.asarray(array).astype(np.float64) for array in (x, replay, weight))
    r, pool = as_numpy(rows), np.asarray(pool)
    outputs, stored = np.zeros(x.shape), {}
    for row in range(len(r.read_slot)):
        window = load(pool, r.read_slot[row])
        for j in range(r.num_replay[row]):
            window = np.concatenate([window, replay[row, j][None]])[1:]
            if r.folded[row] + j + 1 == r.save_at[row]:
                stored[r.save_slot[row]] = window
        stored[r.write_slot[row]] = window
        for t in range(r.num_new[row]):
            history = np.concatenate([window, x[row, t][None]])
            outputs[row, t], window = convolve(history, weight), history[1:]
    stored.pop(0, None)
    return outputs, stored


def store_export(stored: dict[int, np.ndarray], r: SimpleNamespace, row: int, i: int, state: np.ndarray) -> None:
    """Store the state after row token i if the sequence then has a whole number of chunks and a slot is listed."""
    count = r.start[row] + i + 1
    if count % CHUNK == 0:
        stored[r.export_slot[row, count // CHUNK - r.start[row] // CHUNK - 1]] = state
