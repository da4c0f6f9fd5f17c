"""The layers of Gated-DeltaNet hybrid models in float64 NumPy, written for reading and not for speed.

Each function takes the tokens of one span [T, H], the weights of its layer (a dict of short names) and what the
layer remembers of the tokens before, and returns its output with the new memory. Nothing is changed in place, so an
old memory stays valid and a rejected draft is undone by forgetting the new one.
"""

from collections.abc import Mapping

import numpy as np
from oracles.numpy_weights import Sizes

Weights = Mapping[str, np.ndarray]
Memory = tuple[np.ndarray, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def silu(x: np.ndarray) -> np.ndarray:
    """Return x sigmoid(x)."""
    return x * sigmoid(x)


def softmax(x: np.ndarray) -> np.ndarray:
    """Return the softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return the zero-centred RMS norm x / sqrt(mean(x^2) + eps) (1 + w) over the last axis."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * (1.0 + weight)


def l2_normalize(x: np.ndarray) -> np.ndarray:
    """Return x / sqrt(sum(x^2) + 1e-6) over the last axis; the eps is fixed, not that of the config."""
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def rotate(x: np.ndarray, positions: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Rotate the first R channels of x [T, heads, D], first half against second half; the rest passes through."""
    half = sizes.inverse_frequencies.size
    angle = positions[:, None, None] * sizes.inverse_frequencies
    cos, sin = sizes.rotary_scale * np.cos(angle), sizes.rotary_scale * np.sin(angle)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attention(x: np.ndarray, w: Weights, sizes: Sizes, memory: Memory) -> tuple[np.ndarray, Memory]:
    """Gated full attention; the memory is (k after norm and rotation, v), both [Hkv, tokens, D]."""
    num_tokens, start = len(x), memory[0].shape[1]
    positions = start + np.arange(num_tokens)
    q_and_gate = (x @ w["q_proj.weight"].T).reshape(num_tokens, sizes.num_heads, 2 * sizes.head_dim)
    q, gate = q_and_gate[..., : sizes.head_dim], q_and_gate[..., sizes.head_dim :]  # interleaved per head
    k = (x @ w["k_proj.weight"].T).reshape(num_tokens, sizes.num_kv_heads, sizes.head_dim)
    v = (x @ w["v_proj.weight"].T).reshape(num_tokens, sizes.num_kv_heads, sizes.head_dim)
    q = rotate(rms_norm(q, w["q_norm.weight"], sizes.eps), positions, sizes)
    k = rotate(rms_norm(k, w["k_norm.weight"], sizes.eps), positions, sizes)
    keys = np.concatenate([memory[0], k.swapaxes(0, 1)], axis=1)
    values = np.concatenate([memory[1], v.swapaxes(0, 1)], axis=1)
    visible = np.arange(keys.shape[1]) <= positions[:, None]
    out = np.empty((num_tokens, sizes.num_heads, sizes.head_dim))
    for head in range(sizes.num_heads):
        kv_head = head // (sizes.num_heads // sizes.num_kv_heads)
        scores = q[:, head] @ keys[kv_head].T / np.sqrt(sizes.head_dim)
        out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ values[kv_head]
    return (out * sigmoid(gate)).reshape(num_tokens, -1) @ w["o_proj.weight"].T, (keys, values)


def causal_conv(x: np.ndarray, kernel: np.ndarray, window: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Depthwise causal convolution and SiLU.

    Args:
        x: inputs [T, C].
        kernel: taps [C, K]; the last one meets the current token.
        window: the K-1 inputs before the span [C, K-1], oldest first.

    Returns:
        The activated outputs [T, C] and the window after the span.
    """
    num_tokens, taps = len(x), kernel.shape[1]
    inputs = np.concatenate([window.T, x])
    mixed = sum(kernel[:, j] * inputs[j : j + num_tokens] for j in range(taps))
    return silu(mixed), inputs[num_tokens:].T


def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The gated delta rule (Yang et al. 2024, "Gated Delta Networks", eq. 10), token by token.

    Args:
        q: queries [T, Nv, dk], normalized and scaled.
        k: keys [T, Nv, dk], normalized.
        v: values [T, Nv, dv].
        g: log of the decay [T, Nv], at most 0.
        beta: writing strength [T, Nv].
        state: S [Nv, dk, dv] before the span.

    Returns:
        The outputs [T, Nv, dv] and the state after the span.
    """
    out = np.empty(v.shape)
    decay = np.exp(g)[..., None, None]
    for t in range(len(v)):
        state = decay[t] * state  # decay first, then read
        error = v[t] - (k[t][:, None] @ state)[:, 0]
        state = state + k[t][:, :, None] * (beta[t][:, None] * error)[:, None]
        out[t] = (q[t][:, None] @ state)[:, 0]  # the output sees the updated state
    return out, state


def gated_delta_net(x: np.ndarray, w: Weights, sizes: Sizes, memory: Memory) -> tuple[np.ndarray, Memory]:
    """Gated DeltaNet; the memory is (S [Nv, dk, dv], the last K-1 inputs of the convolution [C, K-1])."""
    state, window = memory
    num_tokens = len(x)
    mixed, window = causal_conv(x @ w["in_proj_qkv.weight"].T, w["conv1d.weight"][:, 0], window)
    key_width = sizes.num_key_heads * sizes.key_dim
    q, k, v = np.split(mixed, [key_width, 2 * key_width], axis=-1)
    per_group = sizes.num_value_heads // sizes.num_key_heads  # value head h uses key head h // per_group
    q = np.repeat(l2_normalize(q.reshape(num_tokens, -1, sizes.key_dim)), per_group, axis=1) / np.sqrt(sizes.key_dim)
    k = np.repeat(l2_normalize(k.reshape(num_tokens, -1, sizes.key_dim)), per_group, axis=1)
    v = v.reshape(num_tokens, sizes.num_value_heads, sizes.value_dim)
    g = -np.exp(w["A_log"]) * np.logaddexp(0.0, x @ w["in_proj_a.weight"].T + w["dt_bias"])
    beta = sigmoid(x @ w["in_proj_b.weight"].T)
    out, state = delta_rule(q, k, v, g, beta, state)
    z = (x @ w["in_proj_z.weight"].T).reshape(out.shape)
    # The weight of this norm is used as it is, not as 1 + w.
    normed = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + sizes.eps) * w["norm.weight"]
    return (normed * silu(z)).reshape(num_tokens, -1) @ w["out_proj.weight"].T, (state, window)


def feed_forward(x: np.ndarray, w: Weights, sizes: Sizes) -> tuple[np.ndarray, float]:
    """Dense or mixture of experts, by the tensors that exist.

    Returns:
        The output [T, H], and the smallest gap in probability between the last chosen expert and the next one
        (infinite where nothing is chosen): a rounding error larger than it picks other experts.
    """
    if "gate.weight" not in w:
        return _gated_mlp(x, w["gate_proj.weight"], w["up_proj.weight"], w["down_proj.weight"]), np.inf
    shared = _gated_mlp(x, *(w[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    y = sigmoid(x @ w["shared_expert_gate.weight"].T) * shared
    probabilities = softmax(x @ w["gate.weight"].T)  # over all experts, before the choice
    gap = np.inf
    for t, p in enumerate(probabilities):
        order = np.argsort(-p, kind="stable")
        chosen = order[: sizes.experts_per_token]
        if len(order) > len(chosen):
            gap = min(gap, p[chosen[-1]] - p[order[len(chosen)]])
        total = p[chosen].sum() if sizes.norm_topk_prob else 1.0
        for expert in chosen:
            gate, up = np.split(w["experts.gate_up_proj"][expert], 2)
            y[t] += p[expert] / total * _gated_mlp(x[t], gate, up, w["experts.down_proj"][expert])
    return y, gap


def _gated_mlp(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T
