"""How much arithmetic a token of training is, and how much a device could do; the progress bar shows the share."""

import math

from gdn_jax.config import ModelConfig
from gdn_jax.training.parameters import Layout

# Dense bf16 matrix products, FLOP/s, as the vendor states them, by a word of the device's name.
_PEAKS = {"H200": 989e12, "H100": 989e12}


def flops_per_token(config: ModelConfig, layout: Layout, *, sequence_length: int, mtp_depth: float) -> float:
    """Return model flops of one token, forward and backward: what the mathematics needs, recomputation not counted.

    That is 6 per element of each matrix that a token meets, and attention between all tokens of a row (half of the
    square; documents that are shorter than a row need less). The embedding counts where it is the output matrix. The
    MTP head and its own output product count once per depth. The delta rule itself is not counted.

    Args:
        config: the model.
        layout: its parameters.
        sequence_length: T.
        mtp_depth: times that the MTP head runs per token of the batch; a fraction if it sees some rows only.
    """
    depth = mtp_depth if config.num_mtp_layers else 0
    total = config.vocab_size * config.hidden_size * (1 + depth)  # output products
    for name, _, shape, _ in layout.leaves:
        if len(shape) == 2 and "embed_tokens" not in name and "lm_head" not in name and "conv1d" not in name:
            total += math.prod(shape) * (depth if name.startswith("mtp.") else 1)
    width = config.num_attention_heads * config.head_dim
    attention = (config.num_attention_layers + depth) * sequence_length * width
    return 6.0 * (total + attention)


def peak_flops(device_kind: str) -> float | None:
    """Return the peak of a kind of device in FLOP/s; None where it is not known."""
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)
