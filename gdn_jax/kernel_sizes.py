"""Whether the Mosaic kernels can run a model: asked once, before weights load, and not in the first step."""

import jax.numpy as jnp

from gdn_jax.config import ModelConfig
from gdn_jax.kernels.dispatch import tensor_cores_multiply
from gdn_jax.kernels.gated_delta.tiles import check_mixer
from gdn_jax.kernels.gdn_mixer.tiles import check_taps, check_value_heads
from gdn_jax.kernels.numerics import CHUNK
from gdn_jax.kernels.paged_attention.tiles import check_advance


def check_kernel_sizes(
    config: ModelConfig, dtype: jnp.dtype, *, state_dtype: str = "float32", window: int = 1, block_size: int = CHUNK
) -> None:
    """Raise UnsupportedKernelError for a model that the Mosaic kernels cannot run.

    Args:
        config: the model.
        dtype: of the activations; where tensor cores do not multiply them, plain JAX runs any size.
        state_dtype: of recurrent states at rest.
        window: new tokens of a row in verify.
        block_size: tokens of a page.
    """
    check_mixer(
        config.num_linear_key_heads,
        config.num_linear_value_heads,
        config.linear_key_dim,
        config.linear_value_dim,
        jnp.dtype(state_dtype),
    )
    if tensor_cores_multiply(dtype):
        # Beside taps and value heads, prefill asks for no more than decode: it runs any number of heads per KV head.
        check_taps(config.conv_kernel)
        check_value_heads(config.num_linear_value_heads)
        group = config.num_attention_heads // config.num_kv_heads
        check_advance(width=config.head_dim, block_size=block_size, queries=window * group)
