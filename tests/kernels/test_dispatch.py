"""The choice of kernels: by name where the device runs them, with the reason; never another one silently."""

import jax
import jax.numpy as jnp
import pytest

from gdn_jax.kernels.dispatch import (
    KERNEL_CHOICES,
    Implementation,
    UnsupportedKernelError,
    choose_kernels,
    choose_kernels_for,
    on_tensor_cores,
)

HOPPER = "NVIDIA H200", "9.0"


def refuse() -> None:
    raise UnsupportedKernelError("widths must be 64 or 128; got 96")


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (HOPPER, Implementation.MOSAIC),
        (("NVIDIA B200", "10.0"), Implementation.JAX),
        (("NVIDIA A100", "8.0"), Implementation.JAX),
        (("cpu", "none"), Implementation.JAX),
    ],
)
def test_auto_takes_the_kernels_of_the_device_and_says_which_device_that_is(
    device: tuple[str, str], expected: Implementation
) -> None:
    choice = choose_kernels_for("auto", *device)
    assert choice.implementation is expected
    assert device[0] in choice.reason
    assert jax.devices()[0].device_kind in choose_kernels("auto").reason


def test_sizes_that_the_kernels_cannot_run_are_run_by_plain_jax_or_refused_if_the_kernels_are_named() -> None:
    choice = choose_kernels_for("auto", *HOPPER, refuse)
    assert (choice.implementation, choice.is_fallback) == (Implementation.JAX, True)
    assert "widths must be 64 or 128; got 96" in choice.reason
    with pytest.raises(UnsupportedKernelError, match="got 96"):
        choose_kernels_for("mosaic", *HOPPER, refuse)
    assert choose_kernels_for("jax", *HOPPER, refuse).implementation is Implementation.JAX


@pytest.mark.parametrize("name", [name for name in KERNEL_CHOICES if name != "auto"])
def test_a_name_is_the_implementation_of_that_name(name: str) -> None:
    assert choose_kernels_for(name, *HOPPER).implementation == name


def test_mosaic_kernels_are_refused_on_what_is_not_a_hopper_gpu() -> None:
    with pytest.raises(UnsupportedKernelError, match=r"needs a GPU of compute capability 9\.0.*NVIDIA B200 has 10\.0"):
        choose_kernels_for("mosaic", "NVIDIA B200", "10.0")
    with pytest.raises(UnsupportedKernelError, match=r"needs a GPU of compute capability 9\.0.*cpu has none"):
        choose_kernels_for("mosaic", "cpu", "none")


def test_a_name_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnsupportedKernelError, match="auto, reference, jax, mosaic; got 'triton'"):
        choose_kernels_for("triton", *HOPPER)


def test_what_tensor_cores_multiply_goes_to_the_kernel_and_float32_to_plain_jax() -> None:
    call = on_tensor_cores("jax.numpy", "negative", jnp.positive)  # the names of any module will do
    for dtype, sign in ((jnp.bfloat16, -1), (jnp.float16, -1), (jnp.float32, 1)):
        assert call(jnp.ones((2,), dtype)).tolist() == [sign, sign]
