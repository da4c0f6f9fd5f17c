"""What a step needs beside weights and pools while it runs: an upper estimate, from what its largest stage holds.

Layers run one after the other, so their buffers serve each other and the number of layers does not count. Each stage
below lists the arrays that are alive together. Tests compare the sum with what XLA assigns: never less, and at most
twice as much. They do so with plain JAX on a CPU, in float32, and with Mosaic kernels for an H200. Where weights are
bfloat16 a CPU makes float32 copies of some, which is not counted: nothing shares out a CPU's memory by this estimate.

Decode has one estimate, that of plain JAX: Mosaic kernels update states in place, and need less.
"""

import math

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.chunk_table import max_chunks
from gdn_jax.kernels.gated_delta.chunk_grid import num_places
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.plain import KEY_TILE
from gdn_jax.kernels.paged_attention.prefill_tiles import choose_prefill_tiles, parts_shape

_FLOAT32 = 4
_PRODUCT_BYTES = 8 << 20  # that XLA lends the GPU's library of matrix products
# Logits, masked, scaled, ranked (a sort keeps keys and ids, before and after) and with noise.
_LOGITS_COPIES = 7
_SCORED_COPIES = 3  # logits, those of ids that have a text, and their exponentials
_STATE_COPIES = 3  # gathered in float32, after the fold, and the one that is saved on the way


def prefill_bytes(model: ModelConfig, item_bytes: int, *, num_tokens: int, num_rows: int) -> int:
    """Return the bytes of a prefill call in plain JAX.

    Args:
        model: the model.
        item_bytes: of one number of the activations.
        num_tokens: packed tokens.
        num_rows: rows.
    """
    value_width = model.num_linear_value_heads * model.linear_value_dim
    key_width = model.num_linear_key_heads * model.linear_key_dim
    # The raw inputs with and without the windows before them, one gathered copy per tap, sum and output.
    convolution = num_tokens * ((model.conv_kernel + 3) * model.conv_channels + 2 * model.hidden_size) * item_bytes
    places = max_chunks(num_tokens, num_rows) * CHUNK
    matrices = 5 * CHUNK * model.num_linear_value_heads  # products, decays, scores and the inverse of each chunk
    delta = places * ((4 * key_width + 2 * value_width) * item_bytes + (matrices + value_width) * _FLOAT32)
    attention = num_tokens * _attention_width(model) * item_bytes
    attention += _attention_tile(model, item_bytes, num_queries=CHUNK, num_rows=1)
    mixer = max(convolution, delta) + min(convolution, delta) // 4 if model.num_gdn_layers else 0
    mixer = max(mixer, attention if model.num_attention_layers else 0)
    return _peak(model, item_bytes, mixer, num_tokens=num_tokens, num_logits=num_rows)


def mosaic_prefill_bytes(
    model: ModelConfig, item_bytes: int, *, num_tokens: int, num_rows: int, num_blocks: int
) -> int:
    """Return the bytes of a prefill call where Mosaic kernels run it.

    Few tokens may need more than many: those whose attention is split into parts, which follow from the table's width.

    Args:
        model: the model.
        item_bytes: of one number of the activations.
        num_tokens: packed tokens.
        num_rows: rows.
        num_blocks: width of the block tables.
    """
    num_value, value_width = model.num_linear_value_heads, model.num_linear_value_heads * model.linear_value_dim
    places = num_places(num_tokens, num_rows)
    chunks = places // CHUNK
    # Projections, up to the norm, whose gate is among them. On the grid q, k and v, and outputs. Of each chunk and
    # value head two matrices; of each of its places g and beta, which become two decays and beta.
    projections = model.conv_channels + value_width + 2 * num_value + model.linear_value_dim
    delta = num_tokens * (projections + 2 * model.hidden_size) * item_bytes
    delta += places * (model.conv_channels + value_width) * item_bytes
    delta += chunks * num_value * CHUNK * (2 * CHUNK * item_bytes + 5 * _FLOAT32)
    attention = num_tokens * _attention_width(model) * item_bytes
    if model.num_attention_layers:
        tiles = choose_prefill_tiles(
            num_tokens=num_tokens,
            rows=num_rows,
            blocks=num_blocks,
            kv_heads=model.num_kv_heads,
            group=model.num_attention_heads // model.num_kv_heads,
            width=model.head_dim,
            item_bytes=item_bytes,
        )
        results = math.prod(parts_shape(tiles, num_tokens, num_rows, model.num_kv_heads)) if tiles.part_pages else 0
        attention += results * (model.head_dim + 1) * _FLOAT32  # and the weight of each
    mixer = max(delta if model.num_gdn_layers else 0, attention if model.num_attention_layers else 0)
    return _peak(model, item_bytes, mixer, num_tokens=num_tokens, num_logits=num_rows) + _PRODUCT_BYTES


def advance_bytes(model: ModelConfig, item_bytes: int, *, num_rows: int, window: int) -> int:
    """Return the bytes of a decode or verify call.

    Args:
        model: the model.
        item_bytes: of one number of the activations.
        num_rows: rows.
        window: new tokens of a row.
    """
    state = model.num_linear_value_heads * model.linear_value_dim * model.linear_key_dim * _FLOAT32
    inputs = (2 * window + model.conv_window) * (4 * model.conv_channels + model.hidden_size) * item_bytes
    delta = num_rows * (_STATE_COPIES * state + inputs) if model.num_gdn_layers else 0
    attention = num_rows * window * 6 * model.num_attention_heads * model.head_dim * item_bytes
    attention += _attention_tile(model, item_bytes, num_queries=window, num_rows=num_rows)
    mixer = max(delta, attention if model.num_attention_layers else 0)
    return _peak(model, item_bytes, mixer, num_tokens=num_rows * window, num_logits=num_rows * window)


def score_bytes(model: ModelConfig, item_bytes: int, *, num_tokens: int) -> int:
    """Return the bytes of a call that scores prompts: the vectors it reads, the logits of one tile, and a tenth more.

    Args:
        model: the model.
        item_bytes: of one number of the activations.
        num_tokens: packed tokens of the prefill call.
    """
    tile = _SCORED_COPIES * CHUNK * model.vocab_size * _FLOAT32
    return (tile + num_tokens * model.hidden_size * item_bytes) * 11 // 10


def _attention_width(model: ModelConfig) -> int:
    """Return how many numbers of each token are alive in attention: projections, normed, rotated, gated."""
    return (6 * model.num_attention_heads + 4 * model.num_kv_heads) * model.head_dim


def _attention_tile(model: ModelConfig, item_bytes: int, *, num_queries: int, num_rows: int) -> int:
    """Return the bytes of the keys, values and scores of one tile of keys, and of what is summed up over tiles."""
    keys_and_values = 2 * KEY_TILE * model.num_kv_heads * model.head_dim * item_bytes
    scores = num_queries * model.num_attention_heads * (3 * KEY_TILE + 2 * model.head_dim) * _FLOAT32
    return num_rows * (keys_and_values + scores)


def _peak(model: ModelConfig, item_bytes: int, mixer: int, *, num_tokens: int, num_logits: int) -> int:
    """Return the larger of a layer's peak and that of choosing tokens, and a tenth for what is not listed."""
    hidden = model.hidden_size
    dense = num_tokens * (3 * model.intermediate_size + 2 * hidden) * item_bytes
    routed = num_tokens * model.num_experts_per_token  # rows of experts
    width = model.moe_intermediate_size
    experts = (
        routed * (hidden * (item_bytes + _FLOAT32) + 4 * width * item_bytes) + 3 * num_tokens * hidden * item_bytes
    )
    feed_forward = max(dense, experts if any(model.is_moe_layer) else 0)
    layer = max(mixer, feed_forward) + min(mixer, feed_forward) // 8  # what is left of one lies between the other's
    logits = _LOGITS_COPIES * num_logits * model.vocab_size * _FLOAT32
    return max(layer, logits) * 11 // 10
