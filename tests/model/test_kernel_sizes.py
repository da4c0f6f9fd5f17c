"""Which models the Mosaic kernels run: every release by its config, and what is refused."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from released_configs import MODELS, RELEASED

from gdn_jax.config import ModelConfig
from gdn_jax.kernel_sizes import check_kernel_sizes
from gdn_jax.kernels.dispatch import Implementation, UnsupportedKernelError, choose_kernels_for

BF16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_folder(MODELS / name)


@pytest.mark.parametrize("name", RELEASED)
def test_every_release_runs_without_drafts_and_with_three(name: str) -> None:
    for window in (1, 4):
        check_kernel_sizes(config_of(name), BF16, window=window)


def test_more_queries_than_a_program_has_room_for_are_refused_but_in_float32_whose_attention_is_plain_jax() -> None:
    config = config_of("qwen3.5-122b-a10b")
    group = config.num_attention_heads // config.num_kv_heads
    most = 128 // group
    check_kernel_sizes(config, BF16, window=most)
    with pytest.raises(UnsupportedKernelError, match=str(group * (most + 1))):
        check_kernel_sizes(config, BF16, window=most + 1)
    check_kernel_sizes(config, FLOAT32, window=most + 1)


def test_more_taps_than_a_prefill_has_room_for_are_refused_but_in_float32_whose_prefill_is_plain_jax() -> None:
    config = config_of("qwen3.5-4b")
    check_kernel_sizes(replace(config, conv_kernel=9), BF16)
    with pytest.raises(UnsupportedKernelError, match="at most 9 taps for the Mosaic mixer; got 10"):
        check_kernel_sizes(replace(config, conv_kernel=10), BF16)
    check_kernel_sizes(replace(config, conv_kernel=10), FLOAT32)


def test_more_value_heads_than_a_prefill_has_room_for_are_refused_but_in_float32_whose_prefill_is_plain_jax() -> None:
    config = config_of("qwen3.5-4b")
    check_kernel_sizes(replace(config, num_linear_value_heads=448), BF16)
    with pytest.raises(UnsupportedKernelError, match=r"at most 448 value heads.*got 512; ask for kernels='jax'"):
        check_kernel_sizes(replace(config, num_linear_value_heads=512), BF16)
    check_kernel_sizes(replace(config, num_linear_value_heads=512), FLOAT32)


def test_auto_takes_plain_jax_and_says_why_where_mosaic_refuses_the_value_heads() -> None:
    config = replace(config_of("qwen3.5-4b"), num_linear_value_heads=512)

    def check() -> None:
        check_kernel_sizes(config, BF16)

    choice = choose_kernels_for("auto", "NVIDIA H200", "9.0", check)
    assert (choice.implementation, choice.is_fallback) == (Implementation.JAX, True)
    assert "at most 448 value heads" in choice.reason
    with pytest.raises(UnsupportedKernelError, match="at most 448 value heads"):
        choose_kernels_for("mosaic", "NVIDIA H200", "9.0", check)


def test_other_widths_state_dtypes_and_pages_are_refused() -> None:
    config = config_of("qwen3.5-0.8b")
    with pytest.raises(UnsupportedKernelError, match="must be 64 or 128 for Mosaic kernels; got 96"):
        check_kernel_sizes(replace(config, linear_key_dim=96), BF16)
    with pytest.raises(UnsupportedKernelError, match=r"states must be one of float32, float16, bfloat16.*float8"):
        check_kernel_sizes(config, BF16, state_dtype="float8_e4m3fn")
    with pytest.raises(UnsupportedKernelError, match="32"):
        check_kernel_sizes(config, BF16, block_size=32)
