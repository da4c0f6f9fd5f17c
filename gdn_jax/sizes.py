"""Sizes that follow from a ModelConfig: parameters, bytes of weights, bytes of what a sequence holds.

Arithmetic on integers; nothing is allocated. Both counts of the weights run over one list of tensors, so that
parameters and bytes cannot disagree.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp

from gdn_jax.config import ModelConfig
from gdn_jax.config_json import LINEAR_ATTENTION

DTypeLike = str | type | jnp.dtype

_SCALE_BYTES = 2  # block scales of the official FP8 releases are bfloat16


@dataclass(frozen=True, kw_only=True)
class _Tensors:
    """Equal tensors: their shape, how many, and whether an FP8 release quantizes them."""

    shape: tuple[int, ...]
    count: int = 1
    quantized: bool = False


def parameter_count(config: ModelConfig) -> tuple[int, int]:
    """Return the parameters of the main model and of its MTP layers.

    The embedding and the output matrix, which MTP shares, count as the main model's; a tied pair counts once.
    """
    main, mtp = ([*tensors] for tensors in (_main_tensors(config), _mtp_tensors(config)))
    return sum(t.count * prod(t.shape) for t in main), sum(t.count * prod(t.shape) for t in mtp)


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of the weights, MTP included, as the official release stores them.

    That is `config.dtype` throughout (some releases hold A_log and the GDN norm in float32, which is not counted), or,
    with FP8, one byte per element of a quantized matrix and one scale per block. Quantized is everything but the
    embedding, the output matrix, norms, the convolution, b and a of GDN, the router, the shared expert's gate, and
    MTP's fc. That is the rule of the releases up to 397B; the FP8 release of the 2.4T model quantizes routed experts
    only and is larger than what this returns.
    """
    item = jnp.dtype(config.dtype).itemsize
    total = 0
    for tensors in (*_main_tensors(config), *_mtp_tensors(config)):
        elements = prod(tensors.shape)
        if config.quantization is not None and tensors.quantized:
            blocks = [-(-n // block) for n, block in zip(tensors.shape, config.quantization.block_shape, strict=True)]
            total += tensors.count * (elements + prod(blocks) * _SCALE_BYTES)
        else:
            total += tensors.count * elements * item
    return total


def state_bytes_per_slot(config: ModelConfig, state_dtype: DTypeLike, dtype: DTypeLike) -> int:
    """Return the bytes that the GDN layers hold for one sequence, whatever its length.

    Args:
        config: the model.
        state_dtype: of the recurrent states, [Nv, dv, dk] per layer.
        dtype: of the convolution windows, [K - 1, C] per layer.
    """
    recurrent = config.num_linear_value_heads * config.linear_key_dim * config.linear_value_dim
    window = config.conv_window * config.conv_channels
    per_layer = recurrent * jnp.dtype(state_dtype).itemsize + window * jnp.dtype(dtype).itemsize
    return config.num_gdn_layers * per_layer


def kv_bytes_per_token(config: ModelConfig, dtype: DTypeLike) -> int:
    """Return the bytes of keys and values of one token in the full-attention layers, MTP not counted.

    Args:
        config: the model.
        dtype: of keys and values.
    """
    return config.num_attention_layers * _kv_bytes_per_layer(config, dtype)


def mtp_kv_bytes_per_token(config: ModelConfig, dtype: DTypeLike) -> int:
    """Return the bytes of keys and values of one token in the MTP layers.

    Args:
        config: the model.
        dtype: of keys and values.
    """
    return config.num_mtp_layers * _kv_bytes_per_layer(config, dtype)


def _kv_bytes_per_layer(config: ModelConfig, dtype: DTypeLike) -> int:
    return 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize


def _main_tensors(config: ModelConfig) -> Iterator[_Tensors]:
    vocab, hidden = config.vocab_size, config.hidden_size
    yield _Tensors(shape=(vocab, hidden), count=1 if config.tie_word_embeddings else 2)
    yield _Tensors(shape=(hidden,))
    for kind, is_moe in zip(config.layer_types, config.is_moe_layer, strict=True):
        yield from _layer_tensors(config, is_gdn=kind == LINEAR_ATTENTION, is_moe=is_moe)


def _mtp_tensors(config: ModelConfig) -> Iterator[_Tensors]:
    for _ in range(config.num_mtp_layers):
        yield _Tensors(shape=(config.hidden_size, 2 * config.hidden_size))
        yield _Tensors(shape=(config.hidden_size,), count=3)
        yield from _layer_tensors(config, is_gdn=False, is_moe=config.mtp_is_moe)


def _layer_tensors(config: ModelConfig, *, is_gdn: bool, is_moe: bool) -> Iterator[_Tensors]:
    yield _Tensors(shape=(config.hidden_size,), count=2)
    yield from _gdn_tensors(config) if is_gdn else _attention_tensors(config)
    yield from _moe_tensors(config) if is_moe else _dense_tensors(config, config.intermediate_size)


def _gdn_tensors(config: ModelConfig) -> Iterator[_Tensors]:
    hidden, heads = config.hidden_size, config.num_linear_value_heads
    width = heads * config.linear_value_dim
    yield _Tensors(shape=(config.conv_channels, hidden), quantized=True)  # q, k, v
    yield _Tensors(shape=(width, hidden), quantized=True)  # z
    yield _Tensors(shape=(heads, hidden), count=2)  # b, a
    yield _Tensors(shape=(config.conv_channels, config.conv_kernel))
    yield _Tensors(shape=(heads,), count=2)  # A_log, dt_bias
    yield _Tensors(shape=(config.linear_value_dim,))  # gated norm
    yield _Tensors(shape=(hidden, width), quantized=True)  # out


def _attention_tensors(config: ModelConfig) -> Iterator[_Tensors]:
    hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
    yield _Tensors(shape=(2 * width, hidden), quantized=True)  # q and the output gate
    yield _Tensors(shape=(config.num_kv_heads * config.head_dim, hidden), count=2, quantized=True)  # k, v
    yield _Tensors(shape=(hidden, width), quantized=True)  # out
    yield _Tensors(shape=(config.head_dim,), count=2)  # norms of q and k


def _dense_tensors(config: ModelConfig, width: int, count: int = 1) -> Iterator[_Tensors]:
    yield _Tensors(shape=(width, config.hidden_size), count=2 * count, quantized=True)  # gate, up
    yield _Tensors(shape=(config.hidden_size, width), count=count, quantized=True)  # down


def _moe_tensors(config: ModelConfig) -> Iterator[_Tensors]:
    yield _Tensors(shape=(config.num_experts, config.hidden_size))  # router
    yield from _dense_tensors(config, config.moe_intermediate_size, count=config.num_experts)
    yield from _dense_tensors(config, config.shared_expert_intermediate_size)
    yield _Tensors(shape=(1, config.hidden_size))  # gate of the shared expert
